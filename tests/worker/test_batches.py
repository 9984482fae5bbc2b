"""The stream of batches: what begins at a position goes on exactly as what has come there."""

import dataclasses
import time
from itertools import chain
from typing import Any

import numpy as np
import own
import pytest
import tensorflow as tf
from batch_layouts import EXAMPLES, LAYOUTS, ONE, expect_to_go_on, labels, leaves, part_of, stream
from conftest import sampled

from pipeline.worker.layout import BatchLayout, Position


# The order of the examples is drawn beside how they are laid out; others in each run of CI.
@pytest.mark.parametrize(
    ("name", "shuffle"), [*((name, True) for name in sampled(list(LAYOUTS), 3)), ("one replica", False)]
)
@pytest.mark.parametrize("make", [own.serial_arrays, own.serial_set])
def test_a_stream_from_a_position_goes_on_as_the_one_from_the_beginning(make, name, shuffle):
    layout = LAYOUTS[name]
    part = part_of(lambda examples: make(examples)[0], layout)
    expect_to_go_on(part, layout, shuffle, [(0, 1), (1, layout.steps - 1), (1, layout.steps)])


@pytest.mark.parametrize("make", [own.serial_arrays, own.serial_set])
def test_other_replicas_go_on_with_the_same_global_batches(make):
    part, position = make(EXAMPLES)[0], Position(1, 24)
    one = labels(stream(part, ONE, True, 1, position).take(8))
    four = [dataclasses.replace(ONE, replicas=4, first=first, local=2) for first in (0, 2)]
    each = [labels(stream(part, layout, True, 1, position).take(8)) for layout in four]
    assert [first + second for first, second in zip(*each, strict=True)] == one


@pytest.mark.parametrize("make", [own.serial_arrays, own.serial_set])
@pytest.mark.parametrize(("global_batch", "sizes"), [(5, [5, 5, 5, 5, 5, 1]), (20, [20, 6]), (60, [26])])
def test_another_global_batch_trains_the_rest_of_the_epoch_and_whole_ones_after_it(make, global_batch, sizes):
    part, other = make(EXAMPLES)[0], dataclasses.replace(ONE, global_batch=global_batch)
    begun = labels(stream(part, ONE, True, 1).take(2))
    assert other.steps_after(24) == len(sizes)
    rest = labels(stream(part, other, True, 1, Position(0, 24)).take(len(sizes) + other.steps))
    assert [len(batch) for batch in rest[: len(sizes)]] == sizes
    assert sorted(chain(*begun, *rest[: len(sizes)])) == list(range(EXAMPLES))
    next_epoch = labels(stream(part, other, True, 1, Position(1)).take(other.steps))
    assert rest[len(sizes) :] == next_epoch
    assert sorted(chain(*next_epoch)) == list(range(EXAMPLES))


@pytest.mark.parametrize("last", ["left out", "padded"])
@pytest.mark.parametrize("make", [own.serial_arrays, own.serial_set])
def test_another_global_batch_of_static_shape_counts_the_rest_once(make, last):
    part, layout = make(EXAMPLES)[0], dataclasses.replace(LAYOUTS[last], global_batch=8)
    steps = layout.steps_after(24)
    rest = stream(part, layout, True, 1, Position(0, 24)).take(steps)
    totals = [int(total) for total, _ in rest.as_numpy_iterator()]
    assert totals == {"left out": [8, 8, 8], "padded": [8, 8, 8, 2]}[last]
    counted = [batch[:total] for batch, total in zip(labels(rest), totals, strict=True)]
    begun = labels(stream(part, ONE, True, 1).take(2))
    assert len({*chain(*begun, *counted)}) == 24 + sum(totals)


def test_replicas_are_promised_examples_only_where_the_rest_of_an_epoch_has_them_too():
    layout = BatchLayout(global_batch=8, replicas=2, first=0, local=2, counts=(EXAMPLES,))
    # Of 25 that are left, the last batch of the rest has one.
    assert [layout.always_fed_after(examples) for examples in (0, 24, 25, 48, 56)] == [True, True, False, True, True]
    shards = dataclasses.replace(layout, counts=(26, 24))
    assert not any(shards.always_fed_after(examples) for examples in (0, 8, 48))


def test_arrays_begin_anywhere_at_once():
    part, layout = own.serial_arrays(EXAMPLES)[0], dataclasses.replace(ONE, global_batch=1)
    started = time.perf_counter()
    first = labels(stream(part, layout, True, 1, Position(10**9, 49)).take(1))
    assert len(first[0]) == 1
    assert time.perf_counter() - started < 5


def shuffled_twice() -> tf.data.Dataset:
    files = tf.data.Dataset.range(10).shuffle(10, seed=1).prefetch(1)
    return files.flat_map(lambda file: tf.data.Dataset.range(file * 5, file * 5 + 5)).shuffle(7, seed=2)


NUMBERS = tf.data.Dataset.range


@pytest.mark.parametrize(("make", "layout", "shuffle"), [
    (lambda: NUMBERS(EXAMPLES).cache().shuffle(9, seed=1), "one replica", False),
    (lambda: NUMBERS(EXAMPLES).shuffle(9, seed=1).cache(), "one replica", False),
    (lambda: NUMBERS(2 * EXAMPLES).shuffle(9, seed=1).take(EXAMPLES), "one replica", False),
    (shuffled_twice, "one replica", False),
    *((shuffled_twice, layout, True) for layout in ("one replica", "left out", "padded")),
])  # fmt: skip
def test_the_orders_that_a_data_set_draws_itself_are_where_they_would_have_been(make, layout, shuffle):
    layout = LAYOUTS[layout]

    def numbers(position: Position, steps: int) -> list[list[int]]:
        # A new data set, as in the process of a training that is resumed.
        part = make().apply(tf.data.experimental.assert_cardinality(EXAMPLES)).map(lambda number: (number,))
        return leaves(stream(part, layout, shuffle, 1, position).take(steps))

    whole = numbers(Position(), 4 * layout.steps)
    for epoch, step in [(1, layout.steps), (2, 2)]:
        done = epoch * layout.steps + step
        assert numbers(Position(epoch, 12 * step), len(whole) - done) == whole[done:]


@pytest.mark.parametrize("global_batch", [10, 12])
@pytest.mark.parametrize("last", ["short", "left out"])
def test_what_a_data_set_caches_is_read_once(last, global_batch):
    read: list[int] = []

    def noted(number: Any) -> Any:
        read.append(int(number))
        return np.int64(number)

    part = tf.data.Dataset.range(EXAMPLES).map(lambda number: tf.numpy_function(noted, [number], tf.int64))
    part = part.map(lambda number: (tf.ensure_shape(number, []),)).cache()
    layout = dataclasses.replace(ONE, global_batch=global_batch, last=last)
    list(stream(part, layout, False, 1, Position(1, 2 * global_batch)).take(5 * layout.steps))
    assert read == list(range(EXAMPLES))
