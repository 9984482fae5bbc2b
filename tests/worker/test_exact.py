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
    "clipping, moving averages, schedules, and what the config makes": (
        4,
        (
            EACH, "workers=null", "model=normalised", "data=numbered",
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


@pytest.mark.slow
def test_the_recommender_finds_the_signal_on_several_processes(pipeline):
    ran = pipeline(
        *QUICK, "strategy=multi_worker", "workers=2", "model=recommender", "data=clicks", "train.epochs=2",
        "train.replica_batch=128", "train.check=true",
    ).ok()  # fmt: skip
    assert ran.result["val_metrics"]["auc"] > 0.78
    assert ran.result["notes"] == []


@pytest.mark.slow
def test_dropout_seeds_and_half_width_gradients_train_too(pipeline):
    (strategy,) = sampled(("mirrored", "central_storage", "multi_worker"), 1)
    result = pipeline(
        *QUICK, f"strategy={strategy}", "workers=2", "train.gradient_bits=16", "data=digits",
        "model.build.filters=[8,16]", "train.learning_rate=0.005", "train.epochs=8", "train.check=true",
    ).ok().result  # fmt: skip
    assert result["val_metrics"]["accuracy"] > 0.9
    assert result["notes"] == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_to_the_last_bit(pipeline):
    (strategy,) = sampled(("mirrored", "multi_worker"), 1)
    ran = pipeline(
        "-m", *QUICK, f"strategy={strategy}", "workers=2", "train.deterministic=true", "data=digits",
        "model.build.filters=[8,16]", "train.steps=20", "train.steps_per_call=4,7",
    ).ok()  # fmt: skip
    runs = [losses(folder) for folder in ran.run_folders]
    assert len(runs) == 2
    assert len(runs[0]) == 20
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_metrics_and_losses_of_the_batch_as_a_whole_are_exact_over_processes_and_in_static_batches(pipeline):
    kinds = ("strategy=one_device", "strategy=mirrored workers=2", "strategy=multi_worker workers=2")
    for kind in kinds:
        ran = pipeline(*QUICK, *kind.split(), *whole.GATHERED, "train.check=true").ok()
        assert [result["notes"] for result in ran.results if not result["oversubscribed"] and result["notes"]] == []
    assert_equal(ran.run_folders)
    assert all(result["metrics"]["least"] < 0 < result["metrics"]["most"] for result in ran.results)


def test_asynchronous_workers_refuse_what_is_no_sum_and_gathering(pipeline, asked):
    ran = pipeline(*QUICK, "strategy=parameter_server", "workers=1", *whole.NAMED).failed()
    assert "received largest (Largest), whose state is no" in ran.err
    refused = asked("strategy=parameter_server", "train.gather=true", "mode=plan").failed(2)
    assert "Expected train.gather=false" in refused.err
