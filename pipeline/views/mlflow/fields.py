"""The parts of MLflow's runs, metrics, parameters, tags and the data set: their names, and texts as MLflow takes them.

A metric has one name everywhere, in a group that the name begins with. What is compared first has no group, and the
names of earlier versions, so that runs of all versions stand in one table. MLflow sorts by name: other groups follow.
"""

import json
import posixpath
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.config.parts import leaves
from pipeline.record.events import EventBase
from pipeline.record.results import Cost, Input, Speed, Staleness, Survival, Training

# What is compared first, and of that what MLflow is to open on.
FIRST = "examples_per_second"
HEADLINE = ("efficiency", FIRST, "speedup")
# Over all of training, over all validation data, and of one device that trains alone.
TRAIN, VALIDATION, ONE_DEVICE = "train", "val", "one_device"
# The groups of the other measurements of result.json, by the part that has them.
GROUPS = {Speed: "step", Input: "step", Training: "time", Survival: "survival", Staleness: "staleness", Cost: "usage"}
GROUP_OF = {name: group for part, group in GROUPS.items() for name in leaves(part)}
# Digits of a curve, whose numbers are right to about seven, and of what was timed.
CURVE_DIGITS, DIGITS = 6, 4
# The most that MLflow takes.
PARAM_CHARACTERS, TAG_CHARACTERS, NAME_CHARACTERS, DIGEST_CHARACTERS = 6000, 5000, 250, 36
# MLflow shows this tag of a run or an experiment as its description.
NOTE_TAG = "mlflow.note.content"


class MetricValue(NamedTuple):
    """One value of a metric, at a time in milliseconds since 1970."""

    name: str
    value: float
    time_ms: int
    step: int


def measurement(name: str) -> str:
    """Returns the metric name of a measurement of result.json.

    >>> [measurement(name) for name in ("speedup_low", "baseline_examples_per_second", "step_ms_p50", "goodput")]
    ['speedup_low', 'one_device/examples_per_second', 'step/ms_p50', 'survival/goodput']
    """
    if name.startswith(HEADLINE):
        return name
    if name == f"baseline_{FIRST}":
        return f"{ONE_DEVICE}/{FIRST}"
    group = "time" if name.startswith("seconds_") else GROUP_OF.get(name, "result")
    return f"{group}/{name.removeprefix(f'{group}_')}"


def timed(group: str) -> str:
    """Returns the metric name of a group's repeats, which end in their median.

    >>> timed("point"), timed("baseline")
    ('examples_per_second', 'one_device/examples_per_second')
    """
    return measurement(FIRST if group == "point" else f"{group}_{FIRST}")


def trained(name: str) -> str:
    """Returns the name of a training metric."""
    return f"{TRAIN}/{name}"


def validated(name: str) -> str:
    """Returns the name of a metric over the validation data.

    >>> validated("accuracy"), validated("val_auc")
    ('val/accuracy', 'val/auc')
    """
    return f"{VALIDATION}/{name.removeprefix('val_')}"


def significant(name: str, value: float) -> float:
    """Rounds a metric's value to the digits that mean something; counts stay whole.

    >>> significant("speedup", 1.843721923847), significant("train/loss", 0.69314718246), significant("x", 1_199_882.0)
    (1.844, 0.693147, 1199882.0)
    """
    if value.is_integer():
        return value
    is_curve = name.startswith((f"{TRAIN}/", f"{VALIDATION}/")) and not name.endswith(FIRST)
    digits = CURVE_DIGITS if is_curve else DIGITS
    return float(f"{value:.{digits}g}")


def number(value: object) -> float | None:
    """Returns `value` if it is a finite number; a bool is none.

    >>> number(2), number(True), number(float("inf")), number("2")
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def safe_name(name: str) -> str:
    """Returns `name` as MLflow takes it for a metric, a parameter or a tag.

    >>> safe_name("top@5 (50%)"), safe_name("/a//b/../c")
    ('top_5 _50__', 'a/b/_/c')
    """
    parts = (re.sub(r"[^\w.\- :]", "_", part) for part in str(name).split("/"))
    safe_parts = ("_" if part in (".", "..") else part for part in parts if part)
    return posixpath.join("", *safe_parts)[:NAME_CHARACTERS].rstrip("/") or "_"


def text(value: object, limit: int) -> str:
    """Returns `value` in at most `limit` characters, as MLflow takes it for a value or a name."""
    whole = str(value).lower() if isinstance(value, bool) else str(value)
    # Lone surrogates, from file names that are not UTF-8, and NUL end a request or a database's insert.
    return whole.encode(errors="replace").decode().replace("\0", "")[:limit]


def ms(event: EventBase) -> int:
    """Returns the time of `event` in milliseconds since 1970."""
    return round(1000 * event.time)


def tensors(dtype: object, shape: Any) -> str:
    """Returns MLflow's JSON for a tensor of one example's `shape`, or for several, named as in the two mappings.

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
