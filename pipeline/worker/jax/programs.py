"""Keeps what XLA compiles for JAX in a folder, from which a process that compiles the same takes it. Where that grows
too large, what was used least recently goes.

JAX has only the first process keep programs, though those of another are never the same, as they name its devices. And
it writes a file in place, which a process that is killed meanwhile leaves broken for good.
"""

import contextlib
import os
import re
import secrets
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax

from pipeline.private_jax import LRUCache, compilation_cache, compiler

CPU = Path("/proc/cpuinfo")
# What the folder holds at most; a large model's programs take some megabytes.
MOST_BYTES = 1 << 30


def keep(folder: Path) -> None:
    """Has programs be kept in a folder; called before the first is compiled."""
    # A program for another processor may hold instructions that this one lacks.
    with contextlib.suppress(OSError):
        flags = re.search(r"^(flags|Features)\b.*", CPU.read_text(), re.MULTILINE)
        folder /= sha256(flags[0].encode() if flags else b"").hexdigest()[:12]
    LRUCache.get, LRUCache.put, compiler._cache_write = _get, _put, _write
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))


def _get(cache: LRUCache, key: str) -> bytes | None:
    """Returns a program, which counts as used now; None if it is missing."""
    path = _path(cache, key)
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return path.read_bytes()
    except OSError:
        return None


def _put(cache: LRUCache, key: str, value: bytes) -> None:
    """Keeps a program, which is whole or missing, and removes those used least recently that are too many."""
    path = _path(cache, key)
    part = path.with_name(f"{key}.{secrets.token_hex(4)}")
    part.write_bytes(value)
    part.replace(path)
    files = [(one.stat(), one) for one in path.parent.iterdir()]
    total = 0
    for status, one in sorted(files, key=lambda file: file[0].st_atime_ns, reverse=True):
        total += status.st_size
        if total > MOST_BYTES:
            one.unlink(missing_ok=True)


def _path(cache: LRUCache, key: str) -> Path:
    return Path(cache.path) / f"{key}-cache"


def _write(key: str, seconds: float, name: str, backend: Any, program: Any, callbacks: list[Any]) -> None:
    """Keeps a program that has been compiled in so many seconds; one that calls Python functions ends with them."""
    if not callbacks:
        # What cannot be written, as on a full disk, costs the next start its time, and this run nothing.
        with contextlib.suppress(OSError, jax.errors.JaxRuntimeError):
            compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))
