"""One command with verbs: what the first word asks for, and what is said to a word that asks for nothing."""

import json
import shlex
import subprocess
import sys

import pytest
from bad_input import untypeable
from conftest import environment

from pipeline.commands import verbs


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
      for asks in ("--help", "clean", "mode=plan", "--cfg job") for unbuffered in ("", "1")),
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
