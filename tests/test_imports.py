"""What the conductor must never import, who may import whom, and that every choice is explained."""

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

import pytest
from conftest import ROOT, environment
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.config import offered

SLOW = ("tensorflow", "keras", "mlflow", "sklearn", "pandas", "matplotlib")


def imported_by(folder: Path, *codes: str) -> list[set[str]]:
    """Names of what a fresh Python has imported after each piece of code."""
    says = "print('IMPORTED', *__import__('sys').modules)"
    program = "\n".join(f"{code}\n{says}" for code in codes)
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    names = [line.split()[1:] for line in shown.stdout.splitlines() if line.startswith("IMPORTED")]
    return [{*modules, *(module.split(".")[0] for module in modules)} for modules in names]


def command(*typed: str, code: int = 0) -> str:
    """The program of a command that ends with a code."""
    return f"import sys\nfrom pipeline.commands.verbs import main\nsys.argv[1:] = {typed}\nassert main() == {code}"


@pytest.mark.parametrize(("commands", "slow"), [
    ([
        (["mode=plan", "train.callbacks=[{_target_: keras.callbacks.EarlyStopping}]"], 0),
        (["mode=plan", "model=mlp", "strategy=multi_worker", "hardware=2x4gpu"], 0),
        (["mode=predict", "model=mlp"], 2),
        (["--cfg", "job"], 0),
        (["workers=0"], 2),
    ], ()),
    ([(["prepare", "data=digits", "seed=-1", "out=d"], 2)], ("dask", "distributed")),
    ([(["report", "sweep=nothing"], 2), (["report", "--help"], 0), (["report", "swep=mine"], 2)], ("jinja2", "scipy")),
], ids=["train", "prepare", "report"])  # fmt: skip
def test_a_command_that_trains_nothing_never_imports_what_is_slow(tmp_path, commands, slow):
    codes = [command(*typed, code=code) for typed, code in commands]
    # In one process, where each has what those before it have imported.
    for (typed, _), found in zip(commands, imported_by(tmp_path, *codes), strict=True):
        assert not found & {*SLOW, *slow}, typed
        assert "hydra" in found or typed[0] == "report"


def test_a_refusal_imports_nothing_of_what_would_come_after_it(tmp_path):
    early = "driver launch plan.planning views.terminal.live".split()
    late = "driver.supervisor plan.estimate views.terminal.live views.report worker.model_error".split()
    typed = {"strategy=nope": early, "workers=two": early, "workers=0": late}
    for later, found in zip(
        typed.values(), imported_by(tmp_path, *(command(one, code=2) for one in typed)), strict=True
    ):
        assert not found & {f"pipeline.{name}" for name in later}


CLUSTERS = {
    "local": [], "hosts": ["cluster.hosts=[a,b]"], "slurm": [], "mpi": [], "env": [],
    # The last: manifests are made from a template.
    "kubernetes": ["cluster.options.image=a/b:1"],
}  # fmt: skip


def test_a_plan_for_a_cluster_imports_nothing_but_what_composes_and_shows_it(tmp_path, monkeypatch):
    task = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    codes = [
        command("mode=plan", f"cluster={name}", "strategy=multi_worker", *typed) for name, typed in CLUSTERS.items()
    ]
    slow = {*SLOW, "numpy", "scipy", "dask", "distributed", "kubernetes", "psutil", "grpc"}
    for cluster, found in zip(CLUSTERS, imported_by(tmp_path, *codes), strict=True):
        assert found >= {"hydra", "rich"}
        assert not found & (slow | (set() if cluster == "kubernetes" else {"jinja2"})), cluster


def test_a_view_imports_what_is_slow_once_it_is_used(tmp_path):
    for found in imported_by(tmp_path, *(f"import pipeline.views.{view}" for view in ("mlflow", "terminal"))):
        assert not found & {*SLOW, "hydra", "numpy", "rich"}


def test_arithmetic_imports_the_standard_library_and_msgspec_alone(tmp_path):
    modules = ("plan.plan", "config.schema", "driver.watch", "record.events", "launch.this_machine", "config.targets",
               "plan.size", "plan.estimate")  # fmt: skip
    before, *found = imported_by(tmp_path, "", *(f"import pipeline.{module}" for module in modules))
    for module, names in zip(modules, found, strict=True):
        roots = {name.split(".")[0] for name in names - before}
        assert roots - sys.stdlib_module_names - {"msgspec", "typing_extensions"} == {"pipeline"}, module


def test_every_choice_opens_with_when_to_pick_it():
    for path in sorted(offered.folder().rglob("*.yaml")):
        assert re.match(r"(# @package _global_\n)?# [A-Z0-9].*[.?]", path.read_text()), path


@pytest.mark.parametrize(("group", "names"), [
    ("data", "cifar10 clicks csv digits fashion_mnist images mnist mnist5k numpy synthetic text tfds tfrecord"),
    ("model", "cnn mlp recommender resnet20 transformer"),
])  # fmt: skip
def test_a_file_of_a_choice_names_a_function_and_all_its_arguments_each_with_a_comment(group, names):
    paths = sorted((offered.folder() / group).glob("*.yaml"))
    assert [path.stem for path in paths] == names.split()
    facts = ["num_classes", "input_shape", "train_examples", "validation_examples", "shuffle"] * (group == "data")
    for path in paths:
        node = OmegaConf.load(path)
        if OmegaConf.is_missing(node, "name"):
            node["name"] = path.stem
        config = OmegaConf.to_container(node, resolve=group == "data")
        assert [key for key in config if key != "path"] == ["name", *facts, "build"]
        assert config["name"] == path.stem
        module, _, name = config["build"].pop("_target_").rpartition(".")
        parameters = inspect.signature(getattr(import_module(module), name)).parameters
        # The program fills these in.
        given = {"shard", "shards"} if group == "data" else {"input_shape", "num_classes"}
        assert set(config["build"]) == set(parameters) - given
        # Without a default of its own where the data decide.
        defaults = {
            name: list(one.default) if isinstance(one.default, tuple) else one.default
            for name, one in parameters.items()
            if name not in given and one.default is not one.empty
        }
        assert group == "data" or config["build"].items() >= defaults.items()
        lines = path.read_text().split("_target_")[1].splitlines()[1:]
        assert all(" # " in line for line in lines)


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
