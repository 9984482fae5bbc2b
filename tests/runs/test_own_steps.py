"""Models with steps of their own, run as a person runs them: trained, killed and gone on with, and refused in words."""

import pytest
from conftest import QUICK, Ran, sampled
from run_events import logged, weights

SMALL = (
    *QUICK, "data.build._target_=steps.points", "train.epochs=3", "train.global_batch=8", "train.steps_per_call=1",
    "train.deterministic=true",
)  # fmt: skip
UNLABELLED = "+data.build.labelled=false"
LAYOUTS = {
    "one_device": ("strategy=one_device", "workers=1"),
    "mirrored": ("strategy=mirrored", "workers=2"),
    "multi_worker": ("strategy=multi_worker", "workers=2"),
}


@pytest.mark.slow
def test_a_gan_killed_in_mid_epoch_goes_on_to_the_last_bit(pipeline, tmp_path):
    (layout,) = sampled(("mirrored", "multi_worker"), 1)
    model = ("model.build._target_=steps.gan", UNLABELLED, *LAYOUTS[layout])
    whole: Ran = pipeline(*SMALL, *model, "output_dir=outputs/sane", "resume=never").ok()
    (sane,) = whole.folder.glob("outputs/sane/runs/*")
    first = tmp_path / "outputs/runs/*/checkpoints/step-000000000[36]-*.json"
    dies = f"train.callbacks=[{{_target_: dying.Dies, at: 8, marker: {tmp_path / 'killed'}, once_there: '{first}'}}]"
    killed: Ran = pipeline(*SMALL, *model, "checkpoint.every_steps=3", "launch.max_restarts=1", dies).ok()
    (folder,) = killed.folder.glob("outputs/runs/*")
    # Five steps are an epoch; the later one may not have been written yet.
    assert [event["step"] for event in logged(folder, "restored")] in ([3], [6])
    assert weights(folder) == weights(sane)
    assert len(weights(folder)) == 1
    last, undisturbed = (logged(where, "epoch")[-1] for where in (folder, sane))
    assert (last["loss"], last["metrics"]) == (undisturbed["loss"], undisturbed["metrics"])
    assert list(last["metrics"]) == ["d_loss", "g_loss"]


@pytest.mark.slow
def test_an_autoencoder_with_a_test_step_comes_to_the_same_under_every_strategy(pipeline):
    model = ("model.build._target_=steps.vae", "+model.build.noisy=false", UNLABELLED)
    every = ("strategy=one_device,mirrored,central_storage,multi_worker", "workers=null", "hardware=2cpu")
    ran: Ran = pipeline("-m", *SMALL, *model, *every).ok()
    ended = {folder.name.split("_", 1)[1]: logged(folder, "epoch")[-1] for folder in ran.run_folders}
    assert sorted(ended) == ["central_storage", "mirrored", "multi_worker", "one_device"]
    one = ended["one_device"]
    assert list(one["metrics"]) == list(one["val_metrics"]) == ["reconstruction_loss", "kl_loss"]
    for epoch in ended.values():
        assert [epoch["loss"], epoch["val_loss"]] == pytest.approx([one["loss"], one["val_loss"]], rel=1e-5)
        for name in ("metrics", "val_metrics"):
            assert epoch[name] == pytest.approx(one[name], rel=1e-5)


GAN = ("steps.gan", UNLABELLED, "strategy=mirrored")
WAYS = ("steps.classifier", "strategy=mirrored")
REFUSED = {
    ("steps.gan", UNLABELLED, "strategy=parameter_server"): "since asynchronous workers make Keras's step between the "
    "updates of others, received GAN, which has one. Try strategy=mirrored or strategy=multi_worker.",
    (*GAN, "train.learning_rate=0.1"): "Expected GAN, whose compile is its own, to be compiled in model.build, "
    "received train.learning_rate. Try arguments of model.build",
    (*GAN, "checkpoint.keep_best=val_loss"): "received one that cannot: GAN has no test_step of its own, and Keras's "
    "cannot evaluate it. Try a test_step, or checkpoint.keep_best=d_loss.",
    (*WAYS, "+model.build.way=under_a_condition"): "applies gradients, and uses results of metrics, "
    "outside of tf.cond and tf.while_loop, inside of which replicas cannot add them up",
    (*WAYS, "+model.build.way=without_optimizer"): "Expected a train_step that applies gradients by a Keras optimizer, "
    "received Classifier's, which applies none.",
    (*WAYS, "+model.build.way=raising"): ". Expected a train_step that takes a batch of the data, received this from "
    "that of Classifier. Try it on one batch with Keras alone.",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arguments", sampled(tuple(REFUSED), 2), ids=lambda arguments: arguments[-1])
def test_a_step_that_cannot_be_made_is_refused_in_one_sentence(pipeline, arguments):
    model, *others = arguments
    ran: Ran = pipeline(
        *(one for one in SMALL if "deterministic" not in one), f"model.build._target_={model}", *others, "workers=2"
    ).failed()
    assert REFUSED[arguments] in ran.result["error"]
    assert ran.result["error"].startswith("KeyError: 'nowhere' (" if "raising" in arguments[-1] else "Expected ")
