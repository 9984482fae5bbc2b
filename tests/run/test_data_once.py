"""The data of a command's runs are looked at once."""

import io
import os

import pytest
from plans import config

from pipeline.data import needed
from pipeline.run.planner import plan_run
from pipeline.run.session import Session
from pipeline.views.mlflow import Tracker
from pipeline.views.terminal import Terminal, console_on


def test_runs_of_the_same_data_look_at_them_once_and_those_of_others_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[str]()
    monkeypatch.setattr(needed, "expect_data", lambda target, arguments: looked.append(arguments["path"]))
    monkeypatch.setattr(needed, "may_be_few", lambda target, arguments, least: False)
    screen = Terminal(console_on(io.StringIO()), lambda: 0.0)
    session = Session((os.getcwd(),), {}, screen, Tracker)
    for path in ("here", "here", "there"):
        build = {"_target_": "pipeline.data.csv", "path": path}
        plan_run(config("one_device", workers=1, data__build=build, data__name="csv"), session)
    assert looked == ["here", "there"]
