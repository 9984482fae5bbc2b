"""What a plan says it needs: bytes by place, bytes that travel, and sizes that are those of the built models."""

import dataclasses
import os
from pathlib import Path

import keras
import numpy as np
import own
import pytest
from conftest import QUICK, ROOT, Ran, sampled, with_
from loops import loop_over
from shipped_sizes import CHOICES, SHIPPED, built, planned

from pipeline import record
from pipeline.driver.session import Session
from pipeline.errors import UserError
from pipeline.plan.estimate import Estimate, estimate, rows_of_shards
from pipeline.plan.plan import Plan
from pipeline.plan.size import Layer, Size, Variable, facts, fingerprint, shipped
from pipeline.record.log import read_json
from pipeline.views.terminal.plan_text import estimate_lines
from pipeline.worker.tensorflow import size as of_model

# model=cnn on 28x28 images: 1,199,882 numbers of 4 bytes, each with a gradient and two slots of Adam's.
CNN = 4 * 1_199_882
# The state of the dropout's random numbers: a variable too, and never trained.
SEED = 2 * 8
# What a step keeps of an image on the way back: both convolutions and what is pooled of them, and the gradients before
# and after the second one, the largest. Kernels and the allocator take some more.
CNN_KEEPS = 1.06 * 4 * (26 * 26 * 32 + 2 * 24 * 24 * 64 + 12 * 12 * 64 + 128)
# Adam's count of steps and its learning rate.
ADAM_APART = 8 + 4
TABLES = ("model=recommender", "data=clicks")


def needs(*overrides: str, gpus: int = 0) -> tuple[Plan, Estimate]:
    plan = planned(*overrides, gpus=gpus)
    return plan, estimate(plan, shipped(plan))


def text_of(plan: Plan, made: Estimate) -> str:
    return "\n".join(estimate_lines(plan, made))


@pytest.mark.parametrize(("command", "batch"), [
    ("strategy=default", 64),
    ("strategy=one_device", 64),
    ("strategy=multi_worker workers=2", 64),
    ("strategy=central_storage workers=1", 64),
    # Activations follow the replica batch, not the global one.
    ("strategy=mirrored workers=1 train.replica_batch=32", 32),
    ("strategy=mirrored workers=2 train.replica_batch=32", 32),
    ("strategy=mirrored workers=2 train.global_batch=32", 16),
])  # fmt: skip
def test_a_device_with_a_copy_of_the_model_keeps_it_its_gradients_and_two_slots_of_adam(command, batch):
    _, made = needs(*command.split())
    (device,) = made.memory
    assert (device.parameters, device.gradients, device.slots) == (CNN + SEED, CNN, 2 * CNN + ADAM_APART)
    assert device.activations == pytest.approx(batch * CNN_KEEPS + 2 * CNN, rel=0.1)
    assert device.total == 4 * CNN + SEED + ADAM_APART + device.activations


@pytest.mark.parametrize("strategy", ["one_device workers=1", "mirrored workers=2", "central_storage workers=2"])
def test_the_two_batches_that_lie_ready_on_a_gpu_are_counted_on_it_and_those_of_cpus_are_not(strategy):
    batches_of = 2 * 64 * 4 * (28 * 28 + 1)
    plan, made = needs(*f"strategy={strategy}".split(), gpus=2)
    device, *others = made.memory
    parts = device.parameters + device.gradients + device.slots + device.activations
    assert (device.batches, device.total - parts) == (batches_of, batches_of)
    assert not any(other.batches for other in others)
    assert "activations  batches" in text_of(plan, made)
    plan, made = needs(*f"strategy={strategy}".split())
    assert (made.device.batches, "batches  " in text_of(plan, made).splitlines()[0]) == (0, False)


@pytest.mark.parametrize(("batch", "batches"), [(64, 4 * 32), (1_024, 4 * 4), (16_384, 4)])
def test_under_jax_the_blocks_that_lie_ready_on_a_gpu_are_counted(batch, batches):
    plan = planned("strategy=mirrored", "workers=2", f"train.replica_batch={batch}", gpus=2)
    device = estimate(dataclasses.replace(plan, backend="jax"), shipped(plan)).device
    assert device.batches == batches * batch * 4 * (28 * 28 + 1)


def test_a_servers_workers_are_fed_no_batches_ahead_and_data_that_are_read_know_their_batches():
    assert needs("strategy=parameter_server", "workers=1", gpus=2)[1].device.batches == 0
    # Of clicks, which a process makes as it trains: 11 numbers and a label.
    plan, made = needs(*TABLES, "strategy=mirrored", "workers=2", gpus=2)
    assert (made.example_bytes, made.device.batches) == (None, 2 * plan.training.replica_batch * 48)


