"""Functions named in YAML: refused from their source where they do not exist or do not take their arguments."""

import re
import sys
import textwrap

import pytest
import yaml
from conftest import SUPPORT

from pipeline.config import offered, targets
from pipeline.config.targets import check
from pipeline.errors import UserError

GIVEN = ("input_shape", "num_classes")

LIBRARY = {
    "mine/__init__.py": """
        from mine.models import deep as renamed, Layer
        from .models import wide
        import subprocess
        import mine.models as all_models
        from . import models
        from mine.models import posix_system
        import numpy as np
        from numpy.linalg import norm
    """,
    "mine/models.py": """
        import functools
        SIZE = 3
        def deep(input_shape, depth, /, *, width=3, bias): ...
        def wide(input_shape, *sizes, **more): ...
        def plain(input_shape, width=3): ...
        @functools.cache
        def decorated(depth): ...
        class Layer:
            def __init__(self, units, input_shape, name=None): ...
            def call(self): ...
        class Child(Layer): ...
        class Made:
            def __new__(cls, *args): ...
            def __init__(self, units): ...
        class Static:
            @staticmethod
            def build(units): ...
        made_later = functools.partial(plain, width=4)
        from posix import system as posix_system
        tools = LazyLoader("numpy")
    """,
    "mine/conditional.py": "try:\n    def model(): ...\nexcept ImportError:\n    pass\n",
    "mine/lazy.py": "def __getattr__(name): ...\n",
    "mine/star.py": "from mine.models import *\n",
    "mine/broken.py": "def model(:\n",
    "mine/latin.py": b"# \xe9\ndef model(): ...\n",
    "mine/inner/__init__.py": "",
    "mine/inner/deep.py": "def deep(): ...\n",
    "alone.py": "raise SystemExit('imported')\ndef model(): ...\n",
}


@pytest.fixture
def search(tmp_path):
    for name, text in LIBRARY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
    return (str(tmp_path), *sys.path)


@pytest.mark.parametrize(("target", "arguments"), [
    ("mine.models.deep", {"depth": 3, "bias": True}),
    ("mine.renamed", {"depth": 3, "bias": True}),
    ("mine.wide", {"anything": 3}),
    ("mine.models.decorated", {"anything": 3}),
    ("mine.Layer", {"units": 3}),
    ("mine.models.Child", {"anything": 3}),
    ("mine.models.Made", {"anything": 3}),
    ("mine.models.Static.build", {"units": 3}),
    ("mine.models.made_later", {"anything": 3}),
    ("mine.conditional.model", {}),
    ("mine.all_models.plain", {}),
    ("mine.lazy.whatever", {}),
    ("mine.star.plain", {}),
    ("mine.inner.deep.deep", {}),
    ("mine.latin.model", {}),
    # Whose import ends Python.
    ("alone.model", {}),
    ("keras.callbacks.EarlyStopping", {"patience": 3}),
    ("numpy.linalg.norm", {"x": 3}),
    # A config is code: whatever is installed may be called.
    ("builtins.dict", {"a": 3}),
    ("mine.subprocess.run", {"args": ["true"]}),
])  # fmt: skip
def test_what_exists_and_what_cannot_be_told_from_its_source_is_let_through(search, target, arguments):
    check({"_target_": target, **arguments}, "model.build", GIVEN, search)


@pytest.mark.parametrize(("target", "arguments", "words"), [
    ("mine.models.deap", {}, "no deap in mine.models. Try model.build._target_=mine.models.deep."),
    ("mine.model.deep", {}, "no model in mine. Try model.build._target_=mine.models.deep."),
    ("mine.nothing_like_it", {}, "received mine.nothing_like_it: no nothing_like_it in mine."),
    ("mine.subproces", {}, "no subproces in mine. Try model.build._target_=mine.my_function."),
    ("mine.models.SIZES", {}, "no SIZES in mine.models. Try model.build._target_=mine.models.my_function."),
    ("mine.inner", {}, "received mine.inner, which is a module."),
    ("mine.models.deep.depth", {}, "received mine.models.deep.depth: deep is one itself."),
    ("nothing.there", {}, "there is no module 'nothing'. Try running from the folder that holds it"),
    ("mine.models.plain", {"widht": 3}, "(input_shape, width), received model.build.widht. Try model.build.width."),
    ("mine.models.plain", {"input_shape": [3]}, "Expected model.build.input_shape to be left to the program"),
    ("mine.models.deep", {}, "received none for depth, bias. Try +model.build.depth=..."),
    ("mine.Layer", {}, "received none for units."),
    ("mine.Layer", {"units": 3, "self": 1}, "(units, input_shape, name), received model.build.self."),
    ("mine.broken.model", {}, "received a syntax error in line 1"),
    ("mine..model", {}, "Expected model.build._target_ to be like package.function, received 'mine..model'."),
    (None, {}, "received none."),
    ("mine.models.Layer.__init__.__globals__", {}, "to be like package.function"),
    ("mine.models.plain", {"width": 3, "safe_mode": False}, "Expected model.build.safe_mode to be true"),
    ("keras.saving.load_model", {"filepath": "a", "safe_mode": None}, "Try model.build.safe_mode=true."),
    ("numpy.load", {"file": "a.npy", "allow_pickle": True}, "Try model.build.allow_pickle=false."),
])  # fmt: skip
def test_what_cannot_be_called_is_refused_and_a_near_name_offered(search, target, arguments, words):
    with pytest.raises(UserError, match=f"^(?=Expected ).*{re.escape(words)}"):
        check({"_target_": target, **arguments}, "model.build", GIVEN, search)


