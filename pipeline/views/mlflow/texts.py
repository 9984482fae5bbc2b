"""The names of runs, metrics, parameters and tags in MLflow, and its texts for a person: descriptions, and a page.

A metric has one name everywhere, in a group that the name begins with. What is compared first has no group, and the
names of earlier versions. An experiment's page and its view of runs are tags, so that all browsers show them.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.analyze.comparable import doubts
from pipeline.config.parts import leaves
from pipeline.record.events import EventBase
from pipeline.record.results import Cost, Input, Result, Speed, Staleness, Survival, Training
from pipeline.views.terminal import words
from pipeline.views.terminal.words import brackets, clean, listed, percent, plural

FIRST = "examples_per_second"  # what is compared first, and of that what MLflow is to open on
HEADLINE = ("efficiency", FIRST, "speedup")
# The groups of the other measurements of result.json, by the part that has them.
GROUPS = {Speed: "step", Input: "step", Training: "time", Survival: "survival", Staleness: "staleness", Cost: "usage"}
GROUP_OF = {name: group for part, group in GROUPS.items() for name in leaves(part)}
CURVE_DIGITS, DIGITS = 6, 4  # digits of a curve, whose numbers are right to about seven, and of what was timed
PARAM_CHARACTERS, TAG_CHARACTERS, NAME_CHARACTERS, DIGEST_CHARACTERS = 6000, 5000, 250, 36  # the most that MLflow takes
NOTE_TAG = "mlflow.note.content"  # MLflow shows this tag of a run or an experiment as its description
COMMIT_LETTERS = 12  # of a commit's name: enough to find it by
PAGE_TAG, VIEW = "pipeline.page", "speedup"
# As MLflow 3.17's user interface has them: what it shows an experiment for, and a view by its id.
KIND_TAG, VIEW_TAG = "mlflow.experimentKind", f"mlflow.sharedViewState.{VIEW}"
KIND, WORKFLOW = "custom_model_development", "machine_learning"
# What a column shows, and its width in pixels: all but the last are in sight on a page 1,440 wide, beside its panel.
COLUMNS = {
    "params.`strategy`": 95, "metrics.`train/workers`": 100, "metrics.`speedup`": 98, "tags.`speedup_range`": 112,
    "metrics.`efficiency`": 80, "metrics.`examples_per_second`": 155, "metrics.`val/accuracy`": 95, "tags.`sweep`": 150,
}  # fmt: skip
# Of the columns that stand still at the left, which MLflow shows by itself.
WIDTHS = {"attributes.`Run Name`": 240, "runDateAndNestInfo": 130}
BARS = ("examples_per_second", "speedup", "efficiency", "val/accuracy")
SCATTERS = (("train/workers", "speedup"), ("time/seconds_training", "val/accuracy"))  # across and up
DESCRIPTION = """\
**How to read these runs.** *Views*, *By speedup* sorts them by what more devices brought; its charts draw them.

