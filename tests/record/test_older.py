"""What version 0.1.0 wrote (tests/from_0_1_0, runs as it left them on a machine with two cores) is still read."""

import json
import shutil

import pytest
from conftest import sampled
from plans import config, machine
from run_events import OLD

from pipeline.analyze import comparable, history, step_model
from pipeline.commands.results import settings_of
from pipeline.config.parts import SAYS, leaves
from pipeline.config.schema import Config
from pipeline.driver import resume, run_folders
from pipeline.plan import plan, planning
from pipeline.plan.plan import Plan
from pipeline.record.files import read_sweep
from pipeline.views import report

# As its runs were typed, but for the folder.
TYPED = (
    "workers=2", "data=digits", "model=mlp", "model.build.hidden=[16]", "train.deterministic=true", "train.epochs=4",
    "train.global_batch=32", "train.steps_per_call=1", "checkpoint.every_steps=10", "measure.steps=0",
    "measure.baseline=none", "tracking=none", "tracking.system_metrics_seconds=0", "launch.startup_timeout=120",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_that_0_1_0_left_in_mid_epoch_is_finished(pipeline, tmp_path):
    (strategy,) = sampled(("mirrored", "multi_worker"), 1)
    shutil.copytree(OLD / "runs" / strategy, tmp_path / "outputs" / "runs" / strategy)
    ran = pipeline(f"strategy={strategy}", *TYPED).ok()
    assert (ran.result["status"], ran.result["resumed"]) == ("FINISHED", 1)
    assert [event["step"] for event in ran.events("restored")] == [60]
    pipeline(f"strategy={strategy}", *TYPED, "resume=never", "output_dir=whole").ok()
    (log,) = tmp_path.glob("whole/runs/*/events.jsonl")
    whole = [event for line in log.read_text().splitlines() if (event := json.loads(line))["event"] == "epoch"]
    finished = ran.events("epoch")
    # 0.1.0 wrote the running loss of the epoch under way some steps too late, so that they counted twice.
    for name, epochs in (("val_loss", (0, 1, 2, 3)), ("loss", (0, 2, 3))):
        losses, others = ([run[epoch][name] for epoch in epochs] for run in (finished, whole))
        # Another processor may add up in another order.
        assert losses == pytest.approx(others, rel=1e-4)


def test_its_sweep_is_read_reported_compared_and_predicted_from(tmp_path):
    sweep = tmp_path / "sweeps" / "both"
    shutil.copytree(OLD / "sweeps" / "both", sweep)
    for path in sweep.glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"folder": str(path.parent)}))
    assert [(entry.place, entry.status) for entry in read_sweep(sweep)] == [(place, "FINISHED") for place in range(4)]
    pair = [history.load(run_folders.find(name, tmp_path)) for name in ("1_mirrored", "3_multi_worker")]
    assert comparable.unlike(*pair) == []
    assert all(len(run.repeats) == 2 for run in pair)
    assert ("strategy", ("mirrored", "multi_worker")) in settings_of(pair)
    assert len(report.write(sweep).sweep.points) == 4
    page = (sweep / "report.html").read_text()
    assert all(name in page for name in ("mirrored", "multi_worker"))
    runs = history.finished(tmp_path, "both")
    assert len(runs) == 4
    cases = [step_model.case_of(timed_run.plan, timed_run.parameters) for timed_run in runs]
    assert {(case.workers, case.parameters) for case in cases} == {(1, 9610), (2, 9610)}
    assert {timed_run.plan.strategy.name for timed_run in runs} == {"mirrored", "multi_worker"}


def test_resuming_finds_the_run_it_left(tmp_path):
    shutil.copytree(OLD / "runs", tmp_path / "runs")
    planned = plan.from_json((OLD / "runs" / "mirrored" / "plan.json").read_text())
    earlier = resume.find(config(resume="auto"), planned, tmp_path)
    earlier.release()
    assert (earlier.folder.name, earlier.status, earlier.saved_step) == ("mirrored", "killed", 60)


def test_what_another_machine_has_timed_is_timed_again(tmp_path):
    shutil.copytree(OLD / "sweeps" / "both" / "1_mirrored", tmp_path / "runs" / "one")
    (tmp_path / "runs" / "one" / "result.json").unlink()
    planned = plan.from_json((tmp_path / "runs" / "one" / "plan.json").read_text())
    asked = config(resume="one", resume_changes=["train.epochs"])
    earlier = resume.find(asked, planned, tmp_path)
    earlier.release()
    assert len(earlier.measured(planned, None).point) == 2
    elsewhere = plan.from_json(json.dumps(json.loads(planned.to_json()) | {"machine": "another"}))
    assert earlier.measured(elsewhere, None).point == []


def test_an_earlier_plan_comes_out_as_it_went_in_and_keeps_its_names():
    for path in sorted(OLD.glob("**/plan.json")):
        then = json.loads(path.read_text())
        now = json.loads(plan.from_json(path.read_text()).to_json())
        assert now.pop("version") == plan.VERSION
        assert then.items() <= now.items()
        assert plan.identity(now) == plan.identity(then)
    # What a later version adds is passed over.
    planned = planning.make(config("mirrored", workers=2), machine())
    assert plan.from_values(json.loads(planned.to_json()) | {"version": 99, "flux": 1}) == planned


@pytest.mark.parametrize("kind", [Plan, Config])
def test_each_field_says_what_it_is_part_of(kind):
    assert [name for name, field in leaves(kind).items() if SAYS not in field.metadata] == [], (
        "Say beside its definition what it is part of: part_of(...)"
    )
