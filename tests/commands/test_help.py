"""The pages of `--help`, one read to its end and more of what is named after it, and what a shell offers at TAB."""

import re
import shutil
import subprocess

import pytest

from pipeline.commands import train
from pipeline.commands.verbs import VERBS
from pipeline.config.instead import keys
from pipeline.config.offered import choices


def test_the_first_page_is_read_to_its_end_and_names_verbs_groups_and_the_keys_that_matter(asked, tmp_path):
    told = asked("--help", COLUMNS="100").ok()
    lines = told.out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    for name in (*VERBS, *choices(), *(rf"{key}=\S+" for key in train.FIRST)):
        assert re.search(rf"^  {name} +\S", told.out, re.M), name
    assert sum(line.startswith("  python -m pipeline ") for line in lines) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("columns", ["60", "40"])
def test_pages_fit_the_terminal_and_break_no_word(asked, columns):
    whole = asked("--help", COLUMNS="100").out.split()
    told = asked("--help", COLUMNS=columns)
    assert told.out.split() == whole
    longer = [line.split() for line in told.out.splitlines() if len(line) > int(columns)]
    assert all(words[:3] == ["python", "-m", "pipeline"] or len(words) == 1 for words in longer), longer


def test_all_says_of_every_key_what_it_means_of_which_type_it_is_and_what_it_is_set_to(asked):
    told = asked("--help", "all", COLUMNS="100").ok()
    entries = dict(re.findall(r"^  ([a-z_.]+)=.*\n((?: {6}.*\n)*)", told.out, re.M))
    for key in keys():
        texts = [text for name, text in entries.items() if f"{name}.".startswith(f"{key}.")]
        assert [bool(re.search(r"^ {6}[^(]", text, re.M)) for text in texts] == [True] * max(1, len(texts)), key
    assert "  train.seed=0  (a whole number)\n" in told.out
    assert "  launch.stop_timeout=4.0  (a number)\n      seconds between asking a process to stop" in told.out


@pytest.mark.parametrize(("topics", "words"), [
    (["strategy"], ["strategy=multi_worker ", "Several processes", "strategy.devices_per_process=null"]),
    (["model=mlp"], ["Its keys, under model=mlp:", "model.build.hidden=[128]", "units of each hidden layer"]),
    (["train"], ["train: length", "train.epochs=null  (a whole number or null)", "train.divergence_factor="]),
    (["checkpoint.keep"], ["checkpoint.keep=2  (a whole number)\n      number of last checkpoints"]),
    (["steps"], ["train.steps=null", "measure.steps=null"]),
    (["experiment"], ["experiment=scaling", "How far does it scale here?"]),
    (["report"], ["python -m pipeline report NAME"]),
    (["hardware=3x8gpu"], ["8 GPU devices on each of 3 hosts.", "hardware=4cpu ", "hardware.hosts=3 "]),
    (["model"], ["model.build.filters=[32,64]\n      filters of each 3x3 convolution"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_a_group_a_choice_a_key_and_a_verb_have_a_page_each(asked, topics, words):
    told = asked("--help", *topics, COLUMNS="100").ok()
    assert [word for word in words if word not in told.out] == []


@pytest.mark.parametrize(("typed", "some", "none"), [
    ("pipeline rep", ["report"], ["compare"]),
    ("pipeline strat", ["strategy=mirrored", "strategy=multi_worker", "strategy.name="], ["model=cnn"]),
    ("pipeline strategy=mu", ["multi_worker"], ["mirrored"]),
    ("pipeline -m strategy=mirrored,mu", ["mirrored,multi_worker"], []),
    ("pipeline train.determ", ["train.deterministic=", "train.deterministic=true"], ["train.epochs="]),
    ("pipeline data.cache=", ["auto", "none", "memory", "file"], ["true"]),
    ("pipeline hardware=", ["auto", "4cpu", "2x4gpu"], []),
])  # fmt: skip
def test_bash_offers_verbs_choices_keys_and_values(asked, tmp_path, typed, some, none):
    script = tmp_path / "completion.bash"
    script.write_text(asked("--completion", "bash").ok().out)
    # What bash would put in place of the last word, as it cuts words.
    words = f'COMP_LINE="{typed}"; COMP_POINT=${{#COMP_LINE}}; _pipeline; printf "%s\\n" "${{COMPREPLY[@]}}"'
    ran = subprocess.run(["bash", "-c", f"source {script}; {words}"], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
    assert set(some) <= set(ran.stdout.split())
    assert not set(none) & set(ran.stdout.split())


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_takes_its_script(asked):
    assert subprocess.run(["fish", "-c", asked("--completion", "fish").ok().out], timeout=30).returncode == 0
