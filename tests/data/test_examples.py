"""Examples made while they are read: in one order whoever reads them, each once an epoch, from any position."""

import dataclasses
from functools import partial
from itertools import chain, combinations
from typing import Any

import numpy as np
import own
import pytest
import shards
import tensorflow as tf
from batch_layouts import LAYOUTS, ONE, expect_to_go_on, labels, leaves, part_of, stream
from conftest import sampled
from ports import reserved_ports

from pipeline import data as sources
from pipeline.data.examples import Broken, Examples, Segment, rows
from pipeline.worker.data import inspection, reading, source
from pipeline.worker.data.batches import DEFAULT, Data, count, spec
from pipeline.worker.data.reading import Reading
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.model_error import TrainingError


def varied(example: Any, seed: Any) -> Any:
    return example[0] + tf.random.stateless_uniform([4], seed), example[1]


def in_files(folder, examples, vary=False):
    sizes = [examples // 2, examples // 3, examples - examples // 2 - examples // 3]
    part = sources.tfrecord(path=str(shards.write(folder / f"of {examples}", sizes)))[0]
    return dataclasses.replace(part, augment=varied if vary else None)


def of_rows(folder, examples, vary=False):
    def decode(row):
        return tf.fill([4], tf.cast(row["label"], tf.float32) / 100), tf.cast(row["label"], tf.int32)

    types = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((), tf.int32))
    return Examples({"label": np.arange(examples)}, types, decode=decode, augment=varied if vary else None)


def opened(folder, examples, vary=False):
    """A data set that was taken apart."""
    made = tf.data.Dataset.range(examples).map(lambda n: (tf.fill([4], tf.cast(n, tf.float32)), tf.cast(n, tf.int32)))
    return reading.opened(made)


PLAIN = [pytest.param(make, id=make.__name__) for make in (in_files, of_rows)]
VARIED = [pytest.param(partial(make, vary=True), id=f"{make.__name__} varied") for make in (in_files, of_rows)]
MAKES = [*PLAIN, *VARIED]


# Where it begins is the same arithmetic for arrays and data sets, which take all places in `test_tpu.py`.
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", sampled(list(LAYOUTS), 1))
def test_a_stream_of_examples_goes_on_from_any_position_shuffled_or_in_their_own_order(tmp_path, name, make):
    layout, shuffle = LAYOUTS[name], isinstance(make, partial)
    places = [(1, layout.steps - 1)] if shuffle else [(0, 1), (1, layout.steps), (2, 0)]
    expect_to_go_on(part_of(partial(make, tmp_path), layout), layout, shuffle, places, epochs=3)


@pytest.mark.parametrize("make", [*MAKES, pytest.param(opened, id="opened")])
def test_any_number_of_processes_trains_the_same_global_batches(tmp_path, make):
    part, position = make(tmp_path, 50), Position(1, 24)
    layouts = ONE, *(dataclasses.replace(ONE, replicas=2, first=first) for first in (0, 1))
    each = [leaves(stream(part, layout, True, 1, position).take(8)) for layout in layouts]
    for (examples, x, y), *halves in zip(*each, strict=True):
        sizes, first, second = zip(*halves, strict=True)
        assert (sizes, [*chain(*first)], [*chain(*second)]) == ((examples, examples), x, y)


@pytest.mark.parametrize("make", PLAIN)
def test_each_example_comes_once_an_epoch_in_an_order_of_that_epoch_and_seed(tmp_path, make):
    part = make(tmp_path, 50)

    def orders(seed, shuffle=True, epochs=2):
        steps = labels(stream(part, ONE, shuffle, seed).take(epochs * ONE.steps))
        return [list(chain(*steps[epoch * ONE.steps :][: ONE.steps])) for epoch in range(epochs)]

    every = [*orders(1), *orders(2)]
    assert all(sorted(order) == list(range(50)) for order in every)
    assert all(one != other for one, other in combinations(every, 2))
    assert orders(1, epochs=1) == every[:1]
    assert orders(1, shuffle=False, epochs=1) == [list(range(50))]


