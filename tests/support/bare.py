"""Makes environments of some of the packages that are installed here, as links, so that no network is needed."""

import sys
import venv
from collections.abc import Collection, Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "distributed-keras-pipeline"


def environment(folder: Path, packages: Iterable[str]) -> Path:
    """The Python of a new environment in `folder` that has these packages and no others."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in packages:
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            here, there = Path(str(found.locate_file(top))), site / top
            if here.exists() and not there.exists():
                there.symlink_to(here)
    return folder / "bin" / Path(sys.executable).name


def needed(package: str, absent: Collection[str] = (), extras: Iterable[str] = ()) -> set[str]:
    """A package and what it needs, and those in turn, by name; of what is `absent`, nothing."""
    found, left = {package}, [(package, extra) for extra in ("", *extras)]
    while left:
        name, extra = left.pop()
        for line in metadata.requires(name) or ():
            one = Requirement(line)
            if one.name not in {*absent, *found} and (one.marker is None or one.marker.evaluate({"extra": extra})):
                found.add(one.name)
                left += [(one.name, inner) for inner in ("", *one.extras)]
    return found
