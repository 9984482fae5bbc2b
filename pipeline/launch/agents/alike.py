"""What a conductor and its agents must have alike: the versions of what computes, this package, and its lock file."""

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from platform import python_version

PACKAGES = ("tensorflow", "keras", "numpy")
# Which not every host has, and one backend alone needs.
OTHERS = ("jax", "jaxlib")
PACKAGE = Path(__file__).resolve().parents[2]
LOCK = PACKAGE.parent / "requirements.lock"
# What is compared only where both have it: a wheel has no lock file beside it.
IF_THERE = (*OTHERS, "requirements.lock")
FILES = "the pipeline's files"


@cache
def alike() -> Mapping[str, str]:
    """By what a person calls it; a hash where there is no version."""
    found = {"python": ".".join(python_version().split(".")[:2])}
    for name in (*PACKAGES, *OTHERS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "none"
    found[FILES] = _digest(sorted(PACKAGE.rglob("*.py")))
    if LOCK.is_file():
        found["requirements.lock"] = _digest([LOCK])
    return found


def unlike(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """What another host has that this one has not, in words; None where nothing is different.

    >>> unlike({"keras": "3.1", "numpy": "2"}, {"keras": "3.2"})
    'keras 3.1 and numpy 2, received keras 3.2 and numpy none'
    >>> unlike({"keras": "3.1", "jax": "0.10.2"}, {"keras": "3.1"})
    """
    names = [name for name in here if there.get(name) != here[name] and (name not in IF_THERE or name in there)]
    if not names:
        return None
    expected, received = (" and ".join(f"{name} {has.get(name, 'none')}" for name in names) for has in (here, there))
    return f"{expected}, received {received}"


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        name = path.relative_to(PACKAGE.parent).as_posix()
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
