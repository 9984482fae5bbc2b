"""Turns the folder of a sweep into its report: figures, one page of HTML, a table of all numbers, a verdict in words.

It reads what the runs wrote and starts none. `track` has one MLflow run stand for the sweep, with the report in it.
"""

import csv
import io
import time
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from pipeline.analyze import comparable, compare
from pipeline.analyze.compare import Verdict
from pipeline.driver import Tracking
from pipeline.driver.run import Run, origin
from pipeline.record import results
from pipeline.record.events import Ended, Report
from pipeline.record.files import TrackingStore
from pipeline.record.log import from_here, write_whole
from pipeline.record.results import to_values
from pipeline.views.report import page
from pipeline.views.report.figures import Drawn, MissingFigure, draw
from pipeline.views.report.gather import ReportedSweep, gather
from pipeline.views.terminal.verdict_text import confidence, contestant_name, mark_texts, verdict_lines
from pipeline.views.terminal.words import clean, listed

TABLE = "points.csv"  # of all numbers
FOLDER = "report"  # the folder beside the points, and what it is called as a run of MLflow
# What result.json has that the table of all numbers says otherwise, or not at all.
OF_THE_FILE = ("version", "status", "notes")
KINDS = ("svg", "png")  # the formats of a figure


@dataclass(frozen=True)
class WrittenReport:
    """A report: the sweep that it is about, its verdict, and its figures."""

    sweep: ReportedSweep
    verdict: Verdict
    drawn: tuple[Drawn | MissingFigure, ...]

    @property
    def html(self) -> Path:
        """The page."""
        return self.sweep.folder / "report.html"

    @property
    def lines(self) -> list[str]:
        """The verdict, what it leaves out, what to change first and how good predictions were, in sentences."""
        first = page.advice(self.sweep, self.verdict)[:1]
        return [*verdict_lines(self.verdict), *first, *filter(None, [page.score(self.sweep)])]

    def shown(self) -> list[str]:
        """The same for a terminal, with where the report is, which figures it lacks, and last what to type next."""
        missing = [figure for figure in self.drawn if isinstance(figure, MissingFigure)]
        left_out = [f"left out of it: {figure.title}, since {figure.why}" for figure in missing]
        command = clean(page.next_command(self.sweep, self.verdict))
        typed = ["", command] if command else []
        return ["", *map(clean, self.lines), "", f"report: {from_here(self.html)}", *left_out, *typed]


def warm_up() -> None:
    """Imports what a report is judged and drawn with, which takes half a second."""
    for name in ("scipy.special", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg"):
        import_module(name)


def write(folder: Path) -> WrittenReport:
    """Writes the report of the sweep in `folder`. Raises `UserError` without a sweep, `OSError` if it cannot write."""
    sweep = gather(folder)
    decided = compare.decide(sweep.points, [point.configuration for point in sweep.points], sweep.knee_share)
    drawn, beside = tuple(draw(sweep)), sweep.folder / FOLDER
    beside.mkdir(exist_ok=True)
    for old in (*beside.glob("*.svg"), *beside.glob("*.png")):
        old.unlink()
    for figure in (figure for figure in drawn if isinstance(figure, Drawn)):
        for kind in KINDS:
            (beside / f"{figure.name}.{kind}").write_bytes(getattr(figure, kind))
    written = WrittenReport(sweep, decided, drawn)
    _write_pages(written)
    return written


def track(written: WrittenReport, tracker: Tracking, store: TrackingStore) -> Path:
    """Writes the report as an event log that `tracker` sends to `store`, and returns its folder. Raises `OSError`.

    That is the one run that stands for the sweep: written again, a report goes on in the same log and so in the same
    run. Ids that runs got in MLflow since it was written are added to the pages.
    """
    before = written.sweep.points
    points = tuple(replace(point, result=results.read(point.folder) or point.result) for point in before)
    ids, ids_before = (
        [(point.result.mlflow_run_id, point.result.tracking_note) for point in each] for each in (points, before)
    )
    if ids != ids_before:
        written = replace(written, sweep=replace(written.sweep, points=points))
        _write_pages(written)
    name, run = written.sweep.folder.name, Run.from_log(written.sweep.folder / FOLDER)
    tags: dict[str, object] = {"sweep": name, "kind": "report", **origin()}
    run.open()
    with closing(run):
        run.append(run.first_event(f"sweep {name}", store.experiment or "", {}, tags))
        run.append(_report_event(written))
        run.append(Ended("FINISHED", time=time.time()))
    tracker.follow(run.folder, store)
    return run.folder


def _write_pages(written: WrittenReport) -> None:
    sweep, text = written.sweep, io.StringIO()
    write_whole(written.html, page.page(sweep, written.verdict, written.drawn))
    rows = [
        {
            "point": point.number,
            "status": point.result.ending.status,
            "group": point.group,
            "marks": "; ".join(mark_texts(point.marks)),
            "overrides": " ".join(point.overrides),
            "folder": point.folder.name,
            "target": sweep.target,
            "seconds_to_target": sweep.seconds_to_target(point),
            **{name: value for name, value in comparable.flat(to_values(point.result)) if name not in OF_THE_FILE},
        }
        for point in sweep.points
    ]
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(sweep.folder / TABLE, text.getvalue())


def _report_event(written: WrittenReport) -> Report:
    sweep, verdict = written.sweep, written.verdict
    points = []
    for point in sweep.points:
        run = f"run {point.result.mlflow_run_id}" * bool(point.result.mlflow_run_id)
        points.append(listed(f"- {point.name}: {point.result.ending.status}", run))
    typed = [clean(page.next_command(sweep, verdict)), *page.typed_commands(sweep)]
    commands = [f"`{command.replace('`', '?')}`" for command in typed if command]
    parts = [*written.lines, *commands, "The report is report.html under Artifacts. Its points:", "\n".join(points)]
    figures = [f"{FOLDER}/{each.name}.{kind}" for each in written.drawn if isinstance(each, Drawn) for kind in KINDS]
    return Report(
        files={"": [written.html.name, TABLE], "figures": figures},
        tags={
            "best": contestant_name(verdict.best) if verdict.best else None,
            "confidence": confidence(verdict) or None,
            "verdict": " ".join(verdict_lines(verdict)),
        },
        text="\n\n".join(parts),
        time=time.time(),
    )
