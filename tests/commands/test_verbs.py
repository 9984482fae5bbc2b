"""One command with verbs: what the first word asks for, the pages of `--help`, what TAB offers, and `clean`."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bad_input import untypeable
from conftest import environment, sampled

from pipeline.commands import results, train, verbs
from pipeline.commands.results import clean as main
from pipeline.config.instead import keys
from pipeline.config.offered import choices
from pipeline.driver.run_folders import Lock


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_a_verb_says_how_it_is_typed_and_its_keys_are_typed_alike(asked, verb):
    told = asked(verb, "--help").ok()
    assert f"python -m pipeline {verb} " in told.out
    if verb in ("prepare", "doctor", "predict"):
        assert verb != "doctor" or ("  1  WARNING:" in told.out and "  3  FAULT:" in told.out)
        return
    assert "[output_dir=outputs]" in told.out
    assert "--" not in told.out.replace("--help", "")
    for mistake in (["--output-dir", "there"], ["outputdir=there"]):
        told = asked(verb, "x", "y", *mistake).failed(2)
        assert told.err.endswith(f", received {mistake[0].partition('=')[0]}. Try output_dir=there.\n")


@pytest.mark.parametrize("verb", ["clean", "sync", "compare a b", "attach a", "explain a", "report a"])
def test_a_folder_that_cannot_be_read_is_said_in_words(asked, verb):
    told = asked(*verb.split(), f"output_dir={'a' * 300}")
    assert told.code == 2
    assert told.err.count("File name too long") == told.err.count("\n") == 1


# A line in which PIPELINE is the command, how it may end, and what it then says.
STREAMS = [
    # Who stops reading what was asked for hears no complaint.
    *((f"PIPELINE {asks} | true", (0,), None) for asks in ("--help", "--cfg job", "--hydra-help")),
    # Streams that are closed are no error.
    *((f"PIPELINE mode=plan {closed}", (0,), None) for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")),
    # Output that nobody reads on ends nothing, and makes nothing succeed.
    *((f"PIPELINE {asks} 2>&1 | true; exit ${{PIPESTATUS[0]}}", (code,), None)
      for asks, code in (("clean", 0), ("mode=plan", 0), ("nonsense", 1))),
    # A narrow terminal is none either.
    ("COLUMNS=1 PIPELINE --help", (0,), None),
    # A full disk, and a folder that is gone.
    *((f"PYTHONUNBUFFERED={unbuffered} PIPELINE {asks} > /dev/full", (0, 2), "to be able to write all output")
      for asks in sampled(("--help", "clean", "mode=plan", "--cfg job"), 2) for unbuffered in ("", "1")),
    ("mkdir gone; cd gone; rmdir ../gone; PIPELINE", (2,), "Expected a working folder"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "codes", "words"), STREAMS)
def test_streams_that_are_closed_or_that_nobody_reads_on_are_no_error_and_others_are_one_line(
    tmp_path, line, codes, words
):
    line = line.replace("PIPELINE", f"{shlex.quote(sys.executable)} -m pipeline")
    told = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (told.returncode in codes, bool(told.stderr)) == (True, bool(words))
    assert told.stderr.count("\n") == told.stderr.count(words or "\n") == bool(words)


@pytest.mark.parametrize(("word", "instead"), [
    ("zzz", "Try `python -m pipeline --help`."),
    ("plan", "Try python -m pipeline mode=plan."),
    ("strategy mirored workers=2", "Try python -m pipeline strategy=mirrored workers=2."),
    ("workers = 2", "Try python -m pipeline workers=2."),
])  # fmt: skip
def test_a_word_that_is_no_verb_gets_what_was_meant_ready_to_be_typed(asked, tmp_path, word, instead):
    told = asked(*word.split(), "mine")
    assert not untypeable(told.err)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"pipeline: Expected a verb ({', '.join(verbs.VERBS)}) or ")
    assert told.err.strip().endswith(instead)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("typed", "words"), [
    ("explain strategy=parameter_server", "Expected measure.explain=false"),
    ("explain nowhere", "Expected a run's folder, its name or its id in MLflow, received nowhere, which"),
    ("attach", "Try python -m pipeline attach RUN"),
    ("sync nothing/here", "nothing/here"),
    ("sync uri=file:mlruns", "Try uri=http://127.0.0.1:5000"),
    *((f"ui port={port}", f"received {port}. Try port=5001.") for port in ("0", "65536", "five", "-1", "5000.0")),
    ("ui port=50517 output_dir=/proc/x", "Expected to be able to write /proc/x"),
    ("clean older_than=month", "to be an age, as 12h, 30d or 8w, received month. Try older_than="),
    ("clean keep_best=some", "Expected keep_best to be a whole number, received some. Try keep_best=5."),
    ("clean dry=no", "Expected dry to be true or false, received no. Try dry=true."),
    ("clean --keep-best 5", "Expected key=value, received --keep-best. Try keep_best=5."),
    ("clean mine", "received mine. Try python -m pipeline clean [keep_best=5] [older_than=30d]"),
    ("doctor --only disc", "received disc. Try --only python,"),
    ("doctor --jsn", "Expected options that exist, received --jsn. Try --help."),
    ("doctor workrs=2", "workrs"),
    ("--help epohcs", "received epohcs. Try --help train.epochs."),
    ("--help zzz", "received zzz. Try --help all."),
    ("--completion bsh", "one of bash, fish, zsh, received bsh. Try pipeline --completion bash."),
    ("prepare", "Expected out to be the folder to fill, received none. Try out=prepared."),
    ("prepare out=gs://b/d", "Expected out to be a folder that this machine can write to, received gs://b/d"),
    ("prepare out", "Expected key=value or group=choice, received out. Try out=VALUE."),
    *((f"prepare out=d {typed}", words) for typed, words in (
        ("data=digitz", "received digitz. Try data=digits."),
        ("data.shuffle=maybe", "Expected data.shuffle to be true or false, received maybe"),
        ("sed=1", "Expected a key that exists, received sed. Try seed=1."),
        ("model=cnn", "received model. Try `python -m pipeline prepare --help`"),
        ("data.path=x", "Expected data.path=null with data=mnist5k, which reads none, received x"),
        ("processes=0", "Expected processes to be 1 or more, received 0."),
        ("shard_mib=0", "Expected shard_mib to be a size in MiB, above 0, received 0."),
        ("validation_fraction=1", "0 or more and below 1, received 1. Try validation_fraction=0.2"),
        ("shards=10 workers=4", "divide evenly over 4 workers, received 10. Try shards=8."),
        ("processes=2 scheduler=tcp://h:1", "Expected processes to be null where a scheduler"),
        ("data.build._target_=sources.arrays allowed_targets=[]", "to be in an allowed package"),
        ("data.build._target_=sources.arrays +data.build.exampels=3", "data.build.exampels. Try data.build.examples"),
    )),
])  # fmt: skip
def test_what_a_verb_cannot_take_is_refused_in_one_message_and_nothing_is_begun(asked, tmp_path, typed, words):
    told = asked(*typed.split()).failed(2)
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith("pipeline: Expected ")
    assert words in told.err
    assert not list(tmp_path.iterdir())


def test_predict_without_runs_says_what_to_type_first(asked):
    told = asked("predict", "hardware=2x4gpu", "strategy=multi_worker", "model=mlp").failed(2)
    assert "Try `python -m pipeline -m strategy=multi_worker model=mlp data=mnist5k workers=1,2` first." in told.err


def test_a_run_that_was_explained_says_so_again(asked, tmp_path):
    folder = tmp_path / "outputs" / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"workers": 2}))
    parts = [{"name": "communication", "share": 0.4, "low": 0.38, "high": 0.42}]
    explained = {"lost": 0.4, "lost_low": 0.38, "lost_high": 0.42, "parts": parts, "advice": "Try less."}
    (folder / "result.json").write_text(json.dumps({"status": "FINISHED", "explained": explained}))
    out = asked("explain", "one").ok().out
    assert out.startswith("Try less.\n")
    assert "= communication 40% (38% to 42%)" in out
    (folder / "result.json").write_text(json.dumps({"status": "FINISHED", "explained": None}))
    assert "Expected a run that was explained" in asked("explain", "one").failed(2).err


def test_the_first_page_is_read_to_its_end_and_names_verbs_groups_and_the_keys_that_matter(asked, tmp_path):
    told = asked("--help", COLUMNS="100").ok()
    lines = told.out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    for name in (*verbs.VERBS, *choices(), *(rf"{key}=\S+" for key in train.FIRST)):
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


DAY = 86_400


def a_run(folder: Path, days: float = 40, **result: Any) -> None:
    """A run that was last written to so many days ago."""
    folder.mkdir(parents=True)
    values = {"status": "FINISHED", "model": "cnn", "data": "mnist5k", "speedup": 1.5, "examples_per_second": 100.0}
    (folder / "plan.json").write_text("{}")
    (folder / "result.json").write_text(json.dumps(values | result))
    (folder / "model.keras").write_bytes(b"m" * 2**20)
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - days * DAY,) * 2)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Eight runs of different age and speed, and two sweeps."""
    runs, sweeps = tmp_path / "outputs" / "runs", tmp_path / "outputs" / "sweeps"
    for number in range(4):
        a_run(runs / f"old_{number}", speedup=1.0 + number / 10)
    a_run(runs / "young", 1, speedup=0.5)
    a_run(runs / "other_model", model="mlp", speedup=0.1)
    for status in ("killed", "failed"):
        a_run(runs / status, status=status.upper(), speedup=None)
    for folder, speedup in (("worse/0_a", 0.9), ("worse/1_b", 0.8), ("best/0_a", 1.9), ("best/1_b", 0.1)):
        a_run(sweeps / folder, speedup=speedup)
    return tmp_path / "outputs"


