"""What the conductor must never import, who may import whom, and that every choice is explained."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.config import offered

SLOW = ("tensorflow", "keras", "mlflow", "sklearn", "pandas", "matplotlib")


def imported_by(code: str, folder: Path) -> set[str]:
    """Top-level names of what a fresh Python has imported after `code`."""
    ends = f"{code}\nimport sys; print('IMPORTED', *{{name.split('.')[0] for name in sys.modules}})"
    given = os.environ | {"PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", ends], cwd=folder, env=given, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return set(shown.stdout.rpartition("IMPORTED")[2].split())


@pytest.mark.parametrize(("typed", "code", "slow"), [
    (["mode=plan"], 0, ()),
    (["mode=plan", "model=mlp", "strategy=multi_worker", "hardware=2x4gpu"], 0, ()),
    (["mode=predict", "model=mlp"], 2, ()),
    (["--cfg", "job"], 0, ()),
    (["workers=0"], 2, ()),
    (["prepare", "data=digits", "seed=-1", "out=d"], 2, ("dask", "distributed")),
    (["report", "sweep=nothing"], 2, ("jinja2", "scipy")),
    (["report", "--help"], 0, ("jinja2", "scipy")),
    (["report", "swep=mine"], 2, ("jinja2", "scipy")),
])  # fmt: skip
def test_a_command_that_trains_nothing_never_imports_what_is_slow(tmp_path, typed, code, slow):
    runs = f"import sys\nfrom pipeline.commands.verbs import main\nsys.argv[1:] = {typed!r}\nassert main() == {code}"
    found = imported_by(runs, tmp_path)
    assert "hydra" in found or typed[0] == "report"
    assert not found & {*SLOW, *slow}


@pytest.mark.parametrize("cluster", ["local", "hosts", "slurm", "mpi", "env", "kubernetes"])
def test_a_plan_for_a_cluster_imports_nothing_but_what_composes_and_shows_it(tmp_path, cluster):
    task = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    typed = {"hosts": ["cluster.hosts=[a,b]"], "kubernetes": ["cluster.options.image=a/b:1"]}.get(cluster, [])
    code = (
        f"import os; os.environ['TF_CONFIG'] = {json.dumps(json.dumps(task))}\n"
        "from pipeline.commands import train as command\n"
        f"assert command.main(['mode=plan', 'cluster={cluster}', 'strategy=multi_worker', *{typed!r}]) == 0"
    )
    found = imported_by(code, tmp_path)
    assert found - {"pipeline", *sys.stdlib_module_names} >= {"hydra", "rich"}
    slow = {*SLOW, "numpy", "scipy", "dask", "distributed", "kubernetes", "psutil", "grpc"}
    # Manifests are made from a template.
    assert not found & (slow | (set() if cluster == "kubernetes" else {"jinja2"}))


@pytest.mark.parametrize("view", ["mlflow", "terminal"])
def test_a_view_imports_what_is_slow_once_it_is_used(tmp_path, view):
    found = imported_by(f"import pipeline.views.{view}", tmp_path)
    assert not found & {*SLOW, "hydra", "numpy", "rich"}


@pytest.mark.parametrize(
    "module",
    ["plan.plan", "config.schema", "driver.watch", "record.events", "launch.this_machine", "config.targets",
     "plan.size", "plan.estimate"],
)  # fmt: skip
def test_arithmetic_imports_the_standard_library_and_msgspec_alone(tmp_path, module):
    others = imported_by(f"import pipeline.{module}", tmp_path) - imported_by("", tmp_path) - sys.stdlib_module_names
    assert others - {"msgspec", "typing_extensions"} == {"pipeline"}


def test_imports_run_downwards():
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout
    assert " 0 broken" in shown.stdout


def test_every_choice_opens_with_when_to_pick_it():
    for path in sorted(offered.folder().rglob("*.yaml")):
        assert re.match(r"(# @package _global_\n)?# [A-Z0-9].*[.?]", path.read_text()), path


def imported() -> Iterator[tuple[Path, str]]:
    """Yields each import of ours: (the file, the module that it names)."""
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield path, node.module or ""


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [text for texts in project["optional-dependencies"].values() for text in texts]
    built = (ROOT / "horovod.txt").read_text().splitlines()
    texts = [*project["dependencies"], *optional, *(line for line in built if line[0] not in "#-")]
    declared = {canonicalize_name(Requirement(text.partition(" --hash")[0]).name) for text in texts}
    distributions = metadata.packages_distributions()
    found = {module.partition(".")[0]: path for path, module in imported()}
    # Its stubs are the type checker's own.
    theirs = found.keys() - {"pipeline", "_typeshed", *sys.stdlib_module_names}
    given = {name: {canonicalize_name(one) for one in distributions.get(name, [name])} for name in theirs}
    assert len(theirs) > 20
    assert {name: str(found[name]) for name in theirs if not given[name] & declared} == {}


def test_a_command_looks_for_no_garbage_among_what_it_has_imported():
    code = (
        "import atexit, gc, runpy, sys\nlooks = []\ngc.callbacks.append(lambda phase, info: looks.append(phase))\n"
        "atexit.register(lambda: print('LOOKS', len(looks), gc.get_freeze_count()))\n"
        "sys.argv = ['pipeline', 'strategy=mirored']\nrunpy.run_module('pipeline', run_name='__main__')"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    looks, frozen = map(int, shown.stdout.rpartition("LOOKS")[2].split())
    assert shown.returncode == 2
    assert (looks < 100, frozen > 50_000) == (True, True), (looks, frozen)
