"""A strategy, a model and a data set of a package outside the checkout, found by the names under which it has them."""

import os

import pytest
from conftest import ROOT, SUPPORT, sampled

GROUPS = ("strategy", "model", "data")
FUNCTIONS = {"strategy": "hierarchical", "model": "line", "data": "corners"}
ARGUMENTS = {"strategy": "packs: 1", "model": "units: 8", "data": "examples: 256"}
WRONG = {"strategy": "pack: 1", "model": "unit: 8", "data": "example: 256"}
# What a package has its configs found by: Hydra's own seam.
SEARCHED = """
from hydra.plugins.search_path_plugin import SearchPathPlugin


class Theirs(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.append("theirs", "pkg://their_conf")
"""
SMALL = ("hardware=2cpu", "workers=2", "train.steps=4", "measure.steps=0", "tracking=none")


@pytest.fixture
def environ(tmp_path):
    """Where the package is installed; its choices are named theirs, or by what is wrong with them."""
    site = tmp_path / "site"
    (site / "hydra_plugins").mkdir(parents=True)
    (site / "hydra_plugins" / "theirs.py").write_text(SEARCHED)
    (site / "their_choices.py").write_text((SUPPORT / "their_choices.py").read_text())
    (site / "their_ruin.py").write_text("import nothing_there\n\n\ndef anything():\n    pass\n")
    for group in GROUPS:
        (site / "their_conf" / group).mkdir(parents=True)
        for name, function, arguments in (
            ("theirs", f"their_choices.{FUNCTIONS[group]}", ARGUMENTS[group]),
            ("gone", f"their_choices.{FUNCTIONS[group]}s", ARGUMENTS[group]),
            ("signature", f"their_choices.{FUNCTIONS[group]}", WRONG[group]),
            ("ruin", "their_ruin.anything", ""),
            ("fails", f"their_choices.fails_{group}", ""),
        ):
            text = f"build:\n  _target_: {function}\n  {arguments}\n"
            (site / "their_conf" / group / f"{name}.yaml").write_text(text + facts(group))
        (site / "their_conf" / group / "empty.yaml").write_text(facts(group))
    (site / "their_conf" / "__init__.py").touch()
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def facts(group: str) -> str:
    return {"strategy": "spans_devices: true\n", "model": "name: theirs\n", "data": "num_classes: 4\n"}[group]


def test_a_strategy_a_model_and_a_data_set_of_another_package_train_together(pipeline, environ):
    ran = pipeline("strategy=theirs", "model=theirs", "data=theirs", *SMALL, **environ).ok()
    result = ran.result
    assert (result["strategy"], result["model"], result["data"]) == ("theirs", "theirs", "theirs")
    assert (result["workers"], result["processes"], result["status"]) == (2, 1, "FINISHED")
    assert result["val_loss"] > 0
    (folder,) = ran.run_folders
    assert (folder / "model.keras").exists()


@pytest.mark.parametrize("group", GROUPS)
def test_a_choice_of_another_package_that_cannot_be_made_is_refused_before_anything_starts(asked, environ, group):
    names = "empty", "gone", "signature"
    ran = asked("-m", f"{group}={','.join(names)}", "mode=plan", *SMALL, **environ).failed(2)
    function, wrong = FUNCTIONS[group], WRONG[group].partition(":")[0]
    assert f"Expected {group}.build._target_ to name a function, received none." in ran.err
    assert f"to name a function that exists, received their_choices.{function}s: no {function}s in" in ran.err
    assert f"Expected an argument of their_choices.{function} (" in ran.err
    assert f"received {group}.build.{wrong}. Try {group}.build.{wrong}s." in ran.err
    assert not list(ran.folder.glob("outputs/**/events.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("group", sampled(GROUPS, 1))
def test_a_choice_of_another_package_that_fails_is_named_with_its_own_lines(pipeline, environ, group):
    others = [f"{other}=theirs" for other in GROUPS if other != group]
    ran = pipeline("-m", f"{group}=ruin,fails", *others, *SMALL, "measure.baseline=none", **environ).failed()
    assert "pipeline: ModuleNotFoundError: No module named 'nothing_there'" in ran.err
    assert "pipeline: ValueError: the moon is full" in ran.err
    assert f"in fails_{group}" in ran.out
    assert "Traceback" not in ran.err + ran.out


@pytest.mark.parametrize(("strategies", "wrong"), [("default,one_device", "devices"), ("mirrored", "processes")])
def test_a_strategy_that_spans_less_than_its_file_says_is_refused(pipeline, strategies, wrong):
    said = (f"strategy={strategies}", f"strategy.spans_{wrong}=true", "model=mlp", "data=digits", "train.check=off")
    ran = pipeline("-m", *said, *SMALL, "measure.baseline=none").failed()
    refused = "Expected strategy.build to make a strategy of 2 replicas, received one of 1. Try strategy.spans_devices"
    assert ran.err.count(refused) == len(strategies.split(","))


def test_a_name_that_no_package_has_is_refused_with_those_that_are_there(asked, environ):
    ran = asked("strategy=horovod", "mode=plan", **environ).failed(2)
    assert "theirs, tpu, received horovod." in ran.err
