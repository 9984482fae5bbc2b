"""Makes random operations give the same numbers whatever their shapes, so that chance hides no other difference.

A dropout mask is drawn for the examples of a replica, so one device draws others for the same examples. Inside, every
draw is one number: what is left of layers that draw is what they do with their examples.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import tensorflow as tf

from pipeline.private import gen_random_ops, gen_stateful_random_ops, gen_stateless_random_ops
from pipeline.private import gen_stateless_random_ops_v2 as gen_stateless_v2
from pipeline.worker.tensorflow.patched import patched

# A part of [0, 1) that bfloat16 has, and that keeps what dropout may leave out; a part of a normal deviation.
UNIFORM, NORMAL = 127 / 128, 0.5

Draw = Callable[..., tf.Tensor]


@contextmanager
def fixed_randomness() -> Iterator[None]:
    """Inside, operations that are run at once draw nothing, and no generator is any further than before."""
    with ExitStack() as stack:
        for (module, name), replace in _OPERATIONS.items():
            stack.enter_context(patched(module, {name: replace(getattr(module, name))}))
        yield


def _filled(value: float) -> Callable[[Draw], Draw]:
    """Draws, to know shape and type, and fills that with one number."""

    def put(draw: Draw) -> Draw:
        def drawn(*arguments: object, **named: object) -> tf.Tensor:
            shape = draw(*arguments, **named)
            return tf.fill(tf.shape(shape), tf.cast(value, shape.dtype))

        return drawn

    return put


def _given(place: int, name: str) -> Callable[[Draw], Draw]:
    """One of the arguments, at that place or of that name, in place of what is drawn above it or about it."""

    def put(draw: Draw) -> Draw:
        def drawn(*arguments: tf.Tensor, **named: tf.Tensor) -> tf.Tensor:
            like = draw(*arguments, **named)
            chosen = arguments[place] if len(arguments) > place else named[name]
            return tf.broadcast_to(tf.cast(chosen, like.dtype), tf.shape(like))

        return drawn

    return put


def _first_kind(draw: Draw) -> Draw:
    """The most probable class of each row, as often as was asked for."""

    def drawn(logits: tf.Tensor, num_samples: tf.Tensor, *arguments: object, **named: object) -> tf.Tensor:
        like = draw(logits, num_samples, *arguments, **named)
        return tf.broadcast_to(tf.argmax(logits, axis=-1, output_type=like.dtype)[:, None], tf.shape(like))

    return drawn


def _in_order(draw: Draw) -> Draw:
    return lambda value, *arguments, **named: tf.identity(value)


def _unskipped(draw: Draw) -> Draw:
    """Reads a generator's state, which stays as it is."""
    return lambda resource, alg, delta, name=None: draw(resource, alg, tf.zeros_like(delta), name)


_OPERATIONS = {
    (gen_random_ops, "random_uniform"): _filled(UNIFORM),
    (gen_random_ops, "random_standard_normal"): _filled(NORMAL),
    (gen_random_ops, "truncated_normal"): _filled(NORMAL),
    (gen_random_ops, "random_uniform_int"): _given(1, "minval"),
    (gen_random_ops, "parameterized_truncated_normal"): _given(3, "minvals"),
    (gen_random_ops, "random_gamma"): _given(1, "alpha"),
    (gen_random_ops, "random_poisson_v2"): _given(1, "rate"),
    (gen_random_ops, "multinomial"): _first_kind,
    (gen_random_ops, "random_shuffle"): _in_order,
    (gen_stateless_v2, "stateless_random_uniform_v2"): _filled(UNIFORM),
    (gen_stateless_v2, "stateless_random_normal_v2"): _filled(NORMAL),
    (gen_stateless_v2, "stateless_truncated_normal_v2"): _filled(NORMAL),
    (gen_stateless_v2, "stateless_random_uniform_int_v2"): _given(4, "minval"),
    (gen_stateless_v2, "stateless_random_gamma_v3"): _given(4, "alpha"),
    (gen_stateless_v2, "stateless_shuffle"): _in_order,
    (gen_stateless_random_ops, "stateless_random_poisson"): _given(2, "lam"),
    (gen_stateless_random_ops, "stateless_random_binomial"): _given(2, "counts"),
    (gen_stateless_random_ops, "stateless_parameterized_truncated_normal"): _given(4, "minvals"),
    (gen_stateless_random_ops, "stateless_multinomial"): _first_kind,
    (gen_stateful_random_ops, "rng_read_and_skip"): _unskipped,
}