def test_functions_inside_of_arguments_are_checked_too_and_get_nothing_of_ours(search):
    inner = {"_target_": "mine.models.plain"}
    with pytest.raises(UserError, match=r"none for input_shape. Try \+train.loss.parts\[1\].inner.input_shape=..."):
        check({"parts": [3, {"inner": inner}]}, "train.loss", GIVEN, search)
    check({"_target_": "mine.wide", "x": {"_target_": "mine.wide", "input_shape": 3}}, "model.build", GIVEN, search)


def test_every_choice_that_comes_with_the_program_passes():
    addresses = ("addresses", "coordinator", "workers", "parameter_servers")
    given = {"strategy": ("devices", "rank", *addresses), "model": GIVEN, "data": ("shard", "shards")}
    for group, names in given.items():
        for path in sorted((offered.folder() / group).glob("*.yaml")):
            check(yaml.safe_load(path.read_text())["build"], f"{group}.build", names, (str(SUPPORT), *sys.path))


def test_what_the_program_gives_goes_where_the_signature_asks_for_it_and_nowhere_where_that_is_hidden():
    node = {"_target_": "textwrap.indent", "prefix": "- "}
    assert targets.call(node, "model.build", text="one", num_classes=10) == "- one"
    assert [targets.asks_for(node, "model.build", name) for name in ("text", "num_classes")] == [True, False]
    hidden = {"_target_": "builtins.dict", "a": 1}
    assert not targets.asks_for(hidden, "x", "input_shape")
    assert targets.call(hidden, "x", input_shape=(3,)) == {"a": 1}


def test_nested_functions_are_called_before_those_that_take_them_and_other_values_left_alone():
    half = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    plain = [None, 3, "adam", ["accuracy"], {"a": {"b": [1]}}, []]
    check(plain, "train.metrics")
    assert targets.value({"a": [half, *plain], "b": half}, "x") == {"a": [0.5, *plain], "b": 0.5}
    assert targets.call({"_target_": "fractions.Fraction", "numerator": half}, "x") == 0.5
    assert targets.call({"_target_": "fractions.Fraction.from_float", "f": 0.25}, "x") == 0.25


def test_what_only_the_call_can_tell_is_told_in_words(tmp_path, monkeypatch):
    for target, words in (
        ("string.digits", "received string.digits, which cannot be called."),
        ("string.nothing", "received string.nothing: no nothing there."),
        ("nothing.there", "Expected x._target_ to name a function, received nothing.there:"),
    ):
        with pytest.raises(UserError, match=words):
            targets.call({"_target_": target}, "x")
    # A module that theirs lacks is their error.
    (tmp_path / "lacking.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        targets.call({"_target_": "lacking.model"}, "model.build")


def test_a_list_of_packages_lets_theirs_ours_and_keras_s_through_and_one_without_any_is_refused(search):
    mine = "mine.models.made_later", "mine.Layer", "mine.lazy.whatever"
    for target in (*mine, "keras.layers.Dense", "pipeline.models.cnn"):
        check({"_target_": target}, "model.build", (*GIVEN, "units"), search, ["mine"])
    for names in [""], ["mine", "a.__b"], [["mine"]], ["a-b"]:
        with pytest.raises(
            UserError, match=r"Expected allowed_targets .* Try allowed_targets=\[my_package\], or null."
        ):
            targets.check_allowed(names)


@pytest.mark.parametrize(("target", "words"), [
    ("numpy.linalg.norm", "Try a function of theirs, or allowed_targets=[mine.models,mine,numpy] if you trust numpy"),
    ("mine.np.load", "received mine.np.load, which stands for numpy.load."),
    ("mine.norm", "received mine.norm, which stands for numpy.linalg.norm."),
    ("mine.models.tools.load", "what mine.models.tools is cannot be told from its source."),
    ("minefield.model", "in an allowed package (mine.models, mine, keras, or this program's strategies, models and"),
    ("pipeline.config.targets.call", "received pipeline.config.targets.call. Try a function of theirs."),
    ("builtins.eval", "if you trust builtins."),
    ("mine.subprocess.run", "which stands for subprocess.run."),
    ("mine.posix_system", "which stands for posix.system."),
    ("mine.all_models.functools.partial", "which stands for functools.partial."),
    ("keras.src.utils.file_utils.os.system", "which stands for os.system."),
])  # fmt: skip
def test_a_list_of_packages_refuses_all_others_and_what_only_passes_through_them(search, target, words):
    nested = {"a": [{"b": {"_target_": "mine.wide", "input_shape": 3, "c": [[{"_target_": target}]]}}]}
    place = re.escape("Expected train.loss.a[0].b.c[0][0]._target_ ")
    with pytest.raises(UserError, match=f"^(?={place}).*{re.escape(words)}"):
        check(nested, "train.loss", (), search, ["mine.models", "mine"])