TWO_BY_TWO = "strategy=multi_worker workers=4 hardware=2x2cpu"


@pytest.mark.parametrize(("overrides", "gpus", "total", "between"), [
    ("strategy=default", 0, 0, 0),
    ("strategy=one_device", 0, 0, 0),
    ("strategy=mirrored workers=1", 0, 0, 0),
    # n - 1 gradients to one device, n - 1 sums back.
    ("strategy=mirrored workers=4 hardware=4cpu", 0, 6 * CNN, 0),
    # n devices that each send 2 (n - 1) / n.
    ("strategy=mirrored hardware=4gpu", 4, 6 * CNN, 0),
    ("strategy=multi_worker workers=4 hardware=4cpu", 0, 6 * CNN, 0),
    ("strategy=multi_worker workers=4 hardware=4cpu train.gradient_bits=16", 0, 3 * CNN, 0),
    ("strategy=multi_worker workers=4 hardware=4cpu strategy.devices_per_process=2", 0, 6 * CNN, 0),
    ("strategy=multi_worker workers=4 hardware=4cpu strategy.collective=tensorflow", 0, 6 * CNN, 0),
    # In each host; of each in a ring; from its first process to the other.
    (f"{TWO_BY_TWO} strategy.devices_per_process=1", 0, 4 * CNN + 2 * CNN + 2 * CNN, 2 * CNN),
    # One device of each host sends to the next host.
    ("strategy=multi_worker hardware=2x4gpu", 4, 14 * CNN, 2 * 14 * CNN // 8),
    # Two devices read the variables, one sum travels each way between them, one to the host.
    ("strategy=central_storage workers=2", 0, 2 * (CNN + SEED) + 2 * CNN + CNN, 0),
    # A step of one worker, however many race.
    ("strategy=parameter_server workers=3", 0, 2 * CNN + SEED, 0),
])  # fmt: skip
def test_what_a_step_exchanges_is_what_the_strategys_formula_says(overrides, gpus, total, between):
    plan, made = needs(*overrides.split(), gpus=gpus)
    assert (made.exchanged.total, made.exchanged.between) == (total, between)
    sent = sum(each.sends * each.count for each in made.exchanged.traffic)
    received = sum(each.receives * each.count for each in made.exchanged.traffic)
    assert sent == received == total * plan.concurrent_steps


def test_exchanges_that_normalize_are_counted():
    for whose, count in (("global", 1), ("replica", 0)):
        made = needs("strategy=multi_worker", "workers=2", "model=resnet20", f"train.batch_statistics={whose}")
        assert (text_of(*made).count("38 small ones a step"), text_of(*made).count("small ones")) == (count, count)


def test_of_an_embedding_only_the_rows_of_a_batch_travel():
    _, made = needs(*TABLES, "strategy=parameter_server", "workers=2")
    dense = 4 * (56 * 64 + 64 + 64 * 32 + 32 + 32 + 1)
    rows = 64 * 3
    # A gradient's rows travel with their numbers.
    assert made.exchanged.total == 2 * dense + rows * 16 * 4 + rows * (16 * 4 + 4)
    tables = 4 * 16 * 1_220
    worker, server = made.memory
    assert (worker.parameters, worker.slots) == (dense + rows * 16 * 4, 0)
    assert (server.parameters, server.slots) == (dense + tables, 2 * (dense + tables) + ADAM_APART)
    # Copies on devices are whole.
    assert needs(*TABLES, "strategy=mirrored", "workers=2")[1].device.parameters == dense + tables


def test_a_plan_says_which_layers_are_on_which_devices_where_whole_ones_are_placed():
    command = ("strategy=model_parallel", "workers=2", "strategy.devices_per_replica=2", "model=mlp")
    plan = planned(*command)
    # The sizes that come with the package have no layers.
    assert shipped(plan) is None
    sizes = {"first": 1, "second": 1, "third": 2}
    variables = tuple(
        Variable(f"{name}/kernel", (10, size), "float32", True, 80 * size) for name, size in sizes.items()
    )
    layers = tuple(Layer(one.path[:-7], 4 * one.bytes, 9, True, (one.path,)) for one in variables)
    made = Size(variables, 0, ((0, 0),), 0, operations=5, forgetful_step=((1, 1),), layers=layers)
    size = record.from_plain(Size, record.to_plain(made))
    assert (size, size.layers) == (made, layers)
    made = estimate(plan, size)
    assert [(memory.place, memory.parameters, memory.slots) for memory in made.memory] == [
        ("CPU:0 CPU:2", 80, 160), ("CPU:1 CPU:3", 80, 160)
    ]  # fmt: skip
    assert "placed     CPU:0 CPU:2: first, second\nplaced     CPU:1 CPU:3: third" in text_of(plan, made)
    small = with_(plan, "hardware", memory_gib=300 / 2**30)
    assert "Does not fit: CPU:1 CPU:3 has" in text_of(small, estimate(small, size))
    with pytest.raises(UserError, match="which matches none of first, second, third"):
        estimate(planned(*command, "strategy.build.layout={fourth:1}"), size)


def test_variables_are_laid_over_servers_as_the_strategy_lays_them():
    # The order of the model's variables, each to the emptiest server: the dense kernel fills one of them.
    _, made = needs("strategy=parameter_server", "workers=2", "strategy.parameter_servers=2")
    first, second = made.memory[1:]
    assert {first.place, second.place} == {"server 3", "server 4"}
    assert max(first.parameters, second.parameters) >= 4 * 9_216 * 128
    together = first.parameters + second.parameters, first.slots + second.slots
    assert together == (CNN + SEED, 2 * CNN + ADAM_APART)
    # Of many the fullest and the emptiest are told.
    lines = estimate_lines(*needs("strategy=parameter_server", "strategy.parameter_servers=9", "workers=2"))
    assert [line.split("  ")[0] for line in lines[2:4]] == ["the fullest of 9 servers", "the emptiest of 9 servers"]
    assert len(lines) < 14


def test_traffic_between_hosts_counts_workers_and_servers_that_are_apart():
    on = ("hardware=2x1cpu", "hardware.link_gbps=10")
    plan, made = needs("strategy=parameter_server", "workers=2", "strategy.parameter_servers=1", *on)
    # The server shares a host with one of the two workers: the other's steps cross, that is every second one.
    exchanged = made.exchanged.total, made.exchanged.between, made.exchanged.busiest
    assert exchanged == (2 * CNN + SEED, CNN + SEED // 2, CNN + SEED)
    assert "3.84 ms at least at 10 Gbit/s" in text_of(plan, made)


@pytest.mark.parametrize(("rows", "servers", "least"), [(10, 4, 64), (1_000, 3, 1), (7, 9, 1), (5, 2, 10_000)])
def test_shards_are_even_and_the_first_are_longer(rows, servers, least):
    shards = rows_of_shards(rows, rows * 64, servers, least)
    assert list(shards) == [len(part) for part in np.array_split(np.arange(rows), len(shards))]
    assert len(shards) == max(1, min(servers, rows * 64 // least, rows))


def test_the_plan_says_which_tables_are_cut_and_which_variables_stay_whole_and_why():
    common, cut = (*TABLES, "strategy=parameter_server", "workers=2"), "strategy.min_shard_bytes=6000"
    plan, made = needs(*common, "strategy.parameter_servers=3", cut)
    assert made.shards == (("embedding_0/embeddings", (334, 333, 333)), ("embedding_1/embeddings", (100, 100)))
    text = text_of(plan, made)
    assert "shards     embedding_0/embeddings: 3 of 334 or 333 rows" in text
    assert "whole      hidden_0/kernel stays on one server: only embeddings can be sharded" in text
    assert "hidden_1/kernel" not in text
    whole = needs(*common, "strategy.parameter_servers=3")[1]
    assert whole.shards == whole.whole == ()
    of_whole, of_parts = ([each.parameters for each in one.memory[1:]] for one in (whole, made))
    assert (sum(of_parts), max(of_parts) < max(of_whole)) == (sum(of_whole), True)
    alone = needs(*common, "strategy.parameter_servers=1", cut)[1]
    assert alone.whole[0] == ("embedding_0/embeddings", "there is one server")


def test_a_device_with_too_little_memory_is_told_in_words():
    small = needs("strategy=mirrored", "workers=2", "hardware=2gpu", "hardware.memory_gib=0.02", gpus=2)
    assert "Does not fit: each GPU has 0.02 GiB, and needs 58 MiB." in text_of(*small)
    assert needs("strategy=mirrored", "hardware=2gpu", "hardware.memory_gib=80", gpus=2)[1].too_small == ()


@pytest.mark.parametrize("exchange", ["null", "parameter_server"])
def test_what_is_not_known_is_said_and_no_number_is_made_up(exchange):
    plan, made = needs("strategy=mirrored", "workers=2", f"strategy.exchange={exchange}")
    assert (made.exchanged, made.device.place) == (None, "one copy")
    assert "unknown for this strategy" in text_of(plan, made)
    made = estimate(plan, dataclasses.replace(shipped(plan), step=None, unknown="it has a loop"))
    assert made.device.activations is None
    assert "Activations are not known: it has a loop." in text_of(plan, made)
    assert "over 18 MiB" in text_of(plan, made)


def test_every_built_in_model_has_a_size_on_every_data_set_it_takes_and_no_other():
    for model, data in CHOICES:
        plan = planned(f"model={model}", f"data={data}")
        assert shipped(plan), (model, data)
        assert shipped(with_(plan, "training", precision="mixed_bfloat16")), (model, data)
    assert (ROOT / "pipeline/plan/sizes.json").stat().st_size < 100_000
    # Arguments that only choose examples leave it known.
    changed = planned("data=synthetic", "data.build.train_examples=64", "data.build.noise=0.1", "data.build.seed=7")
    assert shipped(changed) == shipped(planned("data=synthetic"))
    other = ("data.build.shape=[32,32,3] data=synthetic", "model.build.dense_units=64", "train.optimizer=sgd")
    assert [shipped(planned(*keys.split())) for keys in other] == [None] * 3


QUICKLY_BUILT = [("cnn", "mnist5k", "float32"), ("recommender", "clicks", "float32"), ("mlp", "digits", "float32")]
# In half the precision, a model differs alike whatever the data.
OTHERS = [
    each for each in SHIPPED if each not in QUICKLY_BUILT and (each[2] == "float32" or each[1] in ("cifar10", "clicks"))
]


@pytest.mark.parametrize("choices", [QUICKLY_BUILT, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_shipped_sizes_are_those_of_the_built_models(choices):
    for plan, made in built(choices if choices is QUICKLY_BUILT else sampled(OTHERS, len(OTHERS) // 6)):
        assert shipped(plan) == made, f"{facts(plan)}: run python tests/support/shipped_sizes.py"


def of(model: keras.Model, part: object) -> Size:
    """The size of a model built on data under no strategy."""
    return of_model.of(loop_over(lambda: model, part))


# Made in the test: they make variables, after which devices can no longer be chosen.
@pytest.mark.parametrize(("optimizer", "slots"), [
    (lambda: keras.optimizers.SGD(), 0),
    (lambda: keras.optimizers.SGD(momentum=0.9), 1),
    (lambda: keras.optimizers.SGD(use_ema=True), 1),
    (lambda: keras.optimizers.RMSprop(), 1),
    (lambda: keras.optimizers.Lion(), 1),
    (lambda: keras.optimizers.Adam(), 2),
    (lambda: keras.optimizers.Adam(amsgrad=True), 3),
    (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW()), 2),
    # Rows and columns, and the whole.
    (lambda: keras.optimizers.Adafactor(), (6 + 5) / (6 * 5) + 1),
])  # fmt: skip
def test_slots_are_counted_in_the_built_optimizer(optimizer, slots):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    model.compile(optimizer(), loss="mse")
    size = of(model, (np.zeros((32, 6), "float32"), np.zeros((32, 1), "float32")))
    counted = [each.slot_bytes / each.bytes for each in size.variables]
    assert counted[0] == pytest.approx(slots)
    assert set(counted) == {slots} or slots % 1
    assert sum(each.bytes for each in size.variables) == 4 * model.count_params()
    assert 0 < size.optimizer_bytes < 64


def test_what_backpropagation_keeps_is_told_for_a_subclassed_model_and_unknown_where_that_has_a_loop():
    size = of(own.two_headed(), own.two_headed_data()[0])
    # Both layers of 8, their concatenation and its square, and what the losses keep.
    at_least = 4 * (8 + 8 + 16)
    assert at_least <= max(growing for _, growing in size.step) <= at_least + 4 * 80
    assert size.unknown is None
    # Not what a loop keeps.
    size = of(own.masked(), own.padded_data()[0])
    assert (size.step, "loop" in size.unknown) == (None, True)
    table = next(each for each in size.variables if each.is_table)
    assert (table.shape, table.rows_per_example, table.whole) == ((20, 8), 6, None)


def test_tables_that_are_called_twice_or_cannot_be_cut_are_known():
    ids = keras.Input((6,), dtype="int32")
    shared = keras.layers.Embedding(20, 4, name="shared")
    kept = keras.layers.Embedding(20, 4, embeddings_constraint="non_neg", name="kept")
    penalised = keras.layers.Embedding(20, 4, embeddings_regularizer="l2", name="penalised")
    joined = keras.layers.Concatenate(axis=1)([shared(ids), shared(ids[:, :2]), kept(ids), penalised(ids)])
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(joined)))
    model.compile("sgd", loss="mse")
    size = of(model, (np.zeros((32, 6), "int32"), np.zeros((32, 1), "float32")))
    found = {each.path.partition("/")[0]: (each.rows_per_example, each.whole) for each in size.variables}
    assert found["shared"] == (8, None)
    assert found["kept"] == (6, "its layer has an embeddings_constraint, which needs the whole of it")
    assert found["penalised"] == (None, "its layer has an embeddings_regularizer, which needs the whole of it")


def test_reading_the_graph_of_a_step_that_has_run_compiles_nothing():
    part = (np.zeros((64, 8, 8, 1), "float32"), np.zeros(64, "int32"))
    loop = loop_over(lambda: own.tiny((8, 8, 1), 10), part)
    loop.call(2)
    loop.graph()
    assert loop._train.experimental_get_tracing_count() == 1


OWN = ("model.build._target_=own.tiny", "data.build._target_=own.numbered")


def test_a_model_of_ones_own_is_built_once_and_then_known(pipeline):
    ran: Ran = pipeline("-m", "mode=plan", "strategy=mirrored,multi_worker", "workers=2", *OWN).ok()
    assert ran.out.count("Building the model once to know its size") == 1
    (kept,) = ran.folder.glob("outputs/sizes/*.json")
    assert str(kept.relative_to(ran.folder)) in ran.out
    size = read_json(Size, kept)
    variables = sum(each.bytes for each in size.variables)
    assert (variables, size.example_bytes) == (4 * (8 * 8 * 10 + 10), 8 * 8 * 4 + 4)
    again: Ran = pipeline("mode=plan", "strategy=parameter_server", "workers=2", *OWN).ok()
    assert ("Building" in again.out, "server 3" in again.out) == (False, True)
    # Where a run would have to learn it, that is what building it tells.
    kept.unlink()
    ran = pipeline(*QUICK, *OWN, "workers=2", "train.steps=2").ok()
    told = read_json(Size, kept)
    assert (told.variables, len(ran.events("sized"))) == (size.variables, 1)
    assert told.step[-1] == pytest.approx(size.step[-1], rel=0.2)


def test_a_model_that_cannot_be_built_is_planned_all_the_same_with_the_reason(pipeline):
    command = ("mode=plan", "strategy=mirrored,multi_worker", "model.build._target_=own.raises", "data=digits")
    ran: Ran = pipeline("-m", *command).ok()
    assert ran.out.count("Building the model once") == 1
    assert ran.out.count("estimate   none, since the model could not be built: RuntimeError: the moon is not full") == 2
    assert ran.out.count("\nrank") == 2
    assert not list(ran.folder.glob("outputs/sizes/*.json"))


def test_a_sweep_of_plans_ends_with_a_table_to_compare_them(pipeline):
    ran: Ran = pipeline("-m", "mode=plan", "strategy=one_device,mirrored,parameter_server", "workers=1,2").ok()
    table = ran.out.rpartition("exchanged/example  status")[2].splitlines()
    cells = {" ".join(line.split()[1:3]): " ".join(line.split()[3:]) for line in table if line[:1].isdigit()}
    assert cells["one_device 1"] == "58 MiB 0 B 0 B PLANNED"
    assert cells["one_device 2"] == "- - - REFUSED"
    assert cells["mirrored 2"] == "58 MiB 9.2 MiB 73 KiB PLANNED"
    assert cells["parameter_server 2"] == "48 MiB 9.2 MiB 146 KiB PLANNED"
    assert "received another with workers=2. Try workers=1." in ran.out
    assert "no reason was given" not in ran.out


def test_a_changed_source_file_is_another_model(tmp_path):
    from pipeline.driver import forecast

    plan = with_(planned(), "model", build={"_target_": "mine.model"})
    (tmp_path / "mine.py").write_text("from parts import width\n")
    # What is no file of Python's: an editor's lock, which leads nowhere, and a name that is no text.
    (tmp_path / ".#mine.py").symlink_to("ann@host.4711")
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff.py")).touch()
    session, names = Session((str(tmp_path),), {}, lambda: None, lambda *_: None), []
    for width in (1, 1, 2):
        (tmp_path / "parts.py").write_text(f"width = {width}\n")
        # Of the model's size, and of a baseline's speed.
        names.append((forecast.size_file(plan, tmp_path, session.search), session._baseline_file(plan, tmp_path)))
    assert names[0] == names[1]
    assert not set(names[0]) & set(names[2])
    assert fingerprint(plan, "", {}) != fingerprint(with_(plan, "training", precision="mixed_bfloat16"), "", {})
