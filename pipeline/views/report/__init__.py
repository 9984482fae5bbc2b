"""Turns the folder of a sweep into its report: figures, one page of HTML, a table of all numbers, a verdict in words.

It reads what the runs wrote and starts none. `track` has one MLflow run stand for the sweep, with the report in it.
"""

import csv
import io
import os
import time
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
from pipeline.views.terminal.words import clean

# The folder beside the points, and what it is called as a run of MLflow.
FOLDER = "report"
# What result.json has that the table of all numbers says otherwise, or not at all.
OF_THE_FILE = ("version", "status", "notes")


@dataclass(frozen=True)
class WrittenReport:
    """A report: where it is, what it says, and the sweep that it is about."""

    sweep: ReportedSweep
    verdict: Verdict
    html: Path
    csv: Path
    figures: tuple[Path, ...]
    drawn: tuple[Drawn | MissingFigure, ...]
    command: str

    @property
    def left_out(self) -> tuple[MissingFigure, ...]:
        """The figures that there was nothing to draw for."""
        return tuple(figure for figure in self.drawn if isinstance(figure, MissingFigure))

    @property
    def lines(self) -> list[str]:
        """The verdict, what it leaves out, what to change first and how good predictions were, in sentences."""
        first = page.advice(self.sweep, self.verdict)[:1]
        return [*verdict_lines(self.verdict), *first, *filter(None, [page.score(self.sweep)])]

    def shown(self) -> list[str]:
        """The same for a terminal, with where the report is, which figures it lacks, and last what to type next."""
        left_out = [f"left out of it: {figure.title}, since {figure.why}" for figure in self.left_out]
        typed = ["", clean(self.command)] if self.command else []
        return ["", *map(clean, self.lines), "", f"report: {from_here(self.html)}", *left_out, *typed]


def warm_up() -> None:
    """Imports what a report is judged and drawn with, which takes half a second."""
    for name in ("scipy.special", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg"):
        import_module(name)


def write(folder: Path) -> WrittenReport:
    """Writes the report of the sweep in `folder`. Raises `UserError` without a sweep, `OSError` if it cannot write."""
    sweep = gather(folder)
    decided = compare.decide(sweep.points, [point.configuration for point in sweep.points], sweep.knee_share)
    drawn, figures = tuple(draw(sweep)), dict[Path, bytes]()
    beside = sweep.folder / FOLDER
    beside.mkdir(exist_ok=True)
    for old in (*beside.glob("*.svg"), *beside.glob("*.png")):
        old.unlink()
    for figure in drawn:
        if isinstance(figure, Drawn):
            figures |= {beside / f"{figure.name}.svg": figure.svg, beside / f"{figure.name}.png": figure.png}
    for path, content in figures.items():
        path.write_bytes(content)
    html, table = sweep.folder / "report.html", sweep.folder / "points.csv"
    written = WrittenReport(sweep, decided, html, table, tuple(figures), drawn, page.next_command(sweep, decided))
    _write_pages(written)
    return written


def with_ids(written: WrittenReport) -> WrittenReport:
    """The report with the ids that the runs got in MLflow since it was written. Raises `OSError`."""
    before = written.sweep.points
    points = tuple(replace(point, result=results.read(point.folder) or point.result) for point in before)
    ids, ids_before = (
        [(point.result.mlflow_run_id, point.result.tracking_note) for point in each] for each in (points, before)
    )
    if ids != ids_before:
        written = replace(written, sweep=replace(written.sweep, points=points))
        _write_pages(written)
    return written


def track(folder: Path, written: WrittenReport, tracker: Tracking, store: TrackingStore) -> None:
    """Writes the report as an event log that `tracker` sends to `store`: the one run that stands for the sweep.

    Written again, a report goes on in the same log and so in the same run.
    """
    run = Run.from_log(folder.resolve() / FOLDER)
    tags: dict[str, object] = {"sweep": written.sweep.name, "kind": "report", **origin()}
    run.open()
    try:
        run.append(run.first_event(f"sweep {written.sweep.name}", store.experiment or "", {}, tags))
        run.append(_report_event(written))
        run.append(Ended("FINISHED", time=time.time()))
    finally:
        run.close()
    tracker.follow(run.folder, store)


def _write_pages(written: WrittenReport) -> None:
    write_whole(written.html, page.page(written.sweep, written.verdict, written.drawn))
    rows, text = _rows(written.sweep), io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(written.csv, text.getvalue())


def _rows(sweep: ReportedSweep) -> list[dict[str, object]]:
    return [
        {
            "point": point.number,
            "status": point.status,
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


def _report_event(written: WrittenReport) -> Report:
    sweep, best = written.sweep, written.verdict.best
    ids = [(point, point.result.mlflow_run_id) for point in sweep.points]
    points = [f"- {point.name.strip()}: {point.status}{f', run {run_id}' if run_id else ''}" for point, run_id in ids]
    files = {"": (written.html, written.csv), "figures": written.figures}
    parts = [
        *written.lines,
        *(f"`{typed.replace('`', '?')}`" for typed in (clean(written.command), *page.typed_commands(sweep)) if typed),
        "The report is report.html under Artifacts. Its points:",
        "\n".join(points),
    ]
    return Report(
        files={place: [os.path.relpath(path, sweep.folder) for path in paths] for place, paths in files.items()},
        tags={
            "best": contestant_name(best) if best else None,
            "confidence": confidence(written.verdict) or None,
            "verdict": " ".join(verdict_lines(written.verdict)),
        },
        text="\n\n".join(parts),
        time=time.time(),
    )