- One run is one training under one strategy, named strategy-workers-model-data-id. `python -m pipeline compare ID \
ID` says whether two compare, and how sure their difference is. Alike are runs of the same model, data, precision, \
scaling, batch that is held fixed, machine and versions.
- `speedup` is throughput (`examples_per_second`) over that of the same model on one device without a strategy; \
`efficiency` is speedup over the number of devices. The range beside it is that of the repeats: **where two ranges \
overlap, it is not known which is faster.**
- A name that ends in (rehearsal) or (oversubscribed) marks a speed that is none of real devices.
- The other metrics are in groups. `train/` and `val/`: curves over optimizer steps, and what was asked for in \
numbers. `train/examples_per_second` is no measurement, since training also stops to tell and to validate. \
`one_device/`: the baseline, and how far replicas were from it. `step/`, `time/`, `survival/`, `staleness/`, \
`usage/`: measurements of result.json. `explain/`: what the lost efficiency is made of. `profile/`: input and model \
alone. `system/`: the host.
- The run that stands for a sweep has its report among its artifacts, `report.html`.
"""
# What earlier versions wrote there, by its digest, which a later one may replace.
EARLIER = ("56ca3e25b266", "c8119b3c0f70", "879eec51dce3")


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
        return f"one_device/{FIRST}"
    group = "time" if name.startswith("seconds_") else GROUP_OF.get(name, "result")
    return f"{group}/{name.removeprefix(f'{group}_')}"


def significant(name: str, value: float) -> float:
    """Rounds a metric's value to the digits that mean something; counts stay whole.

    >>> significant("speedup", 1.843721923847), significant("train/loss", 0.69314718246), significant("x", 1_199_882.0)
    (1.844, 0.693147, 1199882.0)
    """
    is_curve = name.startswith(("train/", "val/")) and not name.endswith(FIRST)
    return value if value.is_integer() else float(f"{value:.{CURVE_DIGITS if is_curve else DIGITS}g}")


def safe_name(name: str) -> str:
    """Returns `name` as MLflow takes it for a metric, a parameter or a tag."""
    parts = (re.sub(r"^\.\.?$|[^\w.\- :]", "_", part) for part in str(name).split("/") if part)
    return "/".join(parts)[:NAME_CHARACTERS].rstrip("/") or "_"


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
    specs = []
    for name, axes in named.items():
        spec = {"dtype": str(dtypes.get(name, dtype)), "shape": [-1, *axes]}
        specs.append(({} if name is None else {"name": str(name)}) | {"type": "tensor", "tensor-spec": spec})
    return json.dumps(specs)


def sentence(result: Result) -> str:
    """Returns a run's speedup and throughput with their intervals, and choices; empty where nothing was measured."""
    speed, layout = result.speed, result.layout
    if speed.examples_per_second is None:
        return ""
    learnt = [*result.training.val_metrics.items()]
    ends, throughput, doubtful = words.throughput_span(speed), words.per_second(speed), listed(*doubts(layout))
    lead = f"**{throughput}**{brackets(listed(doubtful, ends))}"
    if speed.speedup is not None:
        efficiency = "" if speed.efficiency is None else f", {percent(speed.efficiency)} efficiency"
        within = brackets(listed(doubtful, words.speedup_span(speed)))
        lead = f"**{speed.speedup:.2f} times one device**{within}{efficiency}: {throughput}{brackets(ends)}"
    choices = listed(
        " on ".join(filter(None, [clean(result.choices.called), plural(layout.workers, "worker")])),
        f"{layout.scaling} scaling" if layout.scaling else "",
        clean(layout.precision),
        f"{percent(speed.interval_confidence)} intervals" if ends and speed.interval_confidence else "",
        *(f"validation {clean(name)} {words.figure(value)}" for name, value in learnt[:1]),
    )
    return f"{lead}{f' with {choices}' * bool(choices)}."


def missing(tags: Mapping[str, str], time_ms: int) -> dict[str, str]:
    """Returns the tags that an experiment with these `tags` lacks; a person's own text and choices stay."""
    state, note = json.dumps(_view()), tags.get(NOTE_TAG, "")
    page = hashlib.sha256(f"{DESCRIPTION}{state}".encode()).hexdigest()[:12]
    if tags.get(PAGE_TAG) == page:
        return {}
    view = {"name": "By speedup", "createdAt": time_ms, "updatedAt": time_ms, "state": state}
    lacking = {VIEW_TAG: json.dumps(view), PAGE_TAG: page}
    if not note or hashlib.sha256(note.encode()).hexdigest()[:12] in EARLIER:
        lacking[NOTE_TAG] = DESCRIPTION
    return lacking if tags.get(KIND_TAG) else lacking | {KIND_TAG: KIND}


def _view() -> dict[str, Any]:
    charts: list[dict[str, Any]] = [
        {"type": "BAR", "metricKey": name, "displayName": name, "runsCountToCompare": 20} for name in BARS
    ]
    for across, up in SCATTERS:
        axes = {axis: {"key": name, "type": "METRIC"} for axis, name in (("xaxis", across), ("yaxis", up))}
        charts.append({"type": "SCATTER", **axes, "runsCountToCompare": 100})
    own = {"metricSectionId": VIEW, "deleted": False, "isGenerated": False}
    return {
        "orderByKey": "metrics.`speedup`",
        "orderByAsc": False,
        "selectedColumns": list(COLUMNS),
        "columnOrder": [*WIDTHS, *COLUMNS],
        "columnWidths": WIDTHS | COLUMNS,
        # Ours comes first: else sections are sorted by name.
        "isAccordionReordered": True,
        "compareRunSections": [{"uuid": VIEW, "name": "Comparison", "display": True, "isReordered": False}],
        "compareRunCharts": [chart | own | {"uuid": f"{VIEW}{index}"} for index, chart in enumerate(charts)],
    }
