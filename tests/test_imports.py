"""What the conductor must never import, who may import whom, and that every key a person can set is explained."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.config import config, refusals

SLOW = ("tensorflow", "keras", "mlflow", "sklearn", "pandas", "matplotlib")


def imported_by(code: str, folder: Path) -> set[str]:
    """Top-level names of what a fresh Python has imported after `code`."""
    ends = f"{code}\nimport sys; print('IMPORTED', *{{name.split('.')[0] for name in sys.modules}})"
    shown = subprocess.run(
        [sys.executable, "-c", ends],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    return set(shown.stdout.rpartition("IMPORTED")[2].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["mode=plan"],
        ["mode=plan", "model=mlp", "strategy=multi_worker", "hardware=2x4gpu"],
        ["mode=predict", "model=mlp"],
        ["--cfg", "job"],
        ["workers=0"],
    ],
    ids=" ".join,
)
def test_a_command_that_trains_nothing_never_imports_what_is_slow(tmp_path, arguments):
    code = f"from pipeline.commands import train as command\ntry: command.main({arguments!r})\nexcept SystemExit: pass"
    found = imported_by(code, tmp_path)
    assert "hydra" in found
    assert not found & set(SLOW)


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


def test_a_refused_preparing_imports_neither_tensorflow_nor_dask(tmp_path):
    code = "from pipeline.commands import prepare\nassert prepare.main(['data=digits', 'seed=-1', 'out=d']) == 2"
    found = imported_by(code, tmp_path)
    assert "hydra" in found
    assert not found & {*SLOW, "dask", "distributed"}


@pytest.mark.parametrize("arguments", ["['sweep=nothing']", "['--help']", "['swep=mine']"])
def test_a_report_that_is_refused_imports_nothing_slow(tmp_path, arguments):
    code = f"from pipeline.commands.report import main\nassert main({arguments}) in (0, 2)"
    assert not imported_by(code, tmp_path) & {*SLOW, "jinja2", "scipy"}


def test_importing_the_command_imports_nothing_slow(tmp_path):
    assert not imported_by("import pipeline.commands.train", tmp_path) & set(SLOW)


@pytest.mark.parametrize(
    "module",
    [
        "plan.plan",
        "config.schema",
        "run.watch",
        "record.events",
        "launch.this_machine",
        "config.targets",
        "plan.size",
        "plan.estimate",
    ],
)
def test_arithmetic_imports_the_standard_library_and_msgspec_alone(tmp_path, module):
    others = imported_by(f"import pipeline.{module}", tmp_path) - imported_by("", tmp_path) - sys.stdlib_module_names
    assert others - {"msgspec", "typing_extensions"} == {"pipeline"}


def test_imports_run_downwards():
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout
    assert " 0 broken" in shown.stdout


@pytest.mark.parametrize("key", [key for key in refusals.keys() if key.rpartition(".")[2] not in ("name", "build")])  # noqa: SIM118
def test_every_key_is_explained_where_it_stands(key):
    group, _, name = key.rpartition(".")
    choices = sorted((config.folder() / group).glob("*.yaml")) if group else []
    whole = (config.folder() / "config.yaml").read_text()
    texts = [path.read_text() for path in choices] or [section(whole, group)]
    if group in ("data", "strategy"):
        # What is the same for every choice stands there as a comment, since each may set it otherwise.
        texts.append(whole.partition(f"\n# {group}:\n")[2].partition("\n\n")[0].replace("#   ", ""))
    assert any(re.search(rf"^{name}:[^#\n]*# \S", text, re.MULTILINE) for text in texts), f"no comment on {key}"


def section(text: str, group: str) -> str:
    """The lines under a group of config.yaml, not indented; all of it where `group` is empty."""
    if not group:
        return text
    found = re.search(rf"^{group}:.*\n((?: .*\n|#.*\n)+)", text, re.MULTILINE)
    assert found, f"no {group}: in conf/config.yaml"
    return "".join(line.removeprefix("  ") for line in found.group(1).splitlines(keepends=True))


def test_every_choice_opens_with_when_to_pick_it():
    for path in sorted(config.folder().rglob("*.yaml")):
        assert re.match(r"(# @package _global_\n)?# [A-Z0-9].*[.?]", path.read_text()), path


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [text for texts in project["optional-dependencies"].values() for text in texts]
    built = (ROOT / "horovod.txt").read_text().splitlines()
    texts = [*project["dependencies"], *optional, *(line for line in built if line[0] not in "#-")]
    declared = {canonicalize_name(Requirement(text.partition(" --hash")[0]).name) for text in texts}
    found, distributions = {}, metadata.packages_distributions()
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.partition(".")[0]: path for name in names}
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
