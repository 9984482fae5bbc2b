"""What the doctor knows of each backend: who looks at a host with it, what it needs, and how to install that."""

from collections.abc import Mapping
from dataclasses import dataclass

INSTALL = "python -m pip install 'distributed-keras-pipeline{}'"


@dataclass(frozen=True)
class Backend:
    """`seen` is the module that prints what it makes of a host, `alike` the packages that all processes of a run have
    in the same version, `extra` ours that it is in, and `spared` those of our requirements that it does without.
    """

    name: str
    seen: str
    alike: tuple[str, ...]
    install: str
    install_gpu: str
    extra: str = ""
    spared: tuple[str, ...] = ()


BACKENDS: Mapping[str, Backend] = {
    "tensorflow": Backend(
        "TensorFlow", "pipeline.worker.tensorflow.seen", ("tensorflow", "keras", "numpy"),
        INSTALL.format(""), INSTALL.format("[gpu]"),
    ),
    "jax": Backend(
        "JAX", "pipeline.worker.jax.seen", ("jax", "jaxlib", "keras", "numpy"),
        INSTALL.format("[jax]"), "python -m pip install 'jax[cuda12]'", "jax", ("tensorflow",),
    ),
}  # fmt: skip


def known(backend: str) -> str:
    """The backend, or TensorFlow for one that a package offers, of which nothing is known.

    >>> known("jax"), known("theirs")
    ('jax', 'tensorflow')
    """
    return backend if backend in BACKENDS else "tensorflow"