def test_an_example_is_varied_by_itself_and_its_epoch_whoever_reads_it(tmp_path):
    part = in_files(tmp_path, 50, vary=True)

    def by_label(part, layout, position=BEGINNING):
        steps = stream(part, layout, True, 1, position).take(layout.steps_after(position.examples))
        batches = chain(*(batches for _, batches in steps.as_numpy_iterator()))
        return {int(y): x.tolist() for batch in batches for x, y in zip(*batch, strict=True)}

    whole = by_label(part, ONE)
    share = dataclasses.replace(part, raw=part.raw[1:])
    counts = (part.raw[0].records, count(share))
    mine = by_label(share, dataclasses.replace(ONE, replicas=2, first=1, counts=counts, process=1))
    assert mine == {label: whole[label] for label in mine}
    assert by_label(part, ONE, Position(1)) != whole


def test_what_is_broken_is_left_out_and_all_else_is_there(tmp_path):
    folder = shards.write(tmp_path, [20, 30, 10])
    shards.flip(folder, 1, (0, 14), (7, 2), (8, 14), (29, 14))
    # Two in a row whose lengths are wrong can be told from one by their bytes alone.
    shards.flip(folder, 0, (3, 2), (9, 2), (10, 2))
    shards.cut(folder, 2, 6)
    part = sources.tfrecord(path=str(folder))[0]
    found = part.look(part, 0, 1, True)
    flaws = [(each.first, each.examples) for each in found]
    assert flaws == [(3, 1), (9, 2), (0, 1), (7, 1), (8, 1), (29, 1), (6, 4)]
    rest, lost = part.without(found), {3, 9, 10, 20, 27, 28, 49, 56, 57, 58, 59}
    assert count(rest) == 60 - len(lost)
    layout = dataclasses.replace(ONE, counts=(49,))
    trained = list(chain(*labels(stream(rest, layout, True, 1).take(layout.steps))))
    assert sorted(trained) == sorted(set(range(60)) - lost)
    shares = [part.look(part, number, 2, True) for number in range(2)]
    assert sorted(map(str, chain(*shares))) == sorted(map(str, found))
    part = of_rows(None, 10).without([Broken(None, row, 1, f"example {row}", "is broken") for row in (3, 7)])
    assert part.raw["label"].tolist() == [0, 1, 2, 4, 5, 6, 8, 9]
    assert rows({"a": np.arange(3), "b": (np.arange(3) * 2,)}, np.array([2, 0]))["b"][0].tolist() == [4, 0]


def test_records_of_segments_are_cut_in_the_middle_and_read_from_a_byte(tmp_path):
    part = in_files(tmp_path, 50)
    middle = dataclasses.replace(part, raw=reading.cut(part.raw, 20, 45))
    layout = dataclasses.replace(ONE, counts=(25,))
    assert list(chain(*labels(stream(middle, layout, False, 1).take(layout.steps)))) == list(range(20, 45))
    # As after a broken record.
    offset = 2 * len(shards.record(0))
    rest = dataclasses.replace(part, raw=(Segment(part.raw[0].path, 2, first=3, offset=offset, at=2),))
    layout = dataclasses.replace(ONE, counts=(2,))
    assert list(chain(*labels(stream(rest, layout, False, 0).take(1)))) == [3, 4]


