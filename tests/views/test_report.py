"""The report of a sweep: what it says, what it shows at which width, and the one MLflow run that stands for it."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shown_runs import wrote

from pipeline.analyze import history
from pipeline.commands.results import report as main
from pipeline.driver.run_folders import find
from pipeline.errors import UserError
from pipeline.record.files import Entry, write_sweep
from pipeline.views import report
from pipeline.views.report import figures
from pipeline.views.report.page import facts, typed_commands

COMMIT = "3a0ee61939d3"
PARTS = {"input wait": 0.02, "communication": 0.2, "contention": 0.06, "host overhead": 0.01, "other": -0.01}


def a_point(folder: Path, strategy: str, workers: int, speed: float, **result: Any) -> None:
    """What a run of a sweep writes, with its epochs, an explanation and a prediction that was made before."""
    lost = 1 - speed / 100 / workers
    told = {
        "strategy": strategy, "workers": workers, "examples_per_second": speed, "examples_per_second_low": speed * 0.98,
        "examples_per_second_high": speed * 1.02, "baseline_examples_per_second": 100.0, "speedup": speed / 100,
        "speedup_low": speed / 100 * 0.97, "speedup_high": speed / 100 * 1.03, "efficiency": 1 - lost,
        "interval_confidence": 0.9375, "parameters": 9_610,
        "step_ms_p50": 64_000 * workers / speed, "input_wait": 0.02, "mlflow_run_id": f"{workers}" * 32,
        "predictions": [
            {"examples_per_second": speed * 1.1, "low": speed * 0.9, "high": speed * 1.3, "error": 0.1, "held": True}
        ],
        "explained": {
            "lost": lost, "lost_low": lost - 0.02, "lost_high": lost + 0.02, "bound": "communication",
            "straggler": None,
            "parts": [{"name": name, "share": share, "low": share, "high": share} for name, share in PARTS.items()],
            "advice": "Communication takes 20% of the ideal throughput: try train.gradient_bits=16.",
        } if workers > 1 else None,
    }  # fmt: skip
    wrote(folder, [speed * (1 + off / 100) for off in (-2, -1, 0, 1, 2)], {"workers": workers}, **told | result)
    (folder / "hydra").mkdir()
    typed = ["data=digits", "model.build.hidden=[8]", f"strategy={strategy}", f"workers={workers}"]
    (folder / "hydra" / "overrides.yaml").write_text(json.dumps(typed))
    tags = {"git_commit": COMMIT, "command": f"python -m pipeline --config-dir=mine {' '.join(typed)}"}
    run = {"event": "run", "time": 0.0, "key": folder.name, "tags": tags}
    epochs = [
        {"event": "epoch", "group": "point", "time": 1.0, "epoch": epoch, "step": epoch, "seconds": 100.0 / speed,
         "loss": 1.0, "metrics": {}, "val_loss": 1 / epoch, "val_metrics": {"accuracy": 1 - 0.5**epoch}}
        for epoch in range(1, 6)
    ]  # fmt: skip
    log = folder / "events.jsonl"
    log.write_text("\n".join([json.dumps(run), log.read_text().strip(), *map(json.dumps, epochs), ""]))


def left_out(made: report.WrittenReport) -> list[str]:
    return [each.title for each in made.drawn if isinstance(each, figures.MissingFigure)]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> report.WrittenReport:
    """Two strategies on one to four workers; one point is oversubscribed, one failed, one was refused."""
    folder = tmp_path_factory.mktemp("outputs") / "sweeps" / "scaling"
    speeds = {("mirrored", 1): 101.0, ("mirrored", 2): 185.0, ("mirrored", 4): 320.0,
              ("multi_worker", 1): 99.0, ("multi_worker", 2): 140.0, ("multi_worker", 4): 170.0}  # fmt: skip
    for place, ((strategy, workers), speed) in enumerate(speeds.items()):
        a_point(folder / f"{place}_{strategy}", strategy, workers, speed, oversubscribed=place == 5)
    typed = folder / "0_mirrored/hydra/overrides.yaml"
    typed.write_text(json.dumps([*json.loads(typed.read_text()), "+note=<script>document.title='taken'</script>"]))
    ends = {"10_tpu": ("FAILED", "Worker 1 was killed."), "11_tpu": ("REFUSED", "Expected a TPU. Try workers=2.")}
    for name, (status, error) in ends.items():
        (folder / name).mkdir()
        result = json.dumps({"status": status, "error": error, "strategy": "tpu", "workers": 8})
        (folder / name / "result.json").write_text(result)
    return report.write(folder)


def test_the_verdict_names_the_best_with_its_confidence_and_what_to_change(written):
    assert (written.verdict.use, written.verdict.best.places) == ("best", (2,))
    assert written.lines[0].startswith("Use mirrored on 4 workers (point 2): it is almost certainly faster than one")
    assert written.lines[-5:] == [
        "Up to 4 workers, the most measured, each brought 50% of one alone or more.",
        "Left out of the verdict: point 5 (oversubscribed).",
        "Not ranked, without a speed: points 6 and 7.",
        "Points 1-2,4-5: Communication takes 20% of the ideal throughput: try train.gradient_bits=16.",
        "6 predictions scored: off by 10% (median), 6 of 6 intervals held.",
    ]


def test_every_figure_is_there_in_both_formats_with_one_look_of_a_strategy_and_parts_of_a_step_add_up_to_it(written):
    drawn = [*(written.sweep.folder / "report").glob("*.*g")]
    assert {path.name for path in drawn} == {
        f"{name}.{kind}" for name in ("scaling", "throughput", "learning", "steps") for kind in ("svg", "png")
    }
    assert all(path.stat().st_size > 5_000 for path in drawn)
    assert left_out(written) == []
    explained = {point.number: figures.causes(point) for point in written.sweep.measured if point.result.explained}
    assert len(explained) == 4
    for place, split in explained.items():
        assert sum(split.values()) == pytest.approx(written.sweep.points[place].result.speed.step_ms_p50)
    blue, orange, *others = (colour.lower() for colour in figures.STRATEGIES)
    for name, svg in ((figure.name, figure.svg.decode().lower()) for figure in written.drawn):
        assert blue in svg, name
        assert orange in svg, name
        # Causes have colours of their own.
        assert name == "steps" or not [colour for colour in others[:-1] if colour in svg], name
    looks = {figures._strategy(point): figures._look_of(point, written.sweep) for point in written.sweep.points}
    assert {name: look["marker"] for name, look in looks.items()} == {"mirrored": "o", "multi_worker": "s", "tpu": "D"}


def test_the_page_asks_no_host_shows_what_was_typed_as_text_and_tells_what_failed_and_a_table_has_all_numbers(written):
    page = written.html.read_text()
    assert page.count('<svg role="img" aria-label="') == 4
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not re.search(r"https?://|<script|<link|url\((?!#)", page)
    assert "+note=<wbr>&lt;script&gt;" in page
    assert "Point 6 failed: Worker 1 was killed." in page
    assert "Point 7 refused: Expected a TPU. Try workers=2." in page
    assert "<td>22222222</td>" in page
    header, *rows = (written.sweep.folder / "points.csv").read_text().splitlines()
    names = header.split(",")
    assert len(rows) == 8
    assert {"examples_per_second_low", "explained.parts.communication.share", "predictions.0.held"} <= set(names)
    assert dict(zip(names, rows[2].split(","), strict=False))["speedup"] == "3.2"


def test_the_head_says_what_was_run_and_how_to_run_it_again(written):
    said = facts(written.sweep)
    repeats = "from the lowest to the highest of the repeats"
    assert said == {
        "model": "mlp(hidden=[8]), 9,610 parameters",
        "data": "digits",
        "batch": "64 examples a step on each replica, held fixed: weak scaling",
        "precision": "float32",
        "baseline": "one device without a strategy: 100 examples/s",
        "intervals": f"{repeats}, which holds the true median with a probability of 94%",
        "versions": "keras 3",
        "commit": COMMIT,
    }
    (first, *others) = typed_commands(written.sweep)
    # One of the points was asked for something else, so they are no combinations of some values.
    assert first.startswith("python -m pipeline -m --config-dir=mine data=digits 'model.build.hidden=[8]'")
    assert len(others) == 5
    page = written.html.read_text()
    assert page.index('id="facts"') < page.index('id="figures"')
    assert all(f"<dt>{name}</dt>" in page for name in [*said, "commands"])
    assert "Under throughput and speedup: 94% interval." in page
    # In the table stands what not all points share.
    assert '<td class="long">strategy=<wbr>mirrored workers=<wbr>2</td>' in page


@pytest.mark.usefixtures("without_figures")
def test_points_that_differ_in_what_was_run_are_told_with_it_and_one_that_failed_lowers_no_target(tmp_path):
    a_point(tmp_path / "0_mirrored", "mirrored", 1, 100.0, baseline_source="measured in this run")
    other = {"precision": "mixed_bfloat16", "scaling": "strong", "status": "FAILED"}
    a_point(tmp_path / "1_mirrored", "mirrored", 2, 190.0, baseline_source="reused from there", **other)
    log = tmp_path / "1_mirrored" / "events.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if not re.search('"epoch": [2-5]', line)))
    sweep = report.write(tmp_path).sweep
    assert (sweep.metric, sweep.target) == ("accuracy", 1 - 0.5**5)
    assert [sweep.seconds_to_target(point) for point in sweep.points] == [pytest.approx(5.0), None]
    said = facts(sweep)
    assert said["baseline"].endswith(": 100 examples/s, measured in turn with point 0")
    assert said["precision"] == "float32 (point 0); mixed_bfloat16 (point 1)"
    assert said["batch"].endswith("128 examples a step over all replicas, held fixed: strong scaling (point 1)")
    assert typed_commands(sweep) == [
        "python -m pipeline -m --config-dir=mine data=digits 'model.build.hidden=[8]' strategy=mirrored workers=1,2",
    ]


def test_a_report_is_written_again_in_its_place_is_no_run_and_its_sweep_is_found_or_refused_by_name(written, capsys):
    assert report.write(written.sweep.folder).html.read_text() == written.html.read_text()
    output = written.sweep.folder.parents[1]
    assert history.find_sweep("scaling", output, "sweep", "") == written.sweep.folder
    assert history.find_sweep(str(written.sweep.folder), Path("nowhere"), "sweep", "") == written.sweep.folder
    with pytest.raises(UserError):
        find("report", output)
    for arguments in (["sweep=nothing", f"output_dir={output}"], [f"output_dir={output}"], ["swep=scaling"]):
        assert main(arguments) == 2
        assert "Try sweep=scaling" in capsys.readouterr().err


def test_a_figure_with_nothing_to_show_is_left_out_and_the_report_says_why(tmp_path):
    for place in range(2):
        wrote(tmp_path / f"{place}_mirrored", [], examples_per_second=None)
    made = report.write(tmp_path)
    assert left_out(made) == [
        "Speedup and efficiency against workers", "Throughput by strategy", "Time to accuracy", "Step time by cause",
    ]  # fmt: skip
    assert "Left out: Throughput by strategy, since no point was measured." in made.html.read_text()
    assert made.lines == ["No verdict: no point was measured."]
    for place in (1, 2):
        a_point(tmp_path / f"{place + 1}_mirrored", "mirrored", place, 95.0 * place, explained=None)
    assert left_out(report.write(tmp_path)) == ["Step time by cause"]


@pytest.mark.usefixtures("without_figures")
def test_a_sweep_that_lists_its_points_tells_those_without_a_result_and_pools_repeats(tmp_path):
    """One was not run; one was killed once its steps were timed, so no result says what it was, and a file is cut."""
    killed = Path(wrote(tmp_path / "0_tpu", [300.0, 301.0]))
    (killed / "result.json").unlink()
    (killed / "hydra").mkdir()
    (killed / "hydra" / "config.yaml").write_text("predict: {knee_share: [")
    entries = [Entry(0, 0, "x", "0_tpu", ("a=\udce9",)), Entry(1, 0, "x", "1_tpu", ())]
    for number, speed in enumerate((120.0, 122.0, 150.0, 151.0), 2):
        strategy = "mirrored" if number < 4 else "multi_worker"
        a_point(tmp_path / f"{number}_{strategy}", strategy, 2, speed)
        place, typed = number // 2 + 1, (f"strategy={strategy}",)
        entries.append(Entry(place, number % 2, strategy, f"{number}_{strategy}", typed, "FINISHED"))
    write_sweep(tmp_path, entries)
    made = report.write(tmp_path)
    assert made.verdict.best is not None
    assert made.verdict.best.places == (4, 5)
    assert "multi_worker on 2 workers (points 4 and 5)" in made.lines[0]
    page = made.html.read_text()
    assert "Point 0 unfinished: it was started and has not ended" in page
    assert "Point 1 not run: it was not run yet" in page
    assert [point.result.ending.status for point in made.sweep.points] == ["UNFINISHED", "NOT RUN", *["FINISHED"] * 4]


# Linear RGB as the colour-blind see it (Machado, Oliveira & Fernandes, 2009, severity 1.0).
SEEN = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def rgb(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


@pytest.mark.parametrize("on", [str, figures.DARK.get], ids=["light", "dark"])
def test_the_colours_are_told_apart_by_the_colour_blind_and_stand_out_from_their_paper(on):
    """By WCAG 2: 3 to 1 for what is drawn, 4.5 to 1 for what is written; the palest of Okabe & Ito have markers."""
    linear = np.array([rgb(on(colour)) for colour in figures.STRATEGIES]) ** 2.2
    for seen in map(np.array, SEEN.values()):
        shown = np.clip(linear @ seen.T, 0, 1) ** (1 / 2.2)
        assert min(np.abs(one - two).max() for at, one in enumerate(shown) for two in shown[:at]) > 0.08
    assert len({tuple(figures.look(place).values()) for place in range(14)}) == 14

    def luminance(colour: str) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb(colour)]
        return float(np.dot((0.2126, 0.7152, 0.0722), linear))

    def contrast(colour: str) -> float:
        light, dark = sorted((luminance(on(colour)), luminance(on(figures.PAPER))), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    assert contrast(figures.INK) > 4.5
    assert min(map(contrast, figures.STRATEGIES[:3])) > 3
    assert on is str or min(map(contrast, figures.STRATEGIES)) > 4.5


OVERLAPPING = """
const parts = [...document.querySelectorAll('h1, h2, h3, p, li, dt, dd, th, td, svg')];
const boxes = parts.map(each => each.getBoundingClientRect()), text = at => parts[at].outerHTML.slice(0, 80);
const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
return boxes.flatMap((a, i) => boxes.slice(0, i).flatMap((b, j) => overlap(a, b) ? [text(i) + ' / ' + text(j)] : []));
"""
TOO_WIDE = """
return [...document.querySelectorAll('body :not(svg *)')].filter(each => !each.closest('table')
  && each.getBoundingClientRect().right > innerWidth + 0.5).map(each => each.outerHTML.slice(0, 80));
