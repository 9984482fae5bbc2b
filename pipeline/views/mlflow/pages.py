"""Texts for a person in MLflow: a run's description, and an experiment's page with a view of its runs by speedup.

MLflow keeps these as tags, so that every browser shows them. This makes the tags and the page's address, and leaves
the sending to `pipeline.views.mlflow.copies`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.analyze.comparable import doubts
from pipeline.record.results import Result
from pipeline.views.mlflow.fields import NOTE_TAG
from pipeline.views.terminal.words import (
    brackets,
    clean,
    figure,
    listed,
    per_second,
    percent,
    plural,
    speedup_span,
    throughput_span,
)

# Enough of a commit's name to find it by.
COMMIT_LETTERS = 12
PAGE_TAG, VIEW = "pipeline.page", "speedup"
# As MLflow 3.17's user interface has them: what it shows an experiment for, and a view by its id.
KIND_TAG, VIEW_TAG = "mlflow.experimentKind", f"mlflow.sharedViewState.{VIEW}"
KIND, WORKFLOW = "custom_model_development", "machine_learning"
# What a column shows, and its width in pixels: all but the last are in sight on a page 1,440 wide, beside its panel.
COLUMNS = {
    "params.`strategy`": 95,
    "metrics.`train/workers`": 100,
    "metrics.`speedup`": 98,
    "tags.`speedup_range`": 112,
    "metrics.`efficiency`": 80,
    "metrics.`examples_per_second`": 155,
    "metrics.`val/accuracy`": 95,
    "tags.`sweep`": 150,
}
# Of the columns that stand still at the left, which MLflow shows by itself.
WIDTHS = {"attributes.`Run Name`": 240, "runDateAndNestInfo": 130}
BARS = ("examples_per_second", "speedup", "efficiency", "val/accuracy")
# Across and up.
SCATTERS = (("train/workers", "speedup"), ("time/seconds_training", "val/accuracy"))
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


@dataclass
class About:
    """Facts about a run, collected for its description."""

    result: str = ""
    error: str = ""
    command: str = ""
    commit: str = ""
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def text(self) -> str:
        """The description, in Markdown.

        >>> About(result="**Two.**", command="python -m pipeline", notes=["Slow."]).text
        '**Two.**\\n\\n`python -m pipeline`\\n\\n- Slow.'
        """
        command = f"`{self.command.replace('`', '?')}`" if self.command else ""
        commit = f"commit `{self.commit[:COMMIT_LETTERS]}`" if self.commit else ""
        parts = (
            f"**{self.error}**" if self.error else "",
            self.result,
            listed(command, commit),
            "\n".join(f"- {note}" for note in self.notes),
        )
        return "\n\n".join(part for part in parts if part)


def sentence(result: Result) -> str:
    """Returns a run's speedup and throughput with their intervals, and its choices; empty where nothing was measured.

    >>> from pipeline.record.results import from_values
    >>> sentence(from_values({"examples_per_second": 96.04, "strategy": "mirrored", "workers": 2}))
    '**96.0 examples/s** with mirrored on 2 workers.'
    """
    speed, layout, training = result.speed, result.layout, result.training
    if speed.examples_per_second is None:
        return ""
    ends, throughput = throughput_span(speed), per_second(speed)
    doubtful = listed(*doubts(layout))
    lead = f"**{throughput}**{brackets(listed(doubtful, ends))}"
    if speed.speedup is not None:
        efficiency = "" if speed.efficiency is None else f", {percent(speed.efficiency)} efficiency"
        lead = (
            f"**{speed.speedup:.2f} times one device**{brackets(listed(doubtful, speedup_span(speed)))}{efficiency}: "
        )
        lead += f"{throughput}{brackets(ends)}"
    strategy = " on ".join(filter(None, [clean(result.choices.called), plural(layout.workers, "worker")]))
    scaling = f"{layout.scaling} scaling" if layout.scaling else ""
    sure = f"{percent(speed.interval_confidence)} intervals" if ends and speed.interval_confidence else ""
    metrics = [(clean(name), value) for name, value in training.val_metrics.items()][:1]
    learnt = "".join(f"validation {name} {figure(value)}" for name, value in metrics)
    choices = listed(strategy, scaling, clean(layout.precision), sure, learnt)
    return f"{lead} with {choices}." if choices else f"{lead}."


def missing(tags: Mapping[str, str], time_ms: int) -> dict[str, str]:
    """Returns the tags that an experiment with these `tags` lacks; a person's own text and choices stay.

    >>> sorted(missing({"mlflow.note.content": "Ours."}, 0))
    ['mlflow.experimentKind', 'mlflow.sharedViewState.speedup', 'pipeline.page']
    >>> missing({"pipeline.page": missing({}, 0)["pipeline.page"]}, 0)
    {}
    """
    state = json.dumps(_view())
    page = hashlib.sha256(f"{DESCRIPTION}{state}".encode()).hexdigest()[:12]
    if tags.get(PAGE_TAG) == page:
        return {}
    named = {"name": "By speedup", "createdAt": time_ms, "updatedAt": time_ms, "state": state}
    once = {NOTE_TAG: DESCRIPTION, KIND_TAG: KIND}
    ours = hashlib.sha256(tags.get(NOTE_TAG, "").encode()).hexdigest()[:12] in EARLIER
    return {name: text for name, text in once.items() if not tags.get(name) or (ours and name == NOTE_TAG)} | {
        VIEW_TAG: json.dumps(named),
        PAGE_TAG: page,
    }


def address(server: str, experiment: str) -> str:
    """Returns the address at which a server shows an experiment's runs by speedup.

    >>> address("http://127.0.0.1:5000", "1")
    'http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=speedup&workflowType=machine_learning'
    """
    return f"{server}/#/experiments/{experiment}/runs?viewStateShareKey={VIEW}&workflowType={WORKFLOW}"


def _view() -> dict[str, Any]:
    """The state of MLflow's runs page that differs from its own: sorting, columns and charts."""
    section = {"uuid": VIEW, "name": "Comparison", "display": True, "isReordered": False}
    charts: list[dict[str, Any]] = [
        {"type": "BAR", "metricKey": name, "displayName": name, "runsCountToCompare": 20} for name in BARS
    ]
    charts += [
        {"type": "SCATTER", "xaxis": _metric(across), "yaxis": _metric(up), "runsCountToCompare": 100}
        for across, up in SCATTERS
    ]
    own = {"metricSectionId": VIEW, "deleted": False, "isGenerated": False}
    return {
        "orderByKey": "metrics.`speedup`",
        "orderByAsc": False,
        "selectedColumns": list(COLUMNS),
        "columnOrder": [*WIDTHS, *COLUMNS],
        "columnWidths": WIDTHS | COLUMNS,
        # Ours comes first: else sections are sorted by name.
        "isAccordionReordered": True,
        "compareRunSections": [section],
        "compareRunCharts": [chart | own | {"uuid": f"{VIEW}{index}"} for index, chart in enumerate(charts)],
    }


def _metric(name: str) -> dict[str, str]:
    return {"key": name, "type": "METRIC"}
