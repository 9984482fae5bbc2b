"""Makes random operations give the same numbers whatever their shapes, so that chance hides no other difference.

A dropout mask is drawn for the examples of a replica, so one device draws others for the same examples. Inside, every
draw is one number: what is left of layers that draw is what they do with their examples.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import TypeAlias

import tensorflow as tf

from pipeline.private import gen_random_ops, gen_stateful_random_ops, gen_stateless_random_ops
from pipeline.private import gen_stateless_random_ops_v2 as gen_stateless_v2
from pipeline.worker.tensorflow.patched import patched

# A part of [0, 1) that bfloat16 has, and that keeps what dropout may leave out; a part of a normal deviation.
UNIFORM, NORMAL = 127 / 128, 0.5

# The arguments of an operation that draws, by name; and what comes in place of what it draws.
Given: TypeAlias = Mapping[str, tf.Tensor]
Value: TypeAlias = tf.Tensor | float


@contextmanager
def fixed_randomness() -> Iterator[None]:
    """Inside, operations that are run at once draw nothing, and no generator is any further than before."""
    with ExitStack() as stack:
        for (module, name), instead in _INSTEAD.items():
            stack.enter_context(patched(module, {name: _without_chance(getattr(module, name), instead)}))
        skip = gen_stateful_random_ops.rng_read_and_skip
        # Reads a generator's state, which stays as it is.
        unskipped = {
            "rng_read_and_skip": lambda resource, alg, delta, name=None: skip(resource, alg, tf.zeros_like(delta), name)
        }
        stack.enter_context(patched(gen_stateful_random_ops, unskipped))
        yield


def _without_chance(draw: Callable[..., tf.Tensor], instead: Callable[[Given], Value]) -> Callable[..., tf.Tensor]:
    """Draws, to know shape and type, and fills that with what comes in its place."""
    signature = inspect.signature(draw)

    def drawn(*arguments: object, **named: object) -> tf.Tensor:
        like, given = draw(*arguments, **named), signature.bind(*arguments, **named).arguments
        return tf.broadcast_to(tf.cast(instead(given), like.dtype), tf.shape(like))

    return drawn


def _likeliest(given: Given) -> tf.Tensor:
    """The most probable class of each row."""
    return tf.argmax(given["logits"], axis=-1)[:, None]


# What comes in place of what an operation draws: a number, or one of its arguments, above or about which it draws.
_INSTEAD: Mapping[tuple[object, str], Callable[[Given], Value]] = {
    (gen_random_ops, "random_uniform"): lambda given: UNIFORM,
    (gen_random_ops, "random_standard_normal"): lambda given: NORMAL,
    (gen_random_ops, "truncated_normal"): lambda given: NORMAL,
    (gen_random_ops, "random_uniform_int"): itemgetter("minval"),
    (gen_random_ops, "parameterized_truncated_normal"): itemgetter("minvals"),
    (gen_random_ops, "random_gamma"): itemgetter("alpha"),
    (gen_random_ops, "random_poisson_v2"): itemgetter("rate"),
    (gen_random_ops, "multinomial"): _likeliest,
    (gen_random_ops, "random_shuffle"): itemgetter("value"),
    (gen_stateless_v2, "stateless_random_uniform_v2"): lambda given: UNIFORM,
    (gen_stateless_v2, "stateless_random_normal_v2"): lambda given: NORMAL,
    (gen_stateless_v2, "stateless_truncated_normal_v2"): lambda given: NORMAL,
    (gen_stateless_v2, "stateless_random_uniform_int_v2"): itemgetter("minval"),
    (gen_stateless_v2, "stateless_random_gamma_v3"): itemgetter("alpha"),
    (gen_stateless_v2, "stateless_shuffle"): itemgetter("value"),
    (gen_stateless_random_ops, "stateless_random_poisson"): itemgetter("lam"),
    (gen_stateless_random_ops, "stateless_random_binomial"): itemgetter("counts"),
    (gen_stateless_random_ops, "stateless_parameterized_truncated_normal"): itemgetter("minvals"),
    (gen_stateless_random_ops, "stateless_multinomial"): _likeliest,
}
