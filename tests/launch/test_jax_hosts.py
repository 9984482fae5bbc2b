"""`backend=jax` over several hosts: network namespaces that ssh reaches, and nodes of a real Slurm."""

import json
from functools import partial
from importlib.util import find_spec

import numpy as np
import pretend_slurm
import pytest
import run_events
from namespaces import made

pytestmark = [
    pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install jax"),
    pytest.mark.slow,
]

SMALL = (
    "backend=jax", "model=mlp", "data=digits", "train.global_batch=64", "train.steps=50", "measure.steps=0",
    "measure.baseline=none", "tracking=none", "launch.startup_timeout=120",
)  # fmt: skip
TWO = (*SMALL, "strategy=multi_worker", "workers=2", "hardware.devices_per_host=1")


def losses(pipeline, folder, *arguments):
    """The loss of each step, and the hosts that its processes were on."""
    pipeline(*arguments, f"output_dir={folder.name}").ok()
    (run,) = (folder / "runs").iterdir()
    plan = json.loads((run / "plan.json").read_text())
    hosts = {str(process["address"]).rpartition(":")[0] for process in plan["processes"]}
    return [*run_events.losses(run).values()], hosts


def test_two_hosts_and_two_nodes_of_slurm_train_as_one_device_does(pipeline, tmp_path):
    one, _ = losses(pipeline, tmp_path / "one", *SMALL, "strategy=one_device")
    assert len(one) == 50
    (tmp_path / "ssh").mkdir()
    with made(tmp_path / "ssh", 2) as hosts:
        two, on = losses(pipeline, tmp_path / "two", *TWO, *hosts.options())
        assert on == set(hosts.addresses)
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    if why := pretend_slurm.missing():
        pytest.skip(f"no Slurm can be started here: {why}")
    with pretend_slurm.pretend_slurm() as slurm:
        typed = partial(pipeline, **slurm.environ)
        nodes, _ = losses(typed, tmp_path / "nodes", *TWO, "cluster=slurm", "hardware.hosts=2")
    np.testing.assert_allclose(nodes, one, rtol=0, atol=1e-5)
