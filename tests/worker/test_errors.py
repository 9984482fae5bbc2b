"""What TensorFlow raises, told to a person and to the conductor."""

import functools
import inspect
from collections.abc import Callable

import mistaken
import pytest
import tensorflow as tf

from pipeline.worker.model_error import reason, told
from pipeline.worker.shared_memory import PeerLostError
from pipeline.worker.tensorflow.collective import lost_a_peer

OF_HOROVOD = (
    'Graph execution error:\n\nDetected at node sum defined at (most recent call last):\n  File "a.py", line 1\n\n'
    "Horovod has been shut down. This was caused by an exception on one of the ranks.\n\t [[{{node sum}}]]"
)


UNKNOWN = functools.partial(tf.errors.UnknownError, None, None)


def test_who_has_lost_a_peer_is_told_from_who_has_failed():
    unavailable = tf.errors.UnavailableError(None, None, "Connection reset by peer")
    closed = UNKNOWN("[gloo/transport/tcp/pair.cc:589] Connection closed by peer")
    passed_on = UNKNOWN("PeerLostError: a process of this host has gone\nTraceback (most")
    assert all(map(lost_a_peer, (unavailable, UNKNOWN(OF_HOROVOD), closed, passed_on, PeerLostError("it has gone"))))
    failed = UNKNOWN("IndexError: list index out of range")
    assert not any(map(lost_a_peer, (failed, ValueError("Horovod has been shut down"))))


def test_an_error_of_jax_is_told_in_place_of_those_of_each_layer_that_keras_could_not_make_anew():
    inner, outer = (AttributeError("'str' object has no attribute '_error_repr'") for _ in range(2))
    inner.__context__, outer.__context__ = ValueError("a traced array"), inner
    assert reason(outer) == "ValueError: a traced array"


# What is told first of a mistake, by its name in `mistaken.py`.
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "Keras": (mistaken.wrong_reshape, "ValueError: The total size of the tensor must be unchanged"),
    "a cause": (mistaken.raised_from, "ValueError: no width was given ("),
    "shapes in call": (
        lambda: mistaken.with_layer(mistaken.product), "ValueError: Dimensions must be equal, but are 4 and 3",
    ),
    "an attribute": (
        lambda: mistaken.with_layer(mistaken.missing), "AttributeError: 'Own' object has no attribute 'nowhere' (",
    ),
    "an assertion": (lambda: mistaken.with_layer(mistaken.checked), "AssertionError: assert x.shape[-1] == 3"),
    "several lines": (
        lambda: mistaken.with_layer(mistaken.branched), "ValueError: the width must be odd the width was 4 (",
    ),
    "a model of one's own": (
        lambda: mistaken.trained(mistaken.Unfinished()), "AttributeError: 'Unfinished' object has no attribute 'head'",
    ),
    "a loss": (
        lambda: mistaken.trained(mistaken.linear(10), mistaken.loss_of_sevens),
        "InvalidArgumentError: Input to reshape is a tensor with 40 values, but the requested shape requires",
    ),
    "a metric": (
        lambda: mistaken.trained(mistaken.linear(), metrics=[mistaken.Counts()]),
        "AttributeError: 'Counts' object has no attribute 'total' (",
    ),
    "a callback": (
        lambda: mistaken.trained(mistaken.linear(), callbacks=[mistaken.Looks()]), "KeyError: 'val_auc' (",
    ),
    "data": (
        lambda: mistaken.trained(mistaken.linear(), data=mistaken.from_shelf()), "OSError: no shelf 7 in the archive (",
    ),
    "numbers without a row": (
        lambda: mistaken.trained(mistaken.linear(rows=1)), "InvalidArgumentError: indices[0,0] = 1 is not in [0, 1) (",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_reason_comes_first_and_then_the_line_of_a_person_s_own_file(mistake):
    make, words = MISTAKES[mistake]
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
        make()
    said = reason(raised.value)
    assert said.startswith(words)
    assert "\n" not in said
    source = inspect.getsource(mistaken).splitlines()
    (number,) = (number for number, text in enumerate(source, 1) if text.endswith(f"  # {mistake}"))
    assert f"mistaken.py:{number})" in said


def test_the_reason_is_told_and_not_where_in_the_graph_it_came_up_and_our_own_as_it_stands():
    said = "UnknownError: Horovod has been shut down. This was caused by an exception on one of the ranks."
    assert told(UNKNOWN(OF_HOROVOD)) == said
    ours = "Expected one, received two. Try three."
    assert told(UNKNOWN(f"Graph execution error:\n\nTrainingError: {ours}\nTraceback (most recent call")) == ours
