"""MLflow's user interface as a person sees it: a real server over real runs, in headless Chromium."""

import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Ran, finish, left_behind, start, until
from ports import free_port
from selenium.common.exceptions import WebDriverException
from tracked_runs import MlflowClient

from pipeline.commands.mlflow_store import HOST
from pipeline.commands.mlflow_store import ui as main

# On a busy machine.
SECONDS = 60


def test_a_port_that_is_taken_is_told_with_one_to_try_instead(capfd, tmp_path):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([f"port={port}", f"output_dir={tmp_path}"]) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"pipeline: Expected port {port} of 127.0.0.1 to be free, received")
    assert " Try port=" in err
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class Site:
    """A server of runs, the address that it was opened with, what the runs came to, and a browser."""

    address: str
    ran: Ran
    report: str
    metrics: dict[str, dict[str, float]]
    browser: Any

    @property
    def finished(self) -> list[dict[str, Any]]:
        """The results of the points that finished, the fastest first."""
        ended = [result for result in self.ran.results if result["status"] == "FINISHED"]
        return sorted(ended, key=lambda result: -result["speedup"])

    @property
    def efficiency(self) -> list[str]:
        """The name of efficiency where a run has one: over a baseline that a busy machine has slowed, it is none."""
        return ["efficiency"] if any(result["efficiency"] is not None for result in self.finished) else []

    @property
    def body(self) -> str:
        return str(self.browser.find_element("tag name", "body").text)

    def open(self, url: str) -> None:
        # Of an address that differs in its last part alone, the browser would not load the page.
        self.browser.get("about:blank")
        self.browser.get(url)

    def all(self, selector: str) -> list[Any]:
        return list(self.browser.find_elements("css selector", selector))

    def wait(self, what: Callable[[], Any]) -> Any:
        def drawn() -> Any:
            # The page may just be being drawn.
            with suppress(WebDriverException):
                return what()

        try:
            return until(drawn, SECONDS)
        except AssertionError as error:
            raise AssertionError(self.body) from error


