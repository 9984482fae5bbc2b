"""Any number of workers trains what one device trains, to the last digits that arithmetic allows."""

import pytest
import whole
from conftest import QUICK, sampled
from equality import assert_equal, losses, sweep

EACH = "strategy=one_device,mirrored,central_storage,multi_worker"
# What is trained under each strategy; where it is swept, one value is drawn.
MODELS: dict[str, tuple[int, tuple[str | tuple[str, ...], ...]]] = {
    "momentum or adam with batch normalization, on 1 and 4 workers, of which some have no example": (
        8,
        (
            "strategy=one_device,default,mirrored,central_storage,multi_worker", "workers=1,4", "model=normalised",
            # The last batch of an epoch and of a validation has one.
            "data=numbered", "data.build.examples=225", "data.build.validation=33",
            ("model.build.optimizer=sgd", "model.build.optimizer=adam"),
        ),
    ),
    "clipping, moving averages, schedules, what the config makes, and class weights": (
        4,
        (
            EACH, "workers=null", "model=normalised", "data=numbered", "train.class_weight={0: 3.0, 4: 0.5}",
            (
                *(f"model.build.optimizer={name}" for name in ("clipped", "overwritten", "scheduled")),
                "train.optimizer={_target_: keras.optimizers.SGD, momentum: 0.9, gradient_accumulation_steps: 2}",
            ),
        ),
    ),
    "many inputs and outputs, weighted and added losses, every reduction": (
        4,
        (
            EACH, "workers=null", "model=two_headed", "data=two_headed",
            ("data.build.weighted=false", "data.build.weighted=true"),
            tuple(f"model.build.reduction={way}" for way in ("sum_over_batch_size", "sum", "mean_with_sample_weight")),
        ),
    ),
    "losses and metrics of the batch as a whole": (
        3, ("strategy=one_device,mirrored,multi_worker", "workers=null", *whole.NAMED[:2], "train.gather=true")
    ),
    "masked sequences": (4, (EACH, "workers=null", "model=masked", "data=padded")),
    # One process alone reads the whole log in its order; several read shards of it.
    "tables of which a step reads few rows, and an area under a curve": (
        3,
        (
            "strategy=one_device,mirrored,central_storage", "workers=null", "model=recommender", "data=clicks",
            "data.build.train_examples=2500", "data.build.validation_examples=1000",
        ),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_strategy_trains_what_one_device_trains(pipeline, name):
    points, arguments = MODELS[name]
    drawn = [one if isinstance(one, str) else sampled(one, 1)[0] for one in arguments]
    (folders,) = sweep(pipeline, points, *drawn).values()
    assert_equal(folders)


DRAWN = "strategy={}".format(*sampled(("mirrored", "central_storage", "multi_worker"), 1))
# What replicas learn from data that has a signal, by how little of it would do: half the width trains too.
LEARNT: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "clicks": ("auc", 0.78, (
        "strategy=multi_worker", "model=recommender", "data=clicks", "train.epochs=2", "train.replica_batch=128",
    )),
    "dropout seeds and gradients of 16 bits": ("accuracy", 0.9, (
        DRAWN, "train.gradient_bits=16", "data=digits", "model.build.filters=[8,16]", "train.learning_rate=0.005",
        "train.epochs=8",
    )),
    # Convolutions of half width take a CPU long.
    "mixed precision": ("accuracy", 0.5, (
        DRAWN, "train.precision={}".format(*sampled(("mixed_bfloat16", "mixed_float16"), 1)), "data=digits",
        "model.build.filters=[4,8]", "model.build.dense_units=32", "train.learning_rate=0.01", "train.epochs=5",
    )),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNT)
def test_several_replicas_learn_and_have_nothing_to_note(pipeline, name):
    metric, least, arguments = LEARNT[name]
    result = pipeline(*QUICK, "workers=2", *arguments, "train.check=true").ok().result
    assert result["val_metrics"][metric] > least
    assert result["notes"] == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_to_the_last_bit(pipeline):
    (strategy,) = sampled(("mirrored", "multi_worker"), 1)
    ran = pipeline(
        "-m", *QUICK, f"strategy={strategy}", "workers=2", "train.deterministic=true", "data=digits",
        "model.build.filters=[8,16]", "train.steps=20", "train.steps_per_call=4,7",
    ).ok()  # fmt: skip
    first, second = map(losses, ran.run_folders)
    assert len(first) == 20
    assert first == second


def test_asynchronous_workers_refuse_what_is_no_sum_and_gathering(pipeline, asked):
    ran = pipeline(*QUICK, "strategy=parameter_server", "workers=1", *whole.NAMED).failed()
    assert "received largest (Largest), whose state is no" in ran.err
    refused = asked("strategy=parameter_server", "train.gather=true", "mode=plan").failed(2)
    assert "Expected train.gather=false" in refused.err
