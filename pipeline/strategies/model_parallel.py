"""Several devices that share each copy of the model: a mesh of JAX's, which TensorFlow's engine has none of."""

from collections.abc import Mapping, Sequence
from typing import NoReturn


def model_parallel(devices: tuple[str, ...], layout: Mapping[str, Sequence[str | None]] | None = None) -> NoReturn:
    """Is refused: what cuts variables over `devices`, by a `layout` or one that it derives, is JAX's engine."""
    raise ValueError(
        f"Expected backend=jax for strategy=model_parallel, received TensorFlow's engine with {len(devices)} devices. "
        f"Try backend=jax."
    )
