"""What commands never import, who may import whom, what private names are there, and that files hold no code that runs.

Names of losses, metrics and optimizers, which are refused before Keras is imported, are those of the Keras there is.
What tests start in less time is what a person starts: the same words, weights and processes.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module, metadata
from pathlib import Path

import keras
import psutil
import pytest
import tensorflow as tf
from conftest import QUICK, ROOT, UnderWay, environment, finish, left_behind, start, until
from keras.src import losses, metrics, optimizers
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline import private, private_jax, private_keras
from pipeline.config import offered
from pipeline.plan.checks import LOSSES, METRICS, OPTIMIZERS
from pipeline.worker.tensorflow.loss_scaling.reduction import _INSTEAD

SLOW = {"tensorflow", "keras", "mlflow", "sklearn", "pandas", "matplotlib"}


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


EARLY = {f"pipeline.{name}" for name in ("driver", "launch", "plan.planning", "views.terminal.live")}
LATE = {f"pipeline.{name}" for name in ("driver.supervisor", "plan.estimate", "views.report", "worker.model_error")}
PLAN = "mode=plan strategy=multi_worker cluster="
# What a plan has no part in.
COSTLY = {*SLOW, "numpy", "scipy", "dask", "distributed", "kubernetes", "psutil", "grpc"}


@pytest.mark.parametrize("commands", [
    [
        ("mode=plan train.callbacks=[{_target_:keras.callbacks.EarlyStopping}]", 0, SLOW),
        ("mode=plan model=mlp strategy=multi_worker hardware=2x4gpu", 0, SLOW),
        ("mode=predict model=mlp", 2, SLOW),
        ("--cfg job", 0, SLOW),
        ("workers=0", 2, SLOW),
    ],
    [("prepare data=digits seed=-1 out=d", 2, SLOW | {"dask", "distributed"})],
    [(typed, 0 if typed == "report --help" else 2, SLOW | {"jinja2", "scipy"})
     for typed in ("report sweep=nothing", "report --help", "report swep=mine")],
    [("strategy=nope", 2, EARLY), ("workers=two", 2, EARLY), ("workers=0", 2, LATE | {"pipeline.views.terminal.live"})],
    # The last: manifests are made from a template.
    [(PLAN + cluster, 0, COSTLY | {"jinja2"})
     for cluster in ("local", "hosts cluster.hosts=[a,b]", "slurm", "mpi", "env")]
    + [(f"{PLAN}kubernetes cluster.options.image=a/b:1", 0, COSTLY)],
], ids=["train", "prepare", "report", "refusals", "clusters"])  # fmt: skip
def test_a_command_that_trains_nothing_never_imports_what_is_slow_or_would_come_later(tmp_path, monkeypatch, commands):
    task = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    codes = [command(*typed.split(), code=code) for typed, code, _ in commands]
    # In one process, where each has what those before it have imported.
    for (typed, _, costly), found in zip(commands, imported_by(tmp_path, *codes), strict=True):
        assert not found & costly, typed
        assert "hydra" in found or typed.startswith("report")


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
        assert all(" # " in line for line in path.read_text().split("_target_")[1].splitlines()[1:])


# The nodes of each file of ours.
NODES = {path: [*ast.walk(ast.parse(path.read_text()))] for path in sorted((ROOT / "pipeline").rglob("*.py"))}


def imported() -> Iterator[tuple[Path, str]]:
    """Yields each import of ours: (the file, the module that it names)."""
    for path, nodes in NODES.items():
        for node in nodes:
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


def test_threads_that_are_the_first_to_use_a_type_end_no_process(tmp_path):
    code = (
        "import sys, threading\nfrom pipeline.record import from_plain\nfrom pipeline.record.results import Result\n"
        "sys.setswitchinterval(1e-6)\nnow = threading.Barrier(8)\nuse = lambda: (now.wait(), from_plain(Result, {}))\n"
        "threads = [threading.Thread(target=use) for _ in range(8)]\n[thread.start() for thread in threads]"
    )
    imported_by(tmp_path, code)


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


# What is used of public classes, and of what is made of private ones, under names that are not promised either.
OF_CLASSES = {
    "collective.CollectiveAllReduceExtended": "_initialize_local_devices",
    "context.Context": "configure_coordination_service",
    "keras.Model": "_flatten_layers _symbolic_build _compute_loss _should_eval",
    "keras.callbacks.EarlyStopping": "_set_monitor_op",
    "keras.optimizers.Optimizer": """
        _apply_weight_decay _backend_apply_gradients _backend_increment_gradient_accumulators _backend_update_step
        _backend_reset_gradient_accumulators _clip_gradients _track_variable _update_model_variables_moving_average
    """,
    "parameter_server_strategy.ParameterServerStrategyExtended": "_create_var_creator _container_strategy",
    "parameter_server_strategy_v2.ParameterServerStrategyV2Extended": "_create_variable_round_robin",
    "LRUCache": "get put",
    "tf.Graph": "_get_function",
    "tf.Operation": "_set_attr",
    "tf.data.Dataset": "_as_serialized_graph _inputs",
    "tf.distribute.MirroredStrategy": "_collective_key_base",
    "tf.distribute.MultiWorkerMirroredStrategy": "_collective_key_base",
}
PRIVATE = re.compile(r"^(keras\.src|tensorflow\.python|tensorflow\.core)\b")


def used() -> set[str]:
    """Dotted names of what our files use of what `private*.py` take: `array_slicing.can_slice_array`."""
    names = {f"{owner}.{name}" for owner, of_owner in OF_CLASSES.items() for name in of_owner.split()}
    for nodes in NODES.values():
        called = {
            alias.asname or alias.name: alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pipeline.private")
            for alias in node.names
        }
        chains = [ast.unparse(node).partition(".") for node in nodes if isinstance(node, ast.Attribute)]
        names |= {
            f"{called[root]}.{rest}" for root, _, rest in chains if root in called and re.fullmatch(r"[\w.]+", rest)
        }
    return names


@pytest.mark.parametrize("name", sorted(used()))
def test_what_is_used_of_it_is_still_there(name):
    root, *rest = name.split(".")
    modules = (private, private_keras, private_jax)
    found = {"keras": keras, "tf": tf}.get(root) or next(getattr(one, root) for one in modules if hasattr(one, root))
    for part in rest:
        assert hasattr(found, part), f"{name} is gone from this version: see pipeline/private.py for its use"
        found = getattr(found, part)


def test_all_operations_that_draw_are_still_there():
    assert [name for module, of in _INSTEAD.items() for name in of if not hasattr(module, name)] == []


def test_no_other_file_reaches_into_tensorflow_or_keras():
    reaching = [f"{path.relative_to(ROOT)}: {module}" for path, module in imported() if PRIVATE.match(module)]
    kept = [found for found in reaching if not found.startswith(("pipeline/private.py", "pipeline/private_keras.py"))]
    # Keras's folder for downloads has no other name, and the data sets of a process without TensorFlow ask for it.
    assert kept == ["pipeline/data/built_in.py: keras.src.backend.config"]


@pytest.mark.parametrize(("names", "get", "known"), [
    (LOSSES, keras.losses.get, losses.ALL_OBJECTS_DICT),
    (METRICS, None, metrics.ALL_OBJECTS_DICT),
    (OPTIMIZERS, keras.optimizers.get, optimizers.ALL_OBJECTS_DICT),
])  # fmt: skip
def test_the_names_are_those_that_keras_has_but_for_what_needs_something_to_work_on(names, get, known):
    needing = {"Loss", "LossFunctionWrapper", "Metric", "metric", "MeanMetricWrapper", "mean_metric_wrapper"}
    needing |= {"optimizer", "optimizermap", "multioptimizer", "lossscaleoptimizer"}
    of_compile = {"acc", "crossentropy", "ce"} if get is None else set()
    assert {*names} == {*known, *of_compile} - needing
    for name in names if get else ():
        get(name)


PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
# Keras's ways to make objects of what a file holds; the first has `safe_mode`, as those have that it is true for.
LOADS = {"load_model", "deserialize_keras_object", "model_from_json"}
CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}


def unsafe(nodes: Iterable[ast.AST]) -> list[str]:
    """What a module does that may run what a file holds."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom):
            found += [str(node.module)] * ((node.module or "").split(".")[0] in PICKLES)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg}
            last = name.rpartition(".")[2]
            if (
                (last in LOADS and given.get("safe_mode") != "True")
                or given.get("allow_pickle", "False") != "False"
                or name in CALLS
                or last in ("read_pickle", "enable_unsafe_deserialization")
            ):
                found.append(ast.unparse(node))
    return found


