"""TFRecord files of `tf.train.Example`, written and looked through without TensorFlow, and the manifest beside them.

A record is its length, 8 bytes, the length's checksum, 4 bytes, the data, and the data's checksum, 4 bytes
(tensorflow/core/lib/io/record_writer.h). Features are in the order of their names: equal examples are equal bytes.
"""

import dataclasses
import io
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import google_crc32c
import msgspec
import numpy as np

from pipeline.data.arrays import Nested, T
from pipeline.data.errors import DataError

MANIFEST = "manifest.json"
FORMAT = 1
SPLITS = TRAIN, VALIDATION = "train", "validation"
PARTS = ("x", "y", "weight")
HEADER, FOOTER = 12, 4
# Why nothing after a record's start can be told from it.
WRONG_LENGTH, CUT_OFF = "has a length with a wrong checksum", "is cut off"


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


def load_manifest(folder: str, read: Callable[[str], bytes] = lambda path: Path(path).read_bytes()) -> Manifest:
    """The manifest that `Manifest.to_json` wrote in a folder of what `read` reads. Raises `DataError`."""
    path = f"{folder.rstrip('/')}/{MANIFEST}"
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


@dataclass(frozen=True)
class Frame:
    """The place of a record in its file: its number, the bytes it starts and stops at, its data, None if it is broken.

    What is broken may be several records; `stop` is None where nothing follows.
    """

    number: int
    start: int
    stop: int | None
    data: bytes | None
    broken: str | None = None


def framed(data: bytes) -> bytes:
    """One record with its length and its checksums."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def frames(file: BinaryIO) -> Iterator[Frame]:
    """The records of a file in order, broken ones too; after a length that is wrong, the next record is looked for."""
    number = start = 0
    while header := file.read(HEADER):
        length = _length(header)
        if length is None:
            rest = header + file.read()
            nearest = ((place, _length(rest[place : place + HEADER])) for place in range(1, len(rest) - HEADER))
            ends = ((place, place + HEADER + size + FOOTER) for place, size in nearest if size is not None)
            offset = next((place for place, end in ends if end <= len(rest)), None)
            if offset is None:
                yield Frame(number, start, None, None, CUT_OFF if len(header) < HEADER else WRONG_LENGTH)
                return
            yield Frame(number, start, start + offset, None, WRONG_LENGTH)
            number, start, file = number + 1, start + offset, io.BytesIO(rest[offset:])
            continue
        rest = file.read(length + FOOTER)
        if len(rest) < length + FOOTER:
            yield Frame(number, start, None, None, CUT_OFF)
            return
        stop, data = start + HEADER + length + FOOTER, rest[:length]
        right = _checksum(data) == rest[length:]
        yield Frame(number, start, stop, data if right else None, None if right else "has a wrong checksum")
        number, start = number + 1, stop


def _length(header: bytes) -> int | None:
    """The length of the data after such bytes; None where they are not it and its checksum."""
    right = len(header) == HEADER and _checksum(header[:8]) == header[8:]
    return int.from_bytes(header[:8], "little") if right else None


def example(features: Mapping[str, bytes | Iterable[bytes] | np.ndarray]) -> bytes:
    """A `tf.train.Example`, serialized: bytes and lists of them are a bytes list, integers int64, others floats."""
    entries = []
    for name, value in sorted(features.items()):
        if not isinstance(value, np.ndarray):
            feature = _field(b"".join(map(_field, [value] if isinstance(value, bytes) else value)), _FIRST)
        elif value.dtype.kind == "f":
            feature = _field(_field(value.astype("<f4", copy=False).tobytes()) if value.size else b"", _SECOND)
        else:
            feature = _field(_field(b"".join(map(_varint, value.ravel().tolist()))) if value.size else b"", _THIRD)
        entries.append(_field(_field(name.encode()) + _field(feature, _SECOND)))
    return _field(b"".join(entries)) if entries else b""


def parsed(data: bytes) -> dict[str, list[Any]]:
    """The features of a serialized `tf.train.Example`, in the order of their names. `ValueError` where it is none."""
    message = _message()()
    try:
        message.ParseFromString(data)
    except Exception as error:
        raise ValueError("is no tf.train.Example") from error
    features = {}
    for name in sorted(message.features.feature):
        feature = message.features.feature[name]
        kind = feature.WhichOneof("kind")
        features[name] = list(getattr(feature, kind).value) if kind else []
    return features


# The tags of a message's fields: a feature has its bytes, floats or integers in one of these, as the first field there.
# That is protobuf's encoding, written by hand: with lists of numbers it is many times faster than a message's `extend`.
_FIRST, _SECOND, _THIRD = b"\x0a", b"\x12", b"\x1a"


def _field(data: bytes, tag: bytes = _FIRST) -> bytes:
    """A field of a message, the first by default: bytes with their length."""
    return tag + _varint(len(data)) + data


@lru_cache(maxsize=2**14)  # lengths and labels come again and again
def _varint(value: int) -> bytes:
    """A number in groups of 7 bits, the lowest first; a negative one as its two's complement of 64 bits."""
    value &= 0xFFFFFFFFFFFFFFFF
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and moved as tensorflow/core/lib/hash/crc32c.h has it."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# tensorflow/core/example/{example,feature}.proto.
_PROTO = """
name: "example.proto" package: "pipeline.records" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 oneof_index: 0 type_name: ".pipeline.records.BytesList" }
  field { name: "float_list" number: 2 oneof_index: 0 type_name: ".pipeline.records.FloatList" }
  field { name: "int64_list" number: 3 oneof_index: 0 type_name: ".pipeline.records.Int64List" }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type_name: ".pipeline.records.Feature" }
  }
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: ".pipeline.records.Features.FeatureEntry" }
}
message_type { name: "Example" field { name: "features" number: 1 type_name: ".pipeline.records.Features" } }
"""


@cache
def _message() -> Any:
    # Not with this module: a plan, which imports it, reads no record.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pipeline.records.Example"))
