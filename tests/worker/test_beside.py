"""What a training goes on with beside weights and slots is the same in all processes, and in all that go on with it."""

import beside
import numpy as np
import pytest
import whole
from conftest import QUICK, Ran, sampled
from equality import last, weights

TRAINED = (
    "data.build._target_=beside.examples", "data.shuffle=false", f"train.epochs={beside.EPOCHS}",
    f"train.global_batch={beside.BATCH}",
)  # fmt: skip
CHANGED = ("model.build._target_=beside.net", "train.callbacks=[{_target_: beside.Changing}]")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def in_keras():
    """(weights, the last epoch's logs) of `beside.net` by Keras's own fit on one device."""
    (x, y), held_out = beside.examples()
    model = beside.net()
    history = model.fit(
        x, y, beside.BATCH, beside.EPOCHS, verbose=0, callbacks=[beside.Changing()], validation_data=held_out,
        validation_batch_size=beside.BATCH, shuffle=False,
    )  # fmt: skip
    return model.get_weights(), {name: values[-1] for name, values in history.history.items()}


@pytest.mark.parametrize("layout", [
    ("strategy=multi_worker", "workers=2"),
    *(pytest.param(*sampled(layouts, 1), marks=pytest.mark.slow) for layouts in (
        [("strategy=mirrored", "workers=2"), ("strategy=parameter_server", "workers=1")],
        [("strategy=one_device", "backend=jax"), ("strategy=multi_worker", "workers=2", "backend=jax")],
    )),
], ids=" ".join)  # fmt: skip
def test_whatever_a_callback_changes_trains_what_keras_trains(pipeline, in_keras, layout):
    expected, logs = in_keras
    ran: Ran = pipeline(*QUICK, *TRAINED, *CHANGED, *layout).ok()
    (folder,) = ran.run_folders
    for ours, theirs in zip(weights(folder), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
    epoch = last(folder, "epoch")
    ours = {"loss": epoch["loss"], "val_loss": epoch["val_loss"], **epoch["metrics"]}
    ours |= {f"val_{name}": value for name, value in epoch["val_metrics"].items()}
    assert ours == pytest.approx(logs, rel=TOLERANCE, abs=TOLERANCE)
    assert len({digest for event in ran.events("finished") for digest in event["weights"]}) == 1


# What is trained, and by which callbacks before the one that kills.
KILLED = {
    "changed": ((*TRAINED, CHANGED[0]), "{_target_: beside.Changing}, "),
    "running": ((*TRAINED, "model.build._target_=beside.running", "train.gather=true"), ""),
    "of a batch as a whole": (whole.GATHERED, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLED)
def test_a_training_that_was_killed_goes_on_with_all_of_it(pipeline, tmp_path, kind):
    (strategy,) = sampled(("mirrored", "multi_worker"), 1)
    trained, callbacks = KILLED[kind]
    # It is killed once, and so the second time it is not.
    ran: Ran = pipeline(
        "-m", *QUICK, *trained, f"strategy={strategy}", "workers=2", "sweep.repeats=2", "train.steps_per_call=1",
        "checkpoint.every_steps=4", "train.deterministic=true",
        f"train.callbacks=[{callbacks}{{_target_: dying.Dies, at: 11, marker: {tmp_path / 'died'}}}]",
    ).ok()  # fmt: skip
    assert sorted(result["restarts"] for result in ran.results) == [0, 1]
    for ours, theirs in zip(*map(weights, ran.run_folders), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    first, second = (last(folder, "epoch") for folder in ran.run_folders)
    assert {**first, "seconds": 0, "time": 0} == {**second, "seconds": 0, "time": 0}