"""
# The smallest text, and how large each picture is of the size in points that it was drawn in.
SIZES = """
const texts = [...document.querySelectorAll('body *')], pictures = [...document.querySelectorAll('svg')];
return [Math.min(...texts.map(each => parseFloat(getComputedStyle(each).fontSize))),
  ...pictures.map(each => each.getBoundingClientRect().width / (each.viewBox.baseVal.width * 96 / 72))];
"""


@pytest.fixture
def opened(written, browser) -> Iterator[Callable[..., Any]]:
    """Opens the page in a browser that is so wide, on a screen or on paper, in a reader's colours."""

    def open_page(width: int, media: str = "", scheme: str = "light") -> Any:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        browser.get(written.html.as_uri())
        return browser

    yield open_page
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_reads_at_desktop_and_phone_width(written, opened, width):
    browser = opened(width)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.execute_script(TOO_WIDE) == []
    assert browser.execute_script(OVERLAPPING) == []
    smallest, *pictures = browser.execute_script(SIZES)
    assert smallest >= 12
    assert len(pictures) == 4
    # Texts of the figures have 9.5 points or more, so that they stay above 8 pixels.
    assert all(scale > 8 / (9.5 * 96 / 72) for scale in pictures)
    assert browser.title == "scaling: report of a sweep"
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in asked if each["method"] == "Network.requestWillBeSent"]
    assert written.html.as_uri() in urls
    # The browser's own first page may still be asking for its parts.
    assert [url for url in urls if not re.match("file:|data:|chrome:|chrome-untrusted:|about:", url)] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


