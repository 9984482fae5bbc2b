"""Turns what a run tells into what MLflow takes: names, texts and times, cut and clean."""

import json
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from pipeline.record.events import EventBase

# What MLflow takes.
PARAM_CHARACTERS, TAG_CHARACTERS, NAME_CHARACTERS, DIGEST_CHARACTERS = 6000, 5000, 250, 36


def safe_name(name: str) -> str:
    """`name` as MLflow takes it for a metric, a parameter or a tag.

    >>> safe_name("top@5 (50%)"), safe_name("/a//b/../c")
    ('top_5 _50__', 'a/b/_/c')
    """
    parts = (re.sub(r"[^\w.\- :]", "_", part) for part in str(name).split("/"))
    kept = ("_" if part in (".", "..") else part for part in parts if part)
    return posixpath.join("", *kept)[:NAME_CHARACTERS].rstrip("/") or "_"


def text(value: object, most: int) -> str:
    """`value` in `most` characters, as MLflow takes it for a value or a name."""
    whole = str(value).lower() if isinstance(value, bool) else str(value)
    # Lone surrogates, from file names that are not UTF-8, and NUL end a request or a database's insert.
    return whole.encode(errors="replace").decode().replace("\0", "")[:most]


def ms(event: EventBase) -> int:
    """The time of `event` in milliseconds since 1970."""
    return round(1000 * event.time)


def tensors(dtype: object, shape: Any) -> str:
    """MLflow's words for a tensor of one example's `shape`, or for several, named as in the two mappings.

    >>> tensors("int32", [3])
    '[{"type": "tensor", "tensor-spec": {"dtype": "int32", "shape": [-1, 3]}}]'
    """
    named = shape if isinstance(shape, Mapping) else {None: shape}
    dtypes = dtype if isinstance(dtype, Mapping) else {}
    return json.dumps(
        [
            ({} if name is None else {"name": str(name)})
            | {"type": "tensor", "tensor-spec": {"dtype": str(dtypes.get(name, dtype)), "shape": [-1, *axes]}}
            for name, axes in named.items()
        ]
    )
