"""What tests share: the command as a person types it, run for real in a folder of its own."""

import atexit
import dataclasses
import functools
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, TypeVar

import bare
import psutil
import pytest
from warm_start import Command, Warm

from pipeline.record.results import MOST_EFFICIENCY

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
SUPPORT = Path(__file__).resolve().parent / "support"
CONF = SUPPORT / "conf"
# Runs that version 0.1.0 wrote.
OLD = SUPPORT.parent / "from_0_1_0"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,900",
)  # fmt: skip
# Enough to run and no more: nothing measured, no baseline, no MLflow, and no look at whether replicas are one device.
QUICK = ("tracking=none", "measure.steps=0", "measure.baseline=none", "train.check=off")
LONG = ("train.epochs=500", f"--config-dir={CONF}", "model=tiny", "data=digits", "train.check=off")


def pytest_configure(config: pytest.Config) -> None:
    """Draws the cases of a commit alike in all processes that run tests; TEST_SEED draws others, "all" all of them."""
    # Trio's plugin, which nobody here uses, asks who refers to what is frozen below, and takes a second.
    os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    os.environ.setdefault("TEST_SEED", commit.stdout.strip() or "0")
    # Nothing that tests import is garbage: to look for some takes a sixth of the time.
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves half of the tests that wait, and of those that are timed, to other commits; both kinds are slow.

    Those that wait are begun first, all by one process: the others' tests, which compute, run beside them.
    """
    for marker in ("waits", "timed"):
        marked = {item: item.name.partition("[")[0] for item in items if item.get_closest_marker(marker)}
        for item in marked:
            item.add_marker("slow")
        names = sorted({*marked.values()})
        kept = sampled(names, (len(names) + 1) // 2)
        left = [item for item, name in marked.items() if name not in kept]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


def pytest_collection_finish() -> None:
    """Looks for no garbage among what was imported, which takes half the time of tests that build models."""
    gc.freeze()
    gc.enable()


def sampled(cases: Sequence[T], count: int) -> list[T]:
    """Returns so many of the cases, in their order, drawn by TEST_SEED; all where that is "all"."""
    if os.environ["TEST_SEED"] == "all":
        return list(cases)
    # Another choice for other cases, so that not all first ones come together.
    chosen = random.Random(f"{os.environ['TEST_SEED']} {cases}").sample(range(len(cases)), count)
    return [cases[place] for place in sorted(chosen)]


def one_of(cases: Sequence[T]) -> T:
    """Returns one of the cases, drawn by TEST_SEED; the first where that is "all"."""
    return sampled(cases, 1)[0]


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
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and Path(process.cwd()) == folder and process.status() != "zombie":
                found.append(process)
    return found


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


def runs(folder: Path) -> list[Path]:
    """The folders of the runs of the commands in a folder that have a log, as a sweep's report has."""
    # Unlike `Path.glob`, it passes over folders that go meanwhile, as that of a command that resumes another's run.
    logs = sorted(map(Path, glob(f"{folder}/outputs/[rs]*/**/events.jsonl", recursive=True)))
    return [log.parent for log in logs if log.parent.name != "report"]


def logged(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if line.endswith("}")]
    return [event for event in events if kind in (None, event["event"])]


def losses(run: Path) -> dict[int, float]:
    """The loss of each step, in order, from whichever command made it last."""
    found = {
        event["step"] - len(event["losses"]) + place + 1: loss
        for event in logged(run, "steps")
        if event["group"] == "point"
        for place, loss in enumerate(event["losses"])
    }
    return dict(sorted(found.items()))


def weights(run: Path) -> list[str]:
    return sorted({digest for event in logged(run, "finished") for digest in event["weights"]})


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Those of the only run of the commands in a folder; none before it has a log."""
    found = runs(folder)
    return logged(found[0], kind) if found else []


def final_losses(result: dict[str, Any]) -> tuple[Any, ...]:
    return result["loss"], result["val_loss"], result["metrics"], result["val_metrics"]


def until(reached: Callable[[], Any], seconds: float = 240.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (there := reached()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return there


class UnderWay:
    """A command, in whose place another may be typed; killed where a `with` block ends before it."""

    def __init__(self, folder: Path, *arguments: str, cold: bool = False, python: Path | None = None, **environ: str):
        self.folder = folder
        self._start = functools.partial(start, folder, cold=cold, python=python, **environ)
        folder.mkdir(exist_ok=True)
        self.process: subprocess.Popen[str] | None = None
        if arguments:
            self.type(*arguments)

    def __enter__(self) -> "UnderWay":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def type(self, *arguments: str, **environ: str) -> None:
        self.process = self._start(*arguments, **environ)

    @property
    def runs(self) -> list[Path]:
        return runs(self.folder)

    def told(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The events of a kind, or all, as far as they are written, a run's after the others'."""
        return [event for run in self.runs for event in logged(run, kind)]

    def step(self, kind: str = "steps") -> int:
        """How far the last run is."""
        told = logged(self.runs[-1], kind) if self.runs else []
        return max((event.get("step") or 0 for event in told), default=0)

    def restarted(self) -> list[str]:
        return [event["text"] for event in self.told("restarted")]

    def until(self, reached: Callable[[], object], seconds: float = 240.0) -> None:
        def reached_or_over() -> object:
            assert self.process is not None
            assert self.process.poll() is None, "\n".join(self.process.communicate())
            return reached()

        until(reached_or_over, seconds)

    def until_told(self, kind: str, count: int = 1) -> None:
        self.until(lambda: len(self.told(kind)) >= count, 90)

    def more(self, steps: int, kind: str = "steps") -> None:
        before = self.step(kind)
        self.until(lambda: self.step(kind) >= before + steps)

    def harm(self, number: int, rank: int | None = None) -> None:
        """Sends a signal to the process of a rank that was started last, or to the command."""
        assert self.process is not None
        pids = [event["pid"] for event in self.told("started") if event["rank"] == rank]
        os.kill(self.process.pid if rank is None else pids[-1], number)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.communicate()

    def ended(self, timeout: float = 400.0) -> Ran:
        """How it ends, and the seconds from now until then."""
        assert self.process is not None
        return finish(self.process, self.folder, time.monotonic(), timeout)


def begun(
    script: str, *arguments: object, python: Path | str = sys.executable, before: Sequence[str] = (),
    imported: bool | None = None, **environ: str,
) -> subprocess.Popen[str]:  # fmt: skip
    """Starts a script of `support`; `before` is what starts its Python, if anything else does.

    With TensorFlow `imported` before (`warm_start`), which takes longer than most scripts, where it does at its top.
    """
    if imported is None:
        imported = "\nimport tensorflow" in (SUPPORT / f"{script}.py").read_text() and not before
    command = [*before, str(python), str(SUPPORT / f"{script}.py"), *map(str, arguments)]
    paths = os.pathsep.join(filter(None, (str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH"))))
    given = os.environ | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"} | environ
    if imported and sys.platform == "linux":
        return Command(warm(), command, ROOT, given)
    return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(*running: subprocess.Popen[str], timeout: float = 500) -> list[str]:
    """Returns what each script printed, once all have ended well."""
    try:
        said = [process.communicate(timeout=timeout) for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), said
    return [out for out, _ in said]


def answers(*running: subprocess.Popen[str], timeout: float = 500) -> list[Any]:
    """Returns what each script came to: the JSON in its last line."""
    return [json.loads(out.splitlines()[-1]) for out in printed(*running, timeout=timeout)]


def came(script: str, *arguments: object, timeout: float = 500, **named: Any) -> Any:
    return answers(begun(script, *arguments, **named), timeout=timeout)[0]