DRAWN = """
const papers = [...document.querySelectorAll('svg #patch_1 path')].map(each => getComputedStyle(each).fill);
return [getComputedStyle(document.body).backgroundColor, ...papers];
"""


@pytest.mark.slow
def test_the_page_is_light_or_dark_as_the_reader_has_it_fills_two_columns_and_is_light_and_not_cut_on_paper(opened):
    light, dark = "rgb(255, 255, 255)", "rgb(22, 24, 28)"
    for media, scheme, paper in (("", "light", light), ("", "dark", dark), ("print", "dark", light)):
        assert opened(1280, media, scheme).execute_script(DRAWN) == [paper] * 5
    boxes = opened(1280).execute_script(
        "return [...document.querySelectorAll('figure')].map(each => each.getBoundingClientRect().toJSON());"
    )
    columns = [[box for box in boxes if box["left"] == left] for left in sorted({box["left"] for box in boxes})]
    assert len(columns) == 2
    # Under each figure the next one begins.
    assert all(lower["top"] - upper["bottom"] < 40 for column in columns for upper, lower in pairwise(column))
    # A4 between its margins.
    browser = opened(688, "print")
    assert browser.execute_script(TOO_WIDE) == []
    assert browser.execute_script(
        "const [table] = document.getElementsByTagName('table');"
        "return table.scrollWidth <= table.parentNode.clientWidth + 1;"
    )
