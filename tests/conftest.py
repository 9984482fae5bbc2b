"""What tests share: the command as a person types it, run for real in a folder of its own."""

import atexit
import dataclasses
import functools
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import bare
import psutil
import pytest
from run_events import logged, runs
from warm_start import Command, Warm

from pipeline.record.results import MOST_EFFICIENCY

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
SUPPORT = Path(__file__).resolve().parent / "support"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,900",
)  # fmt: skip
# Enough to run and no more: nothing measured, no baseline, no MLflow, and no look at whether replicas are one device.
QUICK = ("tracking=none", "measure.steps=0", "measure.baseline=none", "train.check=off")


def pytest_configure(config: pytest.Config) -> None:
    """Draws the cases of a commit alike in all processes that run tests; TEST_SEED draws others, "all" all of them."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    os.environ.setdefault("TEST_SEED", commit.stdout.strip() or "0")
    # Nothing that tests import is garbage: to look for some takes a sixth of the time.
    gc.disable()


def pytest_report_header(config: pytest.Config) -> str:
    """Shows the seed."""
    return f"TEST_SEED={os.environ['TEST_SEED']}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has those that wait begun first, all by one process: the others' tests, which compute, run beside them."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


def pytest_collection_finish() -> None:
    """Looks for no garbage among what was imported, which takes half the time of tests that build models."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Puts it back: what is imported after the tests may ask who refers to it."""
    gc.unfreeze()


def sampled(cases: Sequence[T], count: int) -> list[T]:
    """Returns so many of the cases, in their order, drawn by TEST_SEED; all where that is "all" and several are asked
    for.
    """
    if os.environ["TEST_SEED"] == "all" and count > 1:
        return list(cases)
    # Another choice for other cases, so that not all first ones come together.
    chosen = random.Random(f"{os.environ['TEST_SEED']} {cases}").sample(range(len(cases)), count)
    return [cases[place] for place in sorted(chosen)]


def efficiency_of(result: dict[str, Any]) -> Any:
    """The efficiency that a result is to have: none where a busy machine slowed its baseline."""
    share = result["speedup"] / result["replicas"]
    return None if share > MOST_EFFICIENCY else pytest.approx(share)


@dataclass(frozen=True)
class Ran:
    """A command that has ended: its exit code, what it printed, how long it took, and the folders of its runs."""

    code: int
    out: str
    err: str
    seconds: float
    folder: Path

    def ok(self) -> "Ran":
        """The same, which is to have ended well."""
        assert self.code == 0, self.out + self.err
        return self

    def failed(self, code: int = 1) -> "Ran":
        """The same, which is to have ended with a code, and with words instead of a traceback."""
        assert self.code == code, self.out + self.err
        assert "Traceback" not in self.err
        return self

    @property
    def results(self) -> list[dict[str, Any]]:
        """Every result.json, by folder."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("outputs/[rs]*/**/result.json"))]

    @property
    def result(self) -> dict[str, Any]:
        """The only result.json."""
        (only,) = self.results
        return only

    @property
    def run_folders(self) -> list[Path]:
        """The folder of each run that has an event log."""
        return runs(self.folder)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All events of a kind in the only run's log."""
        (folder,) = self.run_folders
        return logged(folder, kind)


def with_(plan: Any, part: str, **values: Any) -> Any:
    """A plan with other values in one of its parts."""
    return dataclasses.replace(plan, **{part: dataclasses.replace(getattr(plan, part), **values)})


def environment(**environ: str) -> dict[str, str]:
    """That of a command."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}", "COLUMNS": "120"} | environ


def start(
    folder: Path, *arguments: str, cold: bool = False, python: Path | None = None, module: str = "pipeline",
    **environ: str,
) -> subprocess.Popen[str]:  # fmt: skip
    """Starts `python -m pipeline` in `folder`, from where the tests' own models and data can be imported.

    It and its fork server have imported before what they import (`warm_start`), unless `cold`, or of another `python`.
    """
    command, given = [str(python or sys.executable), "-m", module, *arguments], environment(**environ)
    if cold or python or sys.platform != "linux":
        pipes = subprocess.PIPE
        return subprocess.Popen(command, cwd=folder, env=given, stdout=pipes, stderr=pipes, text=True)
    return Command(warm(), command, folder, given)


@functools.cache
def warm() -> Warm:
    """What starts the commands of this process's tests."""
    made = Warm()
    atexit.register(made.close)
    return made