def left(output: Path) -> set[str]:
    return {path.name for place in ("runs", "sweeps") for path in (output / place).iterdir()}


GOING = {"old_0", "old_1", "old_2", "failed", "worse"}
EVERYTHING = GOING | {"old_3", "young", "other_model", "killed", "best"}


def test_it_says_what_would_go_and_why_the_rest_stays_and_without_dry_removes_that_and_no_other(output, capsys):
    assert main(["keep_best=2", f"output_dir={output}"]) == 0
    out = capsys.readouterr().out
    would = [line for line in out.splitlines() if line.startswith("would remove: ")]
    assert {line.partition(", ")[0].rpartition("/")[2] for line in would} == GOING
    for words in (
        "old_0, 1.0 MiB, 40 days old, 1.00x at best", "worse, 2 runs, 2.0 MiB, 40 days old, 0.90x at best",
        "5 folders would go, 6.0 MiB; 5 stay (", "3 among the best", "1 younger",
        "1 not finished, so that a command can go on with it",
    ):  # fmt: skip
        assert words in out
    assert out.endswith("Nothing was removed yet: type it again with dry=false.\n")
    assert left(output) == EVERYTHING
    assert main(["keep_best=2", "dry=false", f"output_dir={output}"]) == 0
    assert left(output) == EVERYTHING - GOING
    assert "5 folders went, 6.0 MiB; 5 stay (" in capsys.readouterr().out


