"""Keeps what XLA compiles for JAX in a folder, from which a process that compiles the same takes it.

JAX has only the first process keep programs, though those of another are never the same, as they name its devices. And
it writes a file in place, which a process that is killed meanwhile leaves broken for good.
"""

import contextlib
import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax

from pipeline.private_jax import LRUCache, compilation_cache, compiler

CPU = Path("/proc/cpuinfo")


def keep(folder: Path) -> None:
    """Has programs be kept in a folder; called before the first is compiled."""
    # A program for another processor may hold instructions that this one lacks.
    with contextlib.suppress(OSError):
        flags = re.search(r"^(flags|Features)\b.*", CPU.read_text(), re.MULTILINE)
        folder /= sha256(flags[0].encode() if flags else b"").hexdigest()[:12]
    LRUCache.put, compiler._cache_write = _put, _write
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))


def _put(cache: LRUCache, key: str, value: bytes) -> None:
    """Keeps a program, which is whole or missing."""
    path = Path(cache.path) / f"{key}-cache"
    part = path.with_name(f"{key}.{secrets.token_hex(4)}")
    part.write_bytes(value)
    part.replace(path)


def _write(key: str, seconds: float, name: str, backend: Any, program: Any, callbacks: list[Any]) -> None:
    """Keeps a program that has been compiled in so many seconds; one that calls Python functions ends with them."""
    if not callbacks:
        # What cannot be written, as on a full disk, costs the next start its time, and this run nothing.
        with contextlib.suppress(OSError, jax.errors.JaxRuntimeError):
            compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))
