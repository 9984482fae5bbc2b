"""What no part of the program may do: read a pickle, or load a model that may run code."""

import ast

import pytest
from conftest import ROOT

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
# Keras's ways to make objects of what a file holds; the first has `safe_mode`, as those have that it is true for.
LOADS = {"load_model", "deserialize_keras_object", "model_from_json"}


CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}


def unsafe(source: str) -> list[str]:
    """What a module's source does that may run what a file holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
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
    found = {path: unsafe(path.read_text()) for path in (ROOT / "pipeline").rglob("*.py")}
    assert len(found) > 100
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize("source", [
    "import pickle", "from joblib import load", "numpy.load(f, allow_pickle=True)",
    "numpy.load(f, allow_pickle=flag)", "keras.saving.load_model(p)", "load_model(p, safe_mode=False)",
    "yaml.load(text)", "eval(text)",
    "keras.config.enable_unsafe_deserialization()", "pandas.read_pickle(p)",
])  # fmt: skip
def test_what_would_is_found(source: str) -> None:
    assert unsafe(source)
    assert not unsafe("keras.saving.load_model(path, safe_mode=True)\nnumpy.load(path)\nyaml.safe_load(text)")