def test_nothing_reads_a_pickle_or_loads_a_model_that_may_run_code() -> None:
    assert len(NODES) > 100
    assert {path: calls for path, nodes in NODES.items() if (calls := unsafe(nodes))} == {}


@pytest.mark.parametrize("source", [
    "import pickle", "from joblib import load", "numpy.load(f, allow_pickle=True)",
    "numpy.load(f, allow_pickle=flag)", "keras.saving.load_model(p)", "load_model(p, safe_mode=False)",
    "yaml.load(text)", "eval(text)",
    "keras.config.enable_unsafe_deserialization()", "pandas.read_pickle(p)",
])  # fmt: skip
def test_what_would_is_found(source: str) -> None:
    safe = "keras.saving.load_model(path, safe_mode=True)\nnumpy.load(path)\nyaml.safe_load(text)"
    assert unsafe(ast.walk(ast.parse(source)))
    assert not unsafe(ast.walk(ast.parse(safe)))


TRAINED = "strategy=multi_worker workers=2 model=mlp data=digits train.steps=30 train.deterministic=true".split()


@pytest.mark.slow
def test_processes_of_a_fork_server_that_was_warm_train_what_those_of_a_cold_one_do_to_the_last_bit(tmp_path):
    each = [UnderWay(tmp_path / str(cold), *QUICK, *TRAINED, cold=cold) for cold in (True, False)]
    cold, warm = (one.ended(120).ok() for one in each)
    for kind, field in (("steps", "losses"), ("finished", "weights"), ("epoch", "val_loss")):
        ours, theirs = (sorted((event["rank"], event[field]) for event in ran.events(kind)) for ran in (cold, warm))
        assert ours == theirs != []
    assert not left_behind(warm.folder)


def test_a_command_that_ends_without_a_run_leaves_no_fork_server(tmp_path):
    process = start(tmp_path, "workers=none")
    (server,) = until(psutil.Process(process.pid).children, 10)
    finish(process, tmp_path, time.monotonic(), 60).failed(2)
    assert server.wait(10) is None
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("words", [("mode=plan", "strategy=mirrored", "hardware=4gpu"), ("train.epoch=3",)])
def test_a_command_that_is_asked_says_what_one_that_is_started_does(asked, tmp_path, words):
    ran = asked(*words)
    real = finish(start(tmp_path, *words, cold=True), tmp_path, time.monotonic(), 60)
    assert (ran.code, ran.out, ran.err) == (real.code, real.out, real.err)