def finish(process: subprocess.Popen[str], folder: Path, began: float, timeout: float) -> Ran:
    """Waits for a started command to end."""
    out, err = process.communicate(timeout=timeout)
    return Ran(process.returncode, out, err, time.monotonic() - began, folder)


def launched(folder: Path, *command: str, timeout: float = 300.0) -> Ran:
    """How a command line that something else launches, such as `mpirun`, ended in a folder."""
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    ran = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout)
    return Ran(ran.returncode, ran.stdout, ran.stderr, time.monotonic() - began, folder)


@pytest.fixture(scope="session")
def without_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has what backend=jax needs, and no TensorFlow."""
    needed = bare.needed(bare.PACKAGE, {"tensorflow"}, ["jax"])
    python = bare.environment(tmp_path_factory.mktemp("bare") / "environment", needed)
    asked = "from importlib.util import find_spec; print(find_spec('tensorflow'), find_spec('jax') is not None)"
    said = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout
    assert said == "None True\n"
    return python


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Callable[..., Ran]]:
    """Runs the command in a fresh folder; afterwards no process of it may be left."""

    def run(*arguments: str, timeout: float = 240.0, python: Path | None = None, **environ: str) -> Ran:
        began = time.monotonic()
        return finish(start(tmp_path, *arguments, python=python, **environ), tmp_path, began, timeout)

    yield run
    assert not left_behind(tmp_path)


@pytest.fixture
def asked(pipeline: Callable[..., Ran]) -> Callable[..., Ran]:
    """As `pipeline`, for what trains nothing."""
    return functools.partial(pipeline, timeout=60.0)


def left_behind(folder: Path, patience: float = 5.0) -> list[str]:
    """The command lines of processes that still work in `folder`, after a moment to let them go."""
    deadline = time.monotonic() + patience
    while found := [line for process in working_in(folder) if (line := command_line(process))]:
        if time.monotonic() > deadline:
            return found
        time.sleep(0.1)
    return []


def working_in(folder: Path) -> list[psutil.Process]:
    """The processes that still work in `folder`."""
    return [process for process in psutil.process_iter() if _works_in(process, folder)]


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """The addresses at which processes listen."""
    found = set[str]()
    for process in processes:
        with suppress(psutil.Error):
            heard = process.net_connections("tcp")
            found |= {at.laddr.ip.removeprefix("::ffff:") for at in heard if at.status == psutil.CONN_LISTEN}
    return found


def command_line(process: psutil.Process) -> str:
    """What a process was started with; of one that has gone meanwhile, nothing."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.pid != os.getpid() and Path(process.cwd()) == folder and process.status() != "zombie"
    except psutil.Error:
        return False


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures, which take a second and have no part in the words."""
    monkeypatch.setattr("pipeline.views.report.draw", lambda sweep: ())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window, which logs what it asks of whom."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driven = webdriver.Chrome(options=options, service=Service(driver))
        try:
            yield driven
        finally:
            driven.quit()


@pytest.fixture(scope="module")
def mirrored() -> Any:
    """Two replicas of a process whose tests import `two_devices`."""
    from two_devices import DEVICES

    from pipeline import strategies

    return strategies.mirrored(DEVICES)


def once_in_mlflow(folder: Path, result: dict[str, Any], steps: int, epochs: int) -> None:
    """Expects one run there, which has finished, and has each point once."""
    # The first command's follower may be at it still.
    assert not left_behind(folder, patience=120)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert (found.info.status, found.info.run_id) == ("FINISHED", result["mlflow_run_id"])
    assert found.data.tags["status"] == "FINISHED"
    points = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted(point.step for point in points) == list(range(1, steps + 1))
    assert len(client.get_metric_history(found.info.run_id, "val/loss")) == epochs
