"""What TensorFlow raises, told to a person and to the conductor."""

import pytest
import tensorflow as tf

from pipeline.worker.tensorflow.errors import explain, lost_a_peer

OF_HOROVOD = (
    'Graph execution error:\n\nDetected at node sum defined at (most recent call last):\n  File "a.py", line 1\n\n'
    "Horovod has been shut down. This was caused by an exception on one of the ranks.\n\t [[{{node sum}}]]"
)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (tf.errors.UnavailableError(None, None, "Connection reset by peer"), True),
        (tf.errors.UnknownError(None, None, OF_HOROVOD), True),
        (tf.errors.UnknownError(None, None, "[gloo/transport/tcp/pair.cc:589] Connection closed by peer"), True),
        (tf.errors.UnknownError(None, None, "IndexError: list index out of range"), False),
        (ValueError("Horovod has been shut down"), False),
    ],
)
def test_who_has_lost_a_peer_is_told_from_who_has_failed(error, lost):
    assert lost_a_peer(error) is lost


def test_the_reason_is_told_and_not_where_in_the_graph_it_came_up():
    said = explain(tf.errors.UnknownError(None, None, OF_HOROVOD))
    assert said == "UnknownError: Horovod has been shut down. This was caused by an exception on one of the ranks."