@pytest.mark.parametrize("make", MAKES)
def test_steps_that_are_handed_out_train_what_their_numbers_stand_for(tmp_path, make):
    part = make(tmp_path, 50)
    layout = dataclasses.replace(ONE, global_batch=8)
    wanted = leaves(stream(part, layout, True, 1, Position(0, 16)).take(12))
    made = source.source(Data(part, layout, True, 1), [part], workers=3, position=Position(0, 16))
    iterator = iter(made.made())
    call = tf.function(lambda rows, start, stop: made.batch(iterator, rows, start, stop))
    # A step that was passed is looked for anew.
    of_steps = [made.rows(2) for _ in range(0, 12, 2)]
    for step in (0, 4, 6, 8, 2, 10):
        rows, edges = of_steps[step // 2]
        for place in range(2):
            x, y = call(rows, edges[place], edges[place + 1])
            assert y.numpy().tolist() == wanted[step + place][2], step
            # The same but for how the graph around it divides.
            np.testing.assert_allclose(x, wanted[step + place][1], rtol=1e-6)


@pytest.mark.parametrize("kept", ["memory", "file"])
@pytest.mark.parametrize("make", [*PLAIN, VARIED[0]])
def test_examples_that_are_kept_are_those_that_were_made(tmp_path, make, kept):
    part = make(tmp_path, 50)
    again = inspection.in_memory(part) if kept == "memory" else inspection.in_file(part, tmp_path / "cache", "name")
    assert count(again) == 50
    assert spec(again)[0].shape == spec(part)[0].shape
    made, wanted = (leaves(stream(each, ONE, False, 1).take(ONE.steps)) for each in (again, part))
    assert [step[2] for step in made] == [step[2] for step in wanted]
    if part.augment is None:
        assert made == wanted
    # It is read, not made, from now on.
    assert again.decode is None


def test_a_data_set_of_any_types_but_of_one_size_is_kept_in_a_file(tmp_path):
    def example(n):
        return {"text": tf.strings.as_string(n), "flags": tf.stack([n > 3, n < 5]), "half": tf.cast(n, tf.float16)}, n

    part = tf.data.Dataset.range(7).map(example)
    kept = inspection.in_file(part, tmp_path / "cache", "name")
    layout = dataclasses.replace(ONE, counts=(7,))
    made, wanted = (leaves(stream(each, layout, False, 0).take(1)) for each in (kept, part))
    assert made == wanted
    (file,) = (tmp_path / "cache").glob("*.tfrecord")
    before = file.stat().st_mtime_ns
    inspection.in_file(part, tmp_path / "cache", "name")
    assert file.stat().st_mtime_ns == before
    part = tf.data.Dataset.range(3).map(lambda n: (tf.range(n), n))
    with pytest.raises(TrainingError, match=r"Expected examples of one size to keep, received .* Try data.cache=none"):
        inspection.in_memory(part)


@pytest.mark.parametrize("kind", ["files", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("set", "opened"))])
def test_services_make_the_same_batches_in_the_same_order(tmp_path, kind):
    part = own.serial_set(50)[0] if kind == "set" else {"files": in_files, "opened": opened}[kind](tmp_path, 50)
    with reserved_ports(3) as ports:
        addresses = tuple(f"127.0.0.1:{port}" for port in ports)
        servers = [reading.serve(address) for address in addresses]
        served = Reading(servers=addresses)
        for layout in (ONE, LAYOUTS["second of two processes"]):
            both = [stream(part, layout, True, 1, Position(0, 24), each).take(9) for each in (served, DEFAULT)]
            assert leaves(both[0]) == leaves(both[1])
        del servers


@pytest.mark.slow
def test_only_maps_that_draw_on_their_examples_alone_are_taken_apart():
    numbers, variable, drawn = tf.data.Dataset.range(10), tf.Variable(1.0), tf.random.uniform
    for each in (
        numbers,
        numbers.map(lambda n: (n, n)).shuffle(3),
        numbers.map(lambda n: (n, drawn([]))),
        numbers.map(lambda n: (n, tf.numpy_function(lambda n: n, [n], tf.int64))),
        numbers.map(lambda n: (n, variable + 1.0)),
        numbers.map(lambda n: (n, tf.while_loop(lambda k: k < n, lambda k: k + drawn([], 1, 2, tf.int64), [n]))),
    ):
        assert reading.opened(each) is each
    through = numbers.filter(lambda n: n != 4).map(lambda n: n + 1).map(lambda n: {"a": (n, n * 2)}, 2).prefetch(2)
    part = reading.opened(through)
    assert part.raw is not through
    assert [part.decode(n)["a"][1].numpy() for n in part.raw] == [each["a"][1].numpy() for each in through]


def test_a_batch_with_bad_values_is_refused():
    def first(x, y, classes=None):
        part = tf.data.Dataset.from_tensor_slices((np.asarray(x, np.float32), np.asarray(y, np.int32)))
        layout = BatchLayout(2, 1, 0, 1, (len(x),))
        return next(iter(stream(part, layout, False, 0, reading=Reading(classes=classes))))

    first([0.0, 1.0], [0, 9])
    finite, labels = "Expected training data of finite numbers", "Expected labels from 0 to 2"
    for value, label, words in ((np.nan, 1, finite), (np.inf, 1, finite), (1.0, -1, labels), (1.0, 3, labels)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            first([0.0, value], [0, label], classes=3)
