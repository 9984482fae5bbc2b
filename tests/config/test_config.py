"""The command as a person types it: what is refused and in which words, and what is composed, without a run."""

import os
import re
import socket
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import yaml
from bad_input import cases, fault, keys, of_key
from conftest import QUICK, ROOT, SUPPORT, Ran, sampled
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from pipeline.commands import train
from pipeline.config import config as configs
from pipeline.config.composing import Composer, config_of
from pipeline.config.schema import Config
from pipeline.errors import UserError

CONF = f"--config-dir={SUPPORT}/conf"
TWO = ("strategy=multi_worker", "workers=2")
composed = partial(config_of, Config)


def refusal(ran: Ran) -> str:
    """The one message of a command that was refused in good form."""
    assert fault(ran) is None, ran.err
    assert not [*ran.folder.glob("outputs/runs/*")]
    return ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # Choices.
        ([CONF, "model=tinny"], "model=tiny"),
        (["strategy=null"], "strategy=mirrored"),
        (["+strategy=mirrored"], "received a second one with +strategy"),
        (["~strategy"], "strategy="),
        (["experiment=mine"], "Expected experiment"),
        (["data=tfds"], "data.name="),
        # Keys.
        (["-m", "~measure", "workers=1,2"], "Expected measure"),
        (["~train.epochs"], "train.epochs=null"),
        # Types.
        (["train.callbacks=EarlyStopping"], "'train.callbacks=[{_target_: keras.callbacks.EarlyStopping}]'"),
        # What a list of names, or the file system, can tell.
        (["train.loss=mean_square_error"], "Keras's name of a loss, or a function {_target_: ...}, received"),
        (["train.loss=mine.my_loss"], "'train.loss={_target_: mine.my_loss}'"),
        (["train.metrics=[acuracy]"], "'train.metrics=[accuracy]'"),
        (["train.optimizer={_target_: keras.optimizers.SGD, lr: 0.1}"], "train.optimizer.learning_rate"),
        (["data=images", f"data.path={SUPPORT}/con"], f"Try data.path={SUPPORT}/conf."),
        (["data=images", "data.path=/var/em*"], "received /var/em*"),
        (["data=images", f"data.path={SUPPORT}/conf"], "Expected files (.png, .jpg, .jpeg, .gif, .bmp) in data.path="),
        (["data=tfds", "data.name=mnist", f"data.path={SUPPORT}"], "without features.json."),
        (["checkpoint.folder=/proc/x"], "Expected to be able to write checkpoint.folder=/proc/x"),
        (["tracking.uri=sqlite:////proc/x/a.db"], "Expected to be able to write tracking.uri=sqlite:////proc/x/a.db"),
        (["tracking.uri=sqlite:////proc"], "Expected a file that can be written for tracking.uri=sqlite:////proc"),
        (["resume=nowhere"], "resume=auto or resume=never"),
        # Every range, contradiction and layout is in test_plan.
        (["train.learning_rate=-1"], "train.learning_rate=0.001"),
        (["train.check=yes"], "Expected train.check to be true, strict or off, received yes. Try train.check=true."),
        (["train.check=false"], "received False. Try train.check=off."),
        (["hardware=8cpu", "train.global_batch=100"], "train.global_batch=96"),
        # Functions; more is in test_targets.
        (["model.build._target_=nowhere.cnn"], "no module 'nowhere'"),
        (["~model.build._target_"], "Expected model.build._target_"),
        (["train.callbacks=[{patience: 3}]"], "Expected train.callbacks"),
        (["allowed_targets=own"], "Expected allowed_targets"),
        (["allowed_targets=[mine]", "model.build._target_=own.tiny"], "allowed_targets=[mine,own]"),
        # What Hydra would do before the program has a word.
        (["+hydra.job.env_set.LD_PRELOAD=a.so"], "hydra.job.env_set"),
        (["-m", "hydra/sweeper=optuna", "workers=1,2"], "Expected hydra/sweeper"),
        (["hydra.launcher=null"], "Expected hydra/launcher"),
        # Overrides that are none.
        (["=3"], "received 3"),
        (["workers=1,2"], "-m workers=1,2 for a run with each"),
        (["workers=${nothing}"], "Expected workers"),
        (["--nonsense"], "`python -m pipeline --help`"),
        # What other programs call it; more is in the examples of `pipeline/config/instead.py`.
        (["num_workers=4"], "workers=4 or data.parallel_reads=4"),
        (["momentum=0.9"], "'train.optimizer={_target_: keras.optimizers.SGD, momentum: 0.9}'"),
        (["precision=fp16"], "train.precision=mixed_float16"),
        (["strategy=horovod"], "strategy=multi_worker strategy.collective=horovod"),
        (["hardware=3"], "hardware=3gpu"),
        (["train.optimizer=Adam(0.1)"], "'train.optimizer={_target_: keras.optimizers.Adam}'"),
        (["train.steps=1,000"], "train.steps=1000, or -m train.steps=1,000 for a run with each"),
        (["train.metrics=accuracy,auc"], "'train.metrics=[accuracy,auc]', or -m train.metrics=accuracy,auc"),
        (["-m", "sweep.name='a b/c'", "workers=1,2"], "sweep.name=a_b_c"),
        (["strategy.name=.."], "received ... Try strategy.name=mine."),
        (["model.build={_target_: own.tiny, new: 1}"], "Try '+model.build={_target_: own.tiny, new: 1}'."),
        # What is misspelt.
        (["epochs=3"], "Try train.epochs=3."),
        (["mode=paln"], "Try mode=plan."),
        (["train.save=ture"], "Try train.save=true."),
        (["train.save=-1"], "received -1. Try train.save=true."),
        (["data=synthetic", "data.build.input_shape=[8]"], "Try data.build.shape=[8]."),
        (["data=synthetic", "+data.build.input_shape=[8]"], "Try data.build.shape."),
        (["hardware=2x0gpu"], "or a layout such as 3gpu or 2x8gpu, received"),
        # Sweeps that make no sense, and those of nothing.
        (["-m", "sweep.name=''"], "received nothing. Try sweep.name=mine."),
        (["-m", "sweep.name=a,b"], "Expected one value of sweep.name for a whole sweep, received sweep.name=a,b."),
        (["sweep.name=x"], "Try python -m pipeline -m sweep.name=x."),
        (["-m", "experiment=scalings"], "Expected experiment to be one of batch, precision, scaling, strategies"),
        (["-m", "train.seed=range(3,1)"], "-m train.seed="),
        (["-m", "train.seed=range(1,3,0)"], "received train.seed=range(1,3,0), which gives none"),
        (["--config-dir"], "argument --config-dir/-cd: expected one argument"),
        (["--run", "-m"], "received several"),
        (["-m", "workers=1,two"], "Expected workers"),
        (["-m", "workers=interval(1,2)"], "received workers=interval"),
        (["-m", "+hydra.sweeper.params.wokers='1,2'"], "workers=1"),
        (["-m", "hydra.sweep.subdir=mine", "workers=1,2"], "a folder of its own, received mine. Try without it."),
        # Places.
        (["tracking=server", "tracking.uri=localhost:5000"], "tracking.uri=http://127.0.0.1:5000, or tracking=sqlite"),
        ([*TWO, "cluster.host=192.0.2.1"], "Expected to be able to listen on 192.0.2.1"),
        (["output_dir=/proc/x"], "Expected to be able to write /proc/x"),
        (["--config-dir=/nowhere"], "Expected --config-dir"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_message_and_nothing_is_started(asked, arguments, words):
    assert words in refusal(asked(*arguments))


@pytest.mark.parametrize("arguments", [
    ["allowed_targets=[imports]", "model.build._target_=imports.shell", "+model.build.command=touch imported"],
    ["allowed_targets=[own]", "model.build._target_=imports.model"],
    ["+hydra.callbacks.mine._target_=imports.model"],
    ["hydra/job_logging=default", "+hydra.job_logging.handlers.mine={class: imports.model}"],
], ids=" ".join)  # fmt: skip
def test_a_function_that_no_config_may_call_is_refused_before_its_module_is_imported(asked, tmp_path, arguments):
    (tmp_path / "imports.py").write_text(
        "from pathlib import Path\nfrom os import system as shell\nPath('imported').touch()\ndef model(): ...\n"
    )
    refusal(asked(*arguments, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"))
    assert not (tmp_path / "imported").exists()


def test_an_address_with_a_password_is_refused_before_anything_is_written(asked, tmp_path):
    message = refusal(asked("tracking=server", "tracking.uri=http://ann:s3cret@127.0.0.1:5000"))
    assert "Expected tracking.uri without a user and password" in message
    assert "s3cret" not in message + "".join(each.read_text() for each in tmp_path.rglob("*") if each.is_file())


def test_a_port_that_is_taken_is_refused(asked):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refusal(asked(*TWO, f"cluster.base_port={port}"))
    assert f"Expected to be able to listen on 127.0.0.1:{port}, received: Address already in use, by " in message
    assert f"({os.getpid()}). Try cluster.base_port=null" in message


GOOD = "# @package _global_\ndefaults: [override /model: mlp]\nworkers: 3\ntrain: {steps: 7}\n"
FIRST_LINE = "begin with the line `# @package _global_`"
JOBLIB = "_target_: hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher\n"


def choice(tmp_path: Path, name: str, text: str | bytes = "") -> Path:
    """A file of ones own, of what is there to choose."""
    path: Path = tmp_path / f"mine/{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(("typed", "text", "words"), [
    ("model=a", "name: a\nbuild: {_target_: own.tiny\nx: 3\n", "a.yaml, received in line 3"),
    ("model=a", "name: a\n\tbuild: 3\n", "a.yaml, received in line 2: found character '\\t'"),
    ("model=a", "name: a\nname: b\n", "a.yaml, received in line 2: found duplicate key name."),
    ("model=a", b"\xff\xfe\x00", "Expected YAML files in UTF-8"),
    ("model=a", "- 1\n- 2\n", "model to be keys with values (name, build), received something else in model/a."),
    ("model=a", "", "Expected a choice of model that has a name, received none."),
    ("model=a", "name: a\nwidth: 3\nbuild: {_target_: own.tiny}\n", "Expected a key of model (name, build), received"),
    ("model=a", "name: a\nbuild: own.tiny\n", "Expected model.build to be keys with values, received own.tiny."),
    ("model=a", "name: a\n", "Expected model.build._target_ to name a function, received none."),
    # A launcher that is installed is refused as one that is not.
    ("hydra/launcher=joblib", JOBLIB, "spoil each other's timing, received joblib. Try without it."),
    ("experiment=short", GOOD.replace("steps", "step"), "received train.step. Try train.steps."),
    ("+experiment=short", GOOD, "Try experiment=... without the +."),
    ("experiment=short", GOOD.partition("\n")[2], FIRST_LINE),
    ("experiment=short", "workers: 3\n", FIRST_LINE),
])  # fmt: skip
def test_a_fault_in_yaml_of_ones_own_is_refused_with_its_place(asked, tmp_path, typed, text, words):
    choice(tmp_path, typed.lstrip("+").replace("=", "/"), text)
    assert words in refusal(asked("--config-dir=mine", typed, *(("-m", "workers=1,2") if text == JOBLIB else ())))
    shown: Ran = asked("--config-dir=mine", "--help", typed)
    assert "Traceback" not in shown.err
    assert shown.code in (0, 2)


def test_a_choice_of_ones_own_counts_before_one_of_the_same_name(asked, tmp_path):
    mlp = choice(tmp_path, "model/mlp", "build: {_target_: pipeline.models.mlp, hidden: [4]}\n")
    root = tmp_path / "mine/config.yaml"
    typed = ("--config-dir=mine", "--cfg", "job", "--package", "model.build.hidden", "model=mlp")
    assert asked(*typed).ok().out.endswith("\n- 4\n")
    # That of another program, whose place a folder of choices may be in.
    root.write_text("database: here\n")
    assert "Try --config-path=mine in place of all choices" in refusal(asked(*typed))
    mlp.rename(tmp_path / "mine/model/small.yaml")
    assert asked(*typed[:-1], "model=small").ok().out.endswith("\n- 4\n")
    root.unlink()
    mlp.write_text("defaults: [mlp]\nbuild: {hidden: [4]}\n")
    assert "received one that leads back to itself" in refusal(asked(*typed))


# A case for each key that holds a value, another kind of mistake for each; and a quarter of those, others in each run.
EACH = [
    (wrong := of_key(name, kind))[place % len(wrong)]
    for place, (name, kind) in enumerate((name, kind) for name, kind in keys() if not is_dataclass(kind))
]
QUARTER, OTHERS = sampled(EACH, len(EACH) // 4), sorted(set(cases()) - set(EACH))
LATER = [*(case for case in EACH if case not in QUARTER), *sampled(OTHERS, len(OTHERS) // 8)]


@pytest.mark.parametrize("tried", [QUARTER, pytest.param(LATER, marks=pytest.mark.slow)], ids=("quarter", "others"))
def test_something_wrong_for_every_key_and_an_eighth_of_all_else_are_refused_in_one_message(asked, tried):
    assert {name for name, _ in keys()} <= {case[0].lstrip("+~").partition("=")[0] for case in cases()}
    assert len(OTHERS) >= 200
    ended = [(case, asked(*case, module="bad_input")) for case in tried]
    assert [f"{' '.join(case)}: {fault(ran)}: {ran.err}" for case, ran in ended if fault(ran)] == []


# What a value of each kind may not be is tried for every key above.
@pytest.mark.parametrize(("overrides", "words"), [
    (["train.epochs={a: 1}"], "a whole number or null, received {a: 1}"),
    (["train.learning_rate=fast"], "train.learning_rate=0.001, or train.learning_rate=null"),
    (["model.build._target_=???"], "received none"),
    (["+train.seed=3"], "train.seed=3"),
    (["model.build.widths=[3]"], "pipeline.models.cnn"),
    (["workers=range(1,3)"], "-m 'workers=range(1,3)' for a run with each"),
    (["cluster.options.a=1"], "+cluster.options.a=1"),
    (["train={seed: a}"], "train.seed=0"),
    (["train.seed=${train.epochs}"], "Expected train.seed"),
    (["hydra.run.dir=[a]"], "Expected hydra.run.dir"),
    (["train.optimizer='${'"], "train.optimizer"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_a_value_of_the_wrong_type_is_named_with_what_it_should_be(overrides, words):
    with pytest.raises(UserError, match=re.escape(words)):
        composed(overrides)


@pytest.mark.parametrize(("overrides", "build", "name"), [
    (["model.build._target_=own.tiny"], {"_target_": "own.tiny"}, "tiny"),
    *((typed, {"_target_": "own.normalised", "bias": True}, "mine") for typed in (
        ["model.build._target_=own.normalised", "+model.build.bias=true", "model.name=mine"],
        ["+model={build: {_target_: own.normalised, bias: true}, name: mine}"],
        ["+model.build={_target_: own.normalised, bias: true}", "model.name=mine"],
    )),
])  # fmt: skip
def test_a_function_that_is_typed_leaves_a_choice_behind_but_for_what_is_typed_with_it(overrides, build, name):
    config = composed([*overrides, "data.build._target_=own.numbered", "data.num_classes=4"])
    assert (config.model.build, config.model.name) == (build, name)
    assert (config.data.build, config.data.name) == ({"_target_": "own.numbered"}, "numbered")
    assert (config.data.num_classes, config.data.input_shape) == (4, None)


def test_every_default_in_the_yaml_is_the_schema_s():
    of_yaml = composed([])
    for name in ("train", "measure", "launch", "mode", "workers", "output_dir", "allowed_targets"):
        assert getattr(of_yaml, name) == getattr(Config(), name)


@pytest.mark.parametrize(("file", "text", "typed", "words"), [
    (None, "", ["hardware=16x1cpu"], ["multi_worker on 16x1cpu: 16 CPU workers", "on 16 hosts"]),
    (None, "", ["-m", "hardware=2x8gpu,3gpu"], ["on 2x8gpu: 16 GPU workers", "multi_worker on 3gpu: 3 GPU workers"]),
    ("hardware/3gpu", "hosts: 3\ndevices_per_host: 1\nkind: gpu\n", ["hardware=3gpu"], ["on 3 hosts"]),
    ("experiment/far", GOOD.replace("model: mlp", "hardware: 4x8gpu"), ["experiment=far", "workers=null"],
     ["multi_worker on 4x8gpu: 32 GPU workers", "7 steps"]),
])  # fmt: skip
def test_a_layout_needs_no_file_but_one_counts_and_an_experiment_sets_it(asked, tmp_path, file, text, typed, words):
    choice(tmp_path, file or "model/unused", text)
    ran: Ran = asked("--config-dir=mine", "mode=plan", "strategy=multi_worker", "model=mlp", *typed).ok()
    assert ran.err == ""
    assert [word for word in words if word not in ran.out] == []


@pytest.mark.parametrize(("arguments", "times"), [
    (["mode=plan"], 1),
    (["hydra.mode=RUN", "--cfg", "job"], 1),
    (["--help"], 1),
    # A sweep as a whole, and each choice that its runs have.
    (["-m", "mode=plan", "workers=1,2"], 2),
    (["experiment=batch", "mode=plan"], 2),
    (["-m", "mode=plan", "model=mlp,cnn", "train.seed=1,2"], 3),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_hydra_composes_a_config_once(tmp_path, monkeypatch, arguments, times):
    load = ConfigLoaderImpl._load_configuration_impl
    monkeypatch.chdir(tmp_path)
    with mock.patch.object(ConfigLoaderImpl, load.__name__, autospec=True, side_effect=load) as loads:
        assert (train.main(arguments), loads.call_count) == (0, times)


@pytest.mark.parametrize("overrides", [
    ["workers=2", "train.seed=7", "hydra.job.name=mine"],
    ["strategy=multi_worker", "hardware=2x8gpu", "model=mlp", "model.build.hidden=[64]", "train.loss=null"],
    ["experiment=batch", "workers=4", "strategy=mirrored"],
    ["model.build._target_=my.model", "+model.build.depth=3", "++model.build.depth=4", "model.name=deep"],
    ["model={name: mine, build: {_target_: my.model}}", "train.metrics=[accuracy]", "data=digits"],
    ["train.callbacks=[]", "output_dir=${now:%Y}", "sweep.name=${model.name}"],
    ["+train.tags={a: 1}", "workers=2"],
    ["workers=many", "model=mlp"],
    ["model=mlpp", "workers=3"],
    ["hydra={verbose: true}"],
], ids=lambda overrides: overrides[0])  # fmt: skip
def test_what_a_sweep_s_runs_share_makes_the_config_that_hydra_composes(tmp_path, monkeypatch, overrides):
    monkeypatch.chdir(tmp_path)
    configs.register(lambda: 2)
    composer = Composer("config", Config, None)
    texts = []
    for of_sweep in (False, True, True):
        try:
            composed = composer._load(overrides, of_sweep=of_sweep)
            texts.append(OmegaConf.to_yaml(composed))
        except UserError as error:
            texts.append(str(error))
    assert texts[1:] == texts[:1] * 2


def test_a_ready_sweep_compares_powers_of_two_and_all_devices():
    configs.register(lambda: 6)
    assert OmegaConf.create({"workers": "${up_to_every_device:}"}).workers == "1,2,4,6"


def test_cfg_job_prints_the_config_as_yaml_and_takes_options_after_overrides_and_version_is_ours(asked):
    assert asked("--version").ok().out.startswith("pipeline ")
    ran: Ran = asked("train.epochs=7", "model=tiny", "--cfg", "job", "--config-dir", CONF[13:], "data=synthetic").ok()
    shown = yaml.safe_load(ran.out)
    assert shown["train"]["epochs"] == 7
    assert shown["model"] == {"name": "tiny", "build": {"_target_": "own.tiny"}}
    assert shown["data"]["name"] == "synthetic"
    assert not list(ran.folder.iterdir())


@pytest.mark.parametrize(("typed", "words"), [
    ("", ["cnn on mnist5k, mirrored on auto", "1 chief", "weak scaling", "each CPU     4.6 MiB"]),
    ("strategy=one_device workers=2 hardware=2cpu",
     ["trains on one device: workers=2 is taken as workers=1.", "one_device on 2cpu: 1 CPU worker", "CPU:0"]),
    ("strategy=multi_worker hardware=2x4gpu",
     ["8 GPU workers", "2 (1 chief, 1 worker) on 2 hosts", "GPU:0-3", "4-7", "refused without"]),
    ("strategy=multi_worker hardware=4gpu hardware.rehearse=true train.global_batch=96",
     ["a rehearsal", "4 (1 chief, 3 workers)", "24 x 4 replicas = 96", "strong scaling"]),
    ("model=recommender data=clicks strategy=parameter_server", ["recommender on clicks", "server "]),
])  # fmt: skip
def test_mode_plan_prints_every_process_and_leaves_nothing(asked, typed, words):
    ran: Ran = asked("mode=plan", *typed.split()).ok()
    assert ran.err == ""
    assert not [word for word in words if word not in ran.out], ran.out
    assert not list(ran.folder.iterdir())


@pytest.mark.parametrize("named", [(), ("sweep.name=mine", "sweep.parallel=2")])
def test_a_sweep_with_mode_plan_prints_each_plan_and_why_a_point_is_left_out_and_leaves_nothing(asked, named):
    ran: Ran = asked("-m", "mode=plan", "strategy=one_device,mirrored", "workers=1,2", "hardware=2cpu", *named).ok()
    assert not list(ran.folder.iterdir())
    assert (ran.out.count("\nprocesses "), ran.err.count("\n")) == (3, 1)
    assert ran.err.startswith("pipeline: Point 1 refused: Expected one point of one_device, which trains on one device")


@pytest.mark.parametrize(("typed", "words"), [
    (("mode=plan", "strategy=mirrored", "hardware=2x1cpu,2x4gpu"), "refused: Expected one host"),
    (("mode=${nothing}", "workers=1,2"), "refused: Expected mode to refer to a value that exists"),
])  # fmt: skip
def test_a_sweep_whose_every_point_is_refused_ends_with_two(asked, typed, words):
    assert asked("-m", *typed).failed(2).err.count(words) == 2


# A sweep over functions, and what the error of each says.
@pytest.mark.parametrize(("typed", "words"), [
    (("data=digits", "model.build._target_=own.raises,os.getcwd,steps.by_keras,string.digits"), (
        "RuntimeError: the moon is not full (", "Expected the model's function to return a keras.Model, received str.",
        "train_step", "received string.digits, which cannot be called.",
    )),
    (("model=mlp", "data.build._target_=sources.raising,os.getpid,os.getresuid,own.empty_data"), (
        f"FileNotFoundError: no shelf 7 in the archive ({SUPPORT}/sources.py:109)",
        "Expected data.build to return (train, validation), received int.",
        "Expected data.build to return (train, validation), received tuple.",
        "Expected training data with examples, received none.",
    )),
    ((CONF, "model=cnn", "data=flat"), (
        "Expected images [height, width, channel] for model=cnn, received examples of shape [16].",
    )),
], ids=["model", "data", "shape"])  # fmt: skip
def test_a_fault_in_a_function_ends_the_run_in_one_message(pipeline, typed, words):
    ran = pipeline("-m", *QUICK, "workers=1", *typed).failed()
    for result, each, line in zip(ran.results, words, ran.err.splitlines(), strict=True):
        assert each in str(result["error"])
        assert line.startswith(f"pipeline: {result['error']} See {ran.folder}")


def test_a_choice_of_one_s_own_is_called_as_its_file_is(pipeline, tmp_path):
    for group, text in (
        ("model", "build: {_target_: own.tiny}"),
        ("data", "build: {_target_: own.numbered}"),
        ("strategy", "build: {_target_: pipeline.strategies.one_device}"),
        ("hardware", "devices_per_host: 2\nkind: cpu"),
    ):
        choice(tmp_path, f"{group}/my_{group}", text)
    chosen = [f"{group}=my_{group}" for group in ("model", "data", "strategy", "hardware")]
    for named, words in ((), "my_model on my_data, my_strategy on"), (("model.name=another",), "another on my_data"):
        assert words in pipeline("--config-dir=mine", "mode=plan", *chosen, "workers=1", *named).ok().out
