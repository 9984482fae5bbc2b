"""Commands travel as JSON, and come out as they went in."""

import json
from typing import Never

import pytest

from pipeline.record import commands, events

MADE = [
    commands.Load("outputs/runs/mine"),
    commands.Drop({"1": {"train": [events.Lost("a.png", 3, 1, "a.png", "is cut off")], "validation": []}}),
    commands.Build([100, 28], [10], "back"),
    commands.Check(),
    commands.MeasureSize(),
    commands.Profile("input", 20),
    commands.Begin(),
    commands.Calibrate(None),
    commands.Measure(0, 3, 20, 5),
    commands.Train(5, "outputs/runs/mine"),
    commands.Explain("no input", 5, 3, 20),
    commands.Leave(),
    commands.Exit(),
]


def test_every_command_is_here():
    assert {type(command) for command in MADE} == set(commands.COMMANDS.values())


@pytest.mark.parametrize("command", MADE, ids=lambda command: type(command).__name__)
def test_a_command_comes_out_as_it_went_in(command):
    assert commands.from_json(command.to_json()) == command
    assert json.loads(command.to_json())["do"] == str(command.__struct_config__.tag)
    with pytest.raises(AttributeError):
        command.folder = "other"


def test_what_answers_a_command_is_a_kind_of_event():
    answers = {name: made.response_type() for name, made in commands.COMMANDS.items()}
    assert {name for name, answer in answers.items() if answer is Never} == {"begin", "leave", "exit"}
    assert {answer for answer in answers.values() if answer is not Never} <= set(events.KINDS.values())
    assert answers["measure"] is events.Measured