def test_whatever_is_asked_for_nothing_of_other_programs_is_removed(output):
    for place in ("runs", "sweeps"):
        (output / place / "theirs").mkdir()
        (output / place / "theirs" / "result.json").write_text("{}")
    assert main(["keep_best=0", "older_than=0h", "unfinished=true", "dry=false", f"output_dir={output}"]) == 0
    assert left(output) == {"theirs"}


def test_what_was_killed_half_way_is_listed_again(output, monkeypatch):
    deleted = []

    def unlink(path, **opened):
        # The last of three files.
        if len(deleted) == 2:
            raise KeyboardInterrupt
        deleted.append(Path(path).name)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(KeyboardInterrupt):
        main(["keep_best=0", "dry=false", f"output_dir={output}"])
    assert deleted == ["model.keras", "result.json"]


def test_what_is_under_way_and_what_a_sweep_that_stays_has_gone_on_with_stay(output):
    lock = Lock(output / "runs" / "old_0")
    points = [{"place": 0, "repeat": 0, "fingerprint": "a", "folder": "../../runs/old_1", "overrides": []}]
    (output / "sweeps" / "best" / "sweep.json").write_text(json.dumps({"points": points}))
    why = results.staying(results.gather(output), 1, 30 * DAY, False, time.time())
    lock.release()
    # The sweep was written to just now.
    names = ("runs/old_0", "sweeps/best", "runs/old_1", "runs/old_2")
    assert [why[output / name] for name in names] == [results.BUSY, results.YOUNG, results.NEEDED, None]