def serving(folder: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    """The command, which serves the runs in `folder`, and the address that it opens."""
    said, command = folder / "said", [sys.executable, "-m", "pipeline", "ui", f"port={port}"]
    environ = {name: value for name, value in os.environ.items() if name != "DISPLAY"} | {"PYTHONPATH": str(ROOT)}
    with said.open("wb") as output:
        server = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output)
    until(lambda: "Runs by speedup: " in said.read_text() or server.poll() is not None, SECONDS)
    assert server.poll() is None, said.read_text()
    return server, said.read_text().rpartition("Runs by speedup: ")[2].strip()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Site]:
    # The page itself, without what frames it.
    size = {"width": 1440, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    folder, began = tmp_path_factory.mktemp("ui"), time.monotonic()
    sweep = start(
        folder, "-m", "data=digits", "model=mlp", "train.steps=4", "train.save=false", "measure.repeats=2",
        "tracking.drain_timeout=60", "strategy=one_device,mirrored", "workers=1,2",
    )  # fmt: skip
    ran = finish(sweep, folder, began, 240).ok()
    client = MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'pipeline'")
    runs = {run.info.run_id: run.data for run in client.search_runs([experiment.experiment_id])}
    (report,) = (run_id for run_id, data in runs.items() if data.tags.get("kind") == "report")
    server, address = serving(folder, free_port())
    try:
        # Where its assistant would cover a quarter of the page.
        browser.get(f"{address.partition('#')[0]}health")
        browser.execute_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
        metrics = {run_id: data.metrics for run_id, data in runs.items()}
        yield Site(address, ran, report, metrics, browser)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0, (folder / "said").read_text()
    assert not left_behind(folder)


@pytest.mark.slow
def test_a_command_that_is_killed_outright_leaves_no_server(tmp_path):
    server, _ = serving(tmp_path, free_port())
    server.kill()
    server.wait()
    # What ends the server gives it five seconds.
    assert not left_behind(tmp_path, patience=15.0)


CELLS = """
return [...document.querySelectorAll('.ag-row .ag-cell')].map(
  cell => [cell.parentNode.getAttribute('row-index'), cell.getAttribute('col-id'), cell.innerText]);
"""
# Of the columns in sight, their names and whether these are cut short.
HEADS = """
const right = document.querySelector('.ag-root').getBoundingClientRect().right;
const isCut = part => part.scrollWidth > part.clientWidth + 1 && getComputedStyle(part).overflow === 'hidden';
return [...document.querySelectorAll('.ag-header-cell')]
  .filter(each => each.getBoundingClientRect().right <= right + 1)
  .map(each => [each.innerText.trim(), [...each.querySelectorAll('*')].some(isCut)]);
"""


@pytest.mark.slow
def test_the_address_that_make_ui_prints_shows_the_runs_by_speedup_and_those_ticked_compared_by_throughput(site):
    site.open(site.address)
    # Those of the points, and that of their sweep, which has no numbers and so comes last.
    rows = site.wait(lambda: len(rows := table(site)) == 4 and all(row["speedup"] for row in rows) and rows)
    swept = rows.pop()
    assert swept["name"].startswith("sweep ")
    assert {swept[name] for name in ("speedup", "examples_per_second", *site.efficiency)} == {"-"}
    for row, result in zip(rows, site.finished, strict=True):
        run = f"{result['strategy']}-{result['workers']}-mlp-digits-{result['mlflow_run_id'][:5]}"
        assert row["name"] == run
        assert (row["strategy"], row["train/workers"]) == (result["strategy"], str(result["workers"]))
        assert row["speedup"] == f"{result['speedup']:.4g}"
        assert row["speedup_range"] == f"{result['speedup_low']:.2f} to {result['speedup_high']:.2f}"
        assert float(row["examples_per_second"]) == pytest.approx(result["examples_per_second"], rel=1e-3)
    assert "How to read these runs." in site.body
    # All that is compared is in sight on a page 1440 wide.
    seen = dict(site.browser.execute_script(HEADS))
    compared = {"strategy", "train/workers", "speedup", "speedup_range", "examples_per_second", *site.efficiency}
    assert compared <= set(seen)
    assert not [name for name in compared if seen[name]], "cut short"
    # Three runs that are ticked are compared, by throughput and speedup first.
    for index in range(3):
        box = f".ag-pinned-left-cols-container [row-index='{index}'] .ag-selection-checkbox input"
        site.wait(lambda box=box: site.all(box) and (site.all(box)[0].click() or True))
    button = "//button[normalize-space()='Compare']"
    site.wait(lambda: site.browser.find_element("xpath", button).click() or True)
    site.wait(lambda: "Comparing 3 Runs from 1 Experiment" in site.body)
    # What it draws, and then its first metrics by name, in digits that mean something.
    drawn = site.wait(lambda: (text := site.body).count("Metrics:") and text.partition("Metrics:")[2].split())
    assert drawn[0] == "examples_per_second"
    names = {*site.efficiency, "examples_per_second", "one_device/examples_per_second"}
    words = site.wait(lambda: names <= set(words := site.body.rpartition("Metrics")[2].split()) and words)
    assert all(words.index(name) < words.index("examples_per_second") for name in site.efficiency)
    # Four digits are kept, and the page rounds them once more.
    drawn = [float(word) for word in words if re.fullmatch(r"\d+\.\d+", word)]
    for efficiency in filter(None, (result["efficiency"] for result in site.finished)):
        assert any(abs(number - efficiency) < 0.00101 for number in drawn), (efficiency, words)


@pytest.mark.slow
def test_the_charts_beside_the_table_draw_throughput_and_speedup_first_and_each_point_once(site):
    site.open(f"{site.address}&compareRunsMode=CHART")
    charts = f"Comparison\n({5 + len(site.efficiency)})"
    words = site.wait(lambda: charts in (text := site.body) and text.count("mirrored-2") > 1 and text)
    section = words.partition(charts)[2]
    places = [section.index(name) for name in ("examples_per_second", "speedup", *site.efficiency)]
    assert places == sorted(places)
    # The run of their sweep has no bar, and an efficiency over a disturbed baseline is none.
    drawn = "return [...document.querySelectorAll('.barlayer')].map(each => each.querySelectorAll('.point').length)"
    assert site.wait(lambda: (bars := site.browser.execute_script(drawn)) and bars[:2] == [3, 3] and max(bars) == 3)


@pytest.mark.slow
def test_the_page_of_a_run_says_what_came_of_it_and_how_to_run_it_again_and_that_of_a_sweep_has_its_report(site):
    (result, *_), runs = site.finished, site.address.partition("?")[0]
    site.open(f"{runs}/{result['mlflow_run_id']}")
    words = site.wait(lambda: "Created by" in (text := site.body) and "Metrics (" in text and text)
    assert f"{result['speedup']:.2f} times one device" in words
    assert "python -m pipeline data=digits model=mlp train.steps=4" in words
    about = words.partition("About this run")[2].splitlines()
    assert about[about.index("Created by") + 1] == getpass.getuser()
    assert about[about.index("Source") + 1] == "python -m pipeline"
    # Each once, in digits that mean something.
    metrics = site.metrics[result["mlflow_run_id"]]
    assert sorted(name for name in metrics if "loss" in name) == ["train/epoch_loss", "train/loss", "val/loss"]
    assert all(value == float(f"{value:.6g}") or value.is_integer() for value in metrics.values())
    # A report among a run's artifacts is shown as a page.
    site.open(f"{runs}/{site.report}/artifacts/report.html")
    frame = site.wait(lambda: site.all("iframe"))[0]
    site.browser.switch_to.frame(frame)
    site.wait(lambda: site.all("h1") and site.all("figure") and site.all("h1")[0].text)
    (sweep,) = (site.ran.folder / "outputs/sweeps").iterdir()
    assert site.all("h1")[0].text == sweep.name
    site.browser.switch_to.default_content()


def table(site: Site) -> list[dict[str, str]]:
    """What the runs table shows, row by row; its left columns stand still, and are a table of their own."""
    rows: dict[int, dict[str, str]] = {}
    for index, column, words in site.browser.execute_script(CELLS):
        name = column.partition("`")[2].rstrip("`") or column
        # Before a run's name is the colour that it is drawn in.
        rows.setdefault(int(index), {})["name" if name == "Run Name" else name] = words.strip().rpartition("\n")[2]
    return [rows[index] for index in sorted(rows)]
