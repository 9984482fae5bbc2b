"""Folds a run's events into what they change in its MLflow run: metrics, parameters, tags, the data set, the end.

It imports no MLflow, and leaves the sending to `pipeline.views.mlflow.copies`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.analyze import comparable
from pipeline.record import events, results
from pipeline.record.log import to_plain
from pipeline.views.mlflow import texts
from pipeline.views.terminal.words import listed, number, speedup_span, throughput_span

# A value of result.json is a measurement where its name says a rate, a ratio or a unit.
MEASUREMENT = re.compile(
    r"per_second|speedup|efficiency|staleness|(^|_)(seconds|ms|gib|percent|joules|cost|price)(_|$)|goodput|^(input_wait|other_work|updates|restarts|rollbacks|steps_repeated)$"
)
# The values of result.json that are tags.
RESULT_TAGS = ("status", "error", "rehearsal", "oversubscribed", "asynchronous", "input_bound", "xla", "stopped_by")
STATUSES = ("FINISHED", "FAILED", "KILLED")


@dataclass
class Changes:
    """Changes of an MLflow run. First it is `reopened`, at last it has an `end`: its status and time in ms."""

    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: list[texts.MetricValue] = field(default_factory=list)
    datasets: list[dict[str, str]] = field(default_factory=list)  # as MLflow's `Dataset` takes them
    reopened: bool = False
    end: tuple[str, int] | None = None


@dataclass
class LogState:
    """State of a log's events so far, as later events need it, and the `changes` that are to be sent.

    `driver` is the event of the command that wrote last, the `commands`-th. `last` is the last step of each curve, and
    `epoch` the last epoch: of steps, epochs and repeats that are made again, those up to there are sent already.
    """

    run: events.Run | None = None
    driver: events.Run | events.Resumed | events.Attached | None = None
    commands: int = 0
    last: dict[str, int] = field(default_factory=dict)
    epoch: int = 0
    training_ms: int | None = None  # when training reported its first steps
    time_ms: int = 0
    built: bool = False
    result: str = ""  # its description says this, the error and the notes
    error: str = ""
    notes: dict[str, None] = field(default_factory=dict)
    model: str | None = None
    # The files of a sweep's report: paths in the sweep's folder, by the folder of the artifacts that they belong in.
    report: dict[str, list[str]] = field(default_factory=dict)
    ended: bool = False
    changes: Changes = field(default_factory=Changes)

    def take(self, event: events.Event) -> None:
        """Adds what `event` changes: nothing for an event that MLflow has no place for."""
        if not (event.of_point or isinstance(event, events.Measured)):
            return
        self.time_ms = max(self.time_ms, texts.ms(event))
        match event:
            case events.Run() if self.run is None:
                self._begun(event)
            case events.Resumed():
                self._resumed(event)
            case events.Attached():
                self.driver = event
                # Nobody may have been left to say that it goes on.
                self._tags({"status": "RUNNING"})
                self.changes.reopened = True
            case events.Built(rank=0) if not self.built:
                self._built(event)
            case events.Measured(rank=0, group=group):
                # Repeats of a group end in their median.
                name = texts.FIRST if group in (None, "point") else f"{group}_{texts.FIRST}"
                self._curve(texts.measurement(name), _rate(event), event, event.repeat)
            case events.Profiled(values=pace):
                self._tags({"profile.bound": pace.bound})
                for name in ("input", "model", "ceiling"):
                    called = f"{name}_examples_per_second"
                    self._metric(f"profile/{called}", getattr(pace, called), event, 0)
            case events.Steps():
                self._stepped(event)
            # Made again by fewer workers, an epoch may end at another step.
            case events.Epoch() if event.epoch > self.epoch:
                self.epoch = event.epoch
                # By optimizer step, so that MLflow can draw it over the training loss; by epoch where that is the axis.
                self._curve("train/epoch", event.epoch, event, event.step)
                self._learnt(event, event, event.step)
            case events.System():
                host = texts.safe_name(event.host).replace("/", "_")
                for name, value in event.values.items():
                    called = f"system/{host}/{name}"
                    self._curve(called, value, event, self.last.get(texts.safe_name(called), -1) + 1)
            case events.Warned() | events.Restarted():
                self.notes[event.text] = None
                self._describe()
            case events.Saved():
                self.model = event.path
            # The sentence about it is a note of the result.
            case events.Checked(rank=0, values=check):
                self._tags({"check": check.outcome})
                if check.outcome != "not made":
                    self._metric("one_device/largest_difference", check.largest, event, 0)
            case events.Explained(values=explanation):
                about = {"explain.bound": explanation.bound, "explain.straggler": explanation.straggler}
                self._tags({name: text for name, text in about.items() if text})
                shares = {part.name: part.share for part in explanation.parts}
                for name, share in {"lost": explanation.lost, **shares}.items():
                    self._metric(f"explain/{name.replace(' ', '_')}", share, event, 0)
            case events.Result():
                self._result(event)
            # Of a sweep, written once more; its points have the numbers, which it would double.
            case events.Report():
                self.report = event.files
                tags = {name: value or "" for name, value in event.tags.items()}
                self._tags(tags | {texts.NOTE_TAG: event.text})
            case events.Ended():
                self._ended(event)

    def _tags(self, tags: Mapping[str, object]) -> None:
        self.changes.tags |= {
            texts.safe_name(name): texts.text(value, texts.TAG_CHARACTERS) for name, value in tags.items()
        }

    def _describe(self) -> None:
        tags = self.run.tags if self.run is not None else {}
        typed = str(tags.get("command") or tags.get("overrides") or "").replace("`", "?")
        version = str(tags.get("git_commit") or "")[: texts.COMMIT_LETTERS]
        noted = "\n".join(f"- {note}" for note in self.notes)
        origin = listed(f"`{typed}`" if typed else "", f"commit `{version}`" if version else "")
        about = (f"**{self.error}**" if self.error else "", self.result, origin, noted)
        self._tags({texts.NOTE_TAG: "\n\n".join(filter(None, about))})

    def _metric(self, name: str, value: object, event: events.EventBase, step: int, before: float = 0.0) -> None:
        """Adds a point, of so many seconds before the event; nothing where the value is no number."""
        figure, called = number(value), texts.safe_name(name)
        if figure is not None:
            time_ms = texts.ms(event) - round(1000 * before)
            self.changes.metrics.append(texts.MetricValue(called, texts.significant(called, figure), time_ms, step))

    def _curve(self, name: str, value: object, event: events.EventBase, step: int, before: float = 0.0) -> None:
        """Adds a point of a curve that has none of that step, or of a later one."""
        if number(value) is not None and self.last.get(texts.safe_name(name), -1) < step:
            self.last[texts.safe_name(name)] = step
            self._metric(name, value, event, step, before)

    def _begun(self, event: events.Run) -> None:
        self.run, self.driver, self.commands = event, event, 1
        self.changes.params |= {
            texts.safe_name(name): texts.text(value, texts.PARAM_CHARACTERS) for name, value in event.params.items()
        }
        self._tags({**event.tags, "pipeline.folder": event.folder})
        # MLflow sorts parameters as text, and draws metrics alone.
        for name in ("workers", "replica_batch", "global_batch"):
            self._metric(f"train/{name}", event.params.get(name), event, 0)
        for name, why in comparable.DOUBTS.items():
            if event.tags.get(name) == "true":
                self.notes[f"**{name}**: {why}"] = None
        self._describe()

    def _resumed(self, event: events.Resumed) -> None:
        self.driver, self.ended = event, False
        self.commands += 1
        self.error = ""  # what the command before ended with holds no longer
        self._describe()
        # Parameters are fixed for a run in MLflow; what another command had otherwise is a tag.
        then = {} if self.run is None else self.run.params
        changed = {f"resumed/{name}": value for name, value in event.params.items() if then.get(name) != value}
        resumed: dict[str, object] = {"preempted": "false", "error": "", "resumed": self.commands - 1}
        self._tags({"status": "RUNNING", **resumed, **changed})
        self.changes.reopened = True

    def _built(self, event: events.Built) -> None:
        self.built, plain = True, to_plain(event)
        sizes = ("parameters", "input_shape", "num_classes")
        self._tags({name: plain[name] for name in sizes if plain.get(name) is not None})
        data = "data" if self.run is None else self.run.params.get("data", "data")
        counted = ("train_examples", "validation_examples", "num_classes", "input_shape", "steps_per_epoch")
        features = texts.tensors(event.input_dtype or "float32", event.input_shape or [])
        self.changes.datasets.append({
            "name": texts.text(data, texts.NAME_CHARACTERS),
            "digest": texts.text(event.data_digest or "unknown", texts.DIGEST_CHARACTERS),
            # As mlflow.data.schema.TensorDatasetSchema writes it: JSON within JSON.
            "schema": json.dumps({"mlflow_tensorspec": {"features": features, "targets": texts.tensors("int32", [])}}),
            "profile": json.dumps({name: plain[name] for name in counted if plain.get(name) is not None}),
        })  # fmt: skip

    def _stepped(self, event: events.Steps) -> None:
        losses, seconds = event.losses, number(event.seconds) or 0.0
        self.training_ms = self.training_ms or texts.ms(event)
        # The call took `seconds` and ended now; its steps took equal parts of that.
        for left, loss in zip(reversed(range(len(losses))), losses, strict=True):
            self._curve("train/loss", loss, event, event.step - left, seconds * left / len(losses))
        for name, value in event.metrics.items():
            if name != "loss":
                self._curve(f"train/{name}", value, event, event.step)
        self._curve("train/learning_rate", event.learning_rate, event, event.step)
        self._curve("train/examples_per_second", _rate(event), event, event.step)

    def _learnt(self, values: events.Epoch | results.Training, event: events.EventBase, step: int) -> None:
        """Adds an epoch's metrics; a value that is sent already for that step is left out."""
        self._curve("train/epoch_loss", values.loss, event, step)
        for name, value in values.metrics.items():
            self._curve(f"train/{name}", value, event, step)
        for name, held in {"loss": values.val_loss, **values.val_metrics}.items():
            self._curve(f"val/{name.removeprefix('val_')}", held, event, step)

    def _result(self, event: events.Result) -> None:
        for name, value in event.values.items():
            if MEASUREMENT.search(name):
                called = texts.measurement(name)
                # After the repeats that it is the median of.
                self._metric(called, value, event, self.last.get(called, -1) + self.commands)
            elif name in RESULT_TAGS and (value is not None or self.commands > 1):
                # What the result of an earlier command said holds no longer.
                self._tags({name: "" if value is None else value})
        result = results.from_values(event.values)
        # The intervals of what is compared, each in one column of MLflow's table.
        ends = {"speedup_range": speedup_span(result.speed), f"{texts.FIRST}_range": throughput_span(result.speed)}
        self._tags({name: text for name, text in ends.items() if text})
        # What no epoch has told.
        learnt = [step for name, step in self.last.items() if name.startswith(("train/", "val/"))]
        self._learnt(result.training, event, max(learnt, default=0))
        self.result = texts.sentence(result)
        self.notes |= dict.fromkeys(result.notes)
        self._describe()

    def _ended(self, event: events.Ended) -> None:
        preempted = event.status == "PREEMPTED"
        status = "KILLED" if preempted else event.status if event.status in STATUSES else "FAILED"
        self.ended = True
        self._tags({"status": status} | ({"preempted": "true"} if preempted else {}))
        if event.error:
            self.error = event.error
            self._tags({"error": event.error})
            self._describe()
        self.changes.end = status, texts.ms(event)


def _rate(event: events.Measured | events.Steps) -> float | None:
    examples, seconds = number(event.examples), number(event.seconds)
    return examples / seconds if examples is not None and seconds else None
