"""Reads and writes `manifest.json`, which describes a folder of prepared data, beside its TFRecord shards."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from pipeline.data.arrays import Nested, T
from pipeline.data.errors import DataError

FILE = "manifest.json"
FORMAT = 1
SPLITS = TRAIN, VALIDATION = "train", "validation"
PARTS = ("x", "y", "weight")


@dataclass(frozen=True)
class Feature:
    """One array of each example: its shape and dtype once it is read, None for sizes that differ, and how it is stored.

    Its name is one of PARTS, and below them by keys and places, as `x/ids` or `x/0`. It is stored as "floats" or "ints"
    (int64), a list; "bytes", those of the array (little endian, row by row); "image", those of an encoded image.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    stored: str


@dataclass(frozen=True)
class Shard:
    """One file: its name in the folder, how many examples and bytes it has, its SHA-256, and its examples by class."""

    file: str
    examples: int
    bytes: int
    sha256: str
    classes: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A description of prepared data: features, shards by split, where it came from, and classes and their names."""

    features: tuple[Feature, ...]
    splits: Mapping[str, tuple[Shard, ...]]
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def examples(self, split: str) -> int:
        """Examples of a split; 0 where there is none."""
        return sum(shard.examples for shard in self.splits.get(split, ()))

    def classes(self, split: str) -> dict[str, int]:
        """Examples of each class of a split, also of those that have none."""
        counts = Counter({str(number): 0 for number in range(self.num_classes or 0)})
        for shard in self.splits.get(split, ()):
            counts.update(shard.classes)
        return counts

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)


def flat(example: Nested[T], name: str = "") -> dict[str, T]:
    """The leaves of an example `(x, y)` or `(x, y, weight)` by the names that features have.

    >>> flat(({"ids": 1, "dense": 2}, (3, 4)))
    {'x/ids': 1, 'x/dense': 2, 'y/0': 3, 'y/1': 4}
    """
    if not isinstance(example, Mapping | tuple | list):
        return {name: cast("T", example)}
    inner = example if isinstance(example, Mapping) else dict(enumerate(example))
    keys = [f"{name}/{key}" for key in inner] if name else PARTS
    return {
        leaf: value
        for key, branch in zip(keys, inner.values(), strict=False)
        for leaf, value in flat(branch, key).items()
    }


def nested(leaves: Mapping[str, T]) -> Nested[T]:
    """The example whose leaves `flat` has named."""

    def below(prefix: str) -> Nested[T]:
        if prefix in leaves:
            return leaves[prefix]
        inside = [name.removeprefix(f"{prefix}/").partition("/")[0] for name in leaves if name.startswith(f"{prefix}/")]
        children = {key: below(f"{prefix}/{key}") for key in inside}
        return tuple(children.values()) if all(map(str.isdigit, children)) else children

    return tuple(below(part) for part in PARTS if any(name.partition("/")[0] == part for name in leaves))


def load(folder: str, read: Callable[[str], bytes] = lambda path: Path(path).read_bytes()) -> Manifest:
    """The manifest that `Manifest.to_json` wrote in a folder of what `read` reads. Raises `DataError`."""
    path = f"{folder.rstrip('/')}/{FILE}"
    try:
        values = json.loads(read(path))
        if values.pop("format") != FORMAT:
            raise ValueError(f"no format {FORMAT}")
        return msgspec.convert(values, Manifest)
    except OSError as error:
        first = f"`python -m pipeline prepare data=SOURCE out={folder}` first"
        raise DataError(path, f"no such file ({error.strerror or error})", first) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        expected, received = f"{path} to be a manifest of prepared data", f"a file that is none ({error})"
        raise DataError(expected, received, "`python -m pipeline prepare data=SOURCE out=FOLDER` anew") from error
