"""What MLflow calls a run's values: each once, in a group that its name begins with, in digits that mean something.

What is compared first has no group, and the same names as ever, so that runs of all versions stand in one table; all
groups but those of an explanation come after it where MLflow sorts by name.
"""

import sys

from pipeline.config.parts import leaves
from pipeline.record.results import Cost, Input, Speed, Staleness, Survival, Training

# What is compared first, and of that what MLflow is to open on.
FIRST = "examples_per_second"
HEADLINE = ("efficiency", FIRST, "speedup")
# Over all of training, over all validation data, and of one device that trains alone.
TRAIN, VALIDATION, ONE_DEVICE = "train", "val", "one_device"
# Of the other measurements of result.json, by the part that has them.
GROUPS = {Speed: "step", Input: "step", Training: "time", Survival: "survival", Staleness: "staleness", Cost: "usage"}
GROUP_OF = {name: group for part, group in GROUPS.items() for name in leaves(part)}
# Of a curve, whose numbers are right to about seven; of what was timed.
CURVE_DIGITS, DIGITS = 6, 4


def measurement(name: str) -> str:
    """What a measurement of result.json is called.

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
    """What the repeats of a group are called, which end in their median.

    >>> timed("point"), timed("baseline")
    ('examples_per_second', 'one_device/examples_per_second')
    """
    return measurement(FIRST if group == "point" else f"{group}_{FIRST}")


def trained(name: str) -> str:
    """What is called so of training."""
    return f"{TRAIN}/{name}"


def validated(name: str) -> str:
    """What a metric over the validation data is called.

    >>> validated("accuracy"), validated("val_auc")
    ('val/accuracy', 'val/auc')
    """
    return f"{VALIDATION}/{name.removeprefix('val_')}"


def significant(name: str, value: float) -> float:
    """The value of that metric in the digits that say something; counts are whole.

    >>> significant("speedup", 1.843721923847), significant("train/loss", 0.69314718246), significant("x", 1_199_882.0)
    (1.844, 0.693147, 1199882.0)
    """
    if value.is_integer():
        return value
    learnt = name.startswith((f"{TRAIN}/", f"{VALIDATION}/")) and not name.endswith(FIRST)
    digits = CURVE_DIGITS if learnt else DIGITS
    return float(f"{value:.{digits}g}")


def number(value: object) -> float | None:
    """`value` where it is a finite number; a bool is none.

    >>> number(2), number(True), number(float("inf")), number("2")
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None
