"""A link between two hosts that is held to a rate: what is lost to it is called so, and was predicted before."""

import json
import os
import sys
from pathlib import Path

import pytest
from namespaces import made

# Each host has a core of its own, which other work of this machine waits for, where that may be asked for.
PYTHON = """#!/bin/sh
chrt --rr 1 true 2>/dev/null && first="chrt --rr 1"
case "$(ip -brief address)" in
    *{second}/*) exec $first taskset -c {other} {python} "$@" ;;
    *) exec $first taskset -c {one} {python} "$@" ;;
esac
"""
# 4.5 MB of gradients, which two examples take a few milliseconds to compute.
WIDE = (
    "strategy=multi_worker", "model=mlp", "model.build.hidden=[1024,1024]", "data=digits", "train.replica_batch=2",
    "train.optimizer=sgd", "train.steps=6", "train.steps_per_call=1", "train.save=false", "train.check=off",
    "hardware.devices_per_host=1", "hardware.threads_per_device=1", "tracking=none", "measure.repeats=3",
)  # fmt: skip
WITHIN = 0.2


@pytest.mark.slow
@pytest.mark.timed
def test_what_a_slower_link_takes_is_predicted_from_what_the_doctor_measured_and_called_communication(
    pipeline, tmp_path
):
    (tmp_path / "ssh").mkdir()
    cores = sorted(os.sched_getaffinity(0))
    with made(tmp_path / "ssh", 2) as hosts:
        python = tmp_path / "python"
        one, other = cores[0], cores[-1]
        python.write_text(PYTHON.format(second=hosts.addresses[1], one=one, other=other, python=sys.executable))
        python.chmod(0o755)
        on = (*hosts.options(), f"cluster.options.python={python}")
        assert pipeline("doctor", "--only", "link", *on).code in (0, 1)
        pipeline("-m", "workers=1,2", "sweep.name=fast", "measure.steps=20", "measure.baseline=none", *WIDE, *on).ok()
        for rate, gbps, steps in (("1gbit", 1.0, 20), ("100mbit", 0.1, 4)):
            # Nothing is dropped that waits for less than a second, so that the link is slow, and nothing else.
            hosts.limit(2, rate, latency="1s")
            assert pipeline("doctor", "--only", "link", *on).code in (0, 1)
            pipeline("predict", "predict.sweep=fast", "workers=2", *WIDE, *on).ok()
            pipeline("workers=2", "measure.explain=true", f"measure.steps={steps}", *WIDE, *on).ok()
            folder = max((tmp_path / "outputs" / "runs").iterdir(), key=lambda path: path.name)
            result = json.loads((folder / "result.json").read_text())
            link_gbps = json.loads((folder / "plan.json").read_text())["link_gbps"]
            assert 0.7 * gbps < link_gbps < gbps
            (prediction,) = result["predictions"]
            assert abs(prediction["error"]) < WITHIN, (rate, prediction)
            assert result["explained"]["bound"] == "communication", (rate, result["explained"])
            lost = {part["name"]: part["share"] for part in result["explained"]["parts"]}
            assert lost["communication"] > 0.5, (rate, lost)
    assert Path(tmp_path / "outputs" / "links.json").exists()
