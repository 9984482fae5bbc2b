"""Makes the pods of a command's plans in a Kubernetes cluster, follows them, and deletes them at its end.

The driver stays where the command was typed. It dials the agents in the pods through the API server, or they dial
it where `cluster.options.conductor` names an address of it that they reach.
"""

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.config.schema import ClusterConfig
from pipeline.launch import Job, LaunchError, options_of
from pipeline.launch.agents.dialling import DiallingCluster, with_port
from pipeline.launch.agents.messages import Close
from pipeline.launch.kubernetes import jobset
from pipeline.launch.kubernetes.client import GONE, Client, Follower
from pipeline.plan.machine import Machine
from pipeline.plan.plan import LaunchPart, Plan
from pipeline.record.files import forget_agents
from pipeline.record.log import read_json, write_json

# The file in a run's folder that names its pods: a command that is killed leaves them for a while.
FILE = "kubernetes.json"
# How long pods that are to end are waited for, and what was deleted, before others of their names are made.
GONE_SECONDS = 60.0
POLL_SECONDS = 0.3
SAY_SECONDS = 5.0
# Where training may go on with fewer, a pod has so long to come back.
RETURN_SECONDS = 60.0


class KubernetesCluster(DiallingCluster):
    """Pods, as many as a plan needs."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._options = options_of(config, jobset.KubernetesOptions)
        self.dial_seconds = self._options.timeout
        self._name = self._options.name or f"pipeline-{secrets.token_hex(4)}"
        # Those that were made, or are about to be.
        self._pods: jobset.Pods | None = None
        self._client: Client | None = None
        self._follower: Follower | None = None
        # Hosts whose agents are dialled.
        self._dialled_hosts, self._exists = set[str](), False
        # Since when pods are waited for, and the last sentence about that.
        self._since, self._sentence = 0.0, ""

    def listens_at(self) -> str:
        """The address that pods dial; none if this command dials them."""
        return "" if self._options.conductor is None else with_port(self._options.conductor)

    def assumed(self) -> Machine:
        """The machine that a pod is, of which as many are made as are needed."""
        options = self._options
        selected = ", ".join(f"{key}={value}" for key, value in (options.node_selector or {}).items())
        return Machine(
            hostname=f"kubernetes {options.context or ''}".strip(),
            cores=tuple(range(options.cpu)),
            memory_gib=round(jobset.bytes_of(options.memory) / 2**30, 1),
            cpu=f"a node with {selected}" if selected else "any node",
            gpus=(options.gpu_resource,) * options.gpus,
            grows=True,
        )

    def inventory(self) -> Machine:
        """The same, since a plan says how many pods are made; refuses what no pod could be made with."""
        self._connect()
        return self.assumed()

    def addresses(self, plan: Plan) -> Sequence[str]:
        """The names that pods have under their headless Service, with a port for each process."""
        pods, ranks = self._laid_over(plan)
        return pods.addresses(ranks, self._options.port)

    def describe(self, plan: Plan) -> str:
        """The manifests that would be made."""
        dialled = None if self._options.conductor is None else with_port(self._options.conductor, "PORT")
        secret = jobset.secret_of(self._name)
        lines = [f"The Secret {secret}, which holds the run's token, is made beside it and never shown."]
        if self._options.image is None:
            lines.append("A run needs cluster.options.image, which is not set.")
        method, pods = self.config.start_method.value, self._pods_for(plan)
        objects = jobset.manifests(pods, self._options, plan.launch, dialled, method)
        return "".join(f"# {line}\n" for line in lines) + jobset.to_yaml(objects).rstrip()

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        """Starts a plan's processes by the agents of its pods; makes the pods if they are not there."""
        self._since, self._sentence = time.monotonic(), ""
        if not self._taken.get(group):
            needed = self._pods_for(plan)
            enough = self._pods is not None and self._pods.shape.holds(needed.shape)
            # Before they are made: a command that is killed meanwhile leaves them.
            write_json(folder / FILE, self._pods if enough and self._pods else needed)
            if not enough:
                self._make(needed, plan.launch, folder)
        self.return_seconds = RETURN_SECONDS if plan.launch.elastic else self._options.timeout
        part, name_in_pods = plan.checkpoint, partial(self._folder, run=folder)
        checkpoint = replace(part, folder=name_in_pods(part.folder), before=name_in_pods(part.before))
        # On any of a pod's cores, which are a share of time.
        processes = tuple(replace(process, cores=()) for process in plan.processes)
        return super().start(replace(plan, processes=processes, checkpoint=checkpoint), group, folder)

    def returns(self, ends: bool) -> str | None:
        """Once a pod is taken away, whose processes have saved a checkpoint, in another that is made in its place."""
        return None if ends else "Once Kubernetes has made another pod, training goes on there"

    def end_earlier(self, folder: Path) -> None:
        """Deletes the pods that a killed command has left for the run in a folder: they train on."""
        pods, own = read_json(jobset.Pods, folder / FILE), self._pods
        if pods is None or (self._exists and own and (pods.kind, pods.name) == (own.kind, own.name)):
            return
        if self._connect().failure(pods.kind, pods.name) != GONE:
            self._connect().delete(pods.kind, pods.name)
            self._wait_until_gone(pods)
            self.agents.warnings.append(f"The pods of {pods.name}, which an earlier command had left, were deleted.")
        forget_agents(folder)

    def attach(self, folder: Path) -> bool:
        """Takes the place of the driver of the run in a folder, whose pods train on. Raises `LaunchError`."""
        pods = read_json(jobset.Pods, folder / FILE)
        if pods is None or self._connect().failure(pods.kind, pods.name) == GONE:
            return False
        self._name, self._pods, self.count = pods.name, pods, len(pods.hosts)
        return super().attach(folder)

    def found(self, folder: Path) -> None:
        """Follows the pods of the run in a folder, which this command or an earlier one has made."""
        assert self._pods is not None
        self._exists = True
        self._follower = Follower(self._connect(), self._pods, self.agents.warnings.append)
        if self._options.conductor is None:
            for host in {*self._pods.hosts} - self._dialled_hosts:
                self.agents.endpoint.dial(host, partial(self._forward, host))
            self._dialled_hosts |= {*self._pods.hosts}

    def _forward(self, host: str) -> socket.socket:
        state = self._follower.pod(host) if self._follower is not None else None
        if state is None or not state.running:
            raise OSError("its pod does not run yet")
        return self._connect().forward(state.name, jobset.AGENT_PORT)

    def end(self) -> None:
        """Deletes the objects of the run."""
        if self._follower is not None:
            self._follower.close()
        self._follower = None
        if self._client is not None and self._exists and self._pods is not None:
            self._exists = False
            self._client.delete(self._pods.kind, self._pods.name)

    def _connect(self) -> Client:
        """The client. Raises `LaunchError` where pods lack an image, or it cannot be had."""
        if self._options.image is None:
            instead = "cluster.options.image=..., one that holds this program and your own modules"
            raise LaunchError("an image that pods run", "none", instead)
        self._client = self._client or Client(self._options, self.environ)
        return self._client

    def _pods_for(self, plan: Plan) -> jobset.Pods:
        return jobset.Pods(self._options.owner_kind, self._name, jobset.shape_of(plan))

    def _make(self, pods: jobset.Pods, launch: LaunchPart, folder: Path) -> None:
        """Makes pods for the run in a folder; ends those that there are, which are too few."""
        if self._pods is not None:
            for host in self._pods.hosts:
                self.agents.send(host, Close(0))
            self.end()
            self._wait_until_gone(self._pods)
        self._pods, self.count = pods, len(pods.hosts)
        if self.address is None:
            self.address = self._listen(self.listens_at())
        self._begun = True
        dialled = None if self._options.conductor is None else self.address
        method = self.config.start_method.value
        self._connect().create(jobset.manifests(pods, self._options, launch, dialled, method), self.token)
        self.found(folder)

    def _wait_until_gone(self, pods: jobset.Pods) -> None:
        client, until = self._connect(), time.monotonic() + GONE_SECONDS
        while client.failure(pods.kind, pods.name) != GONE or client.pods(pods.name):
            if time.monotonic() > until:
                expected = f"the pods of {pods.name} to end within {GONE_SECONDS:g} s"
                raise LaunchError(expected, "some that have not", "the same command again")
            time.sleep(POLL_SECONDS)

    def _laid_over(self, plan: Plan) -> tuple[jobset.Pods, dict[str, list[int]]]:
        """The pods of a plan and the ranks by host; of existing pods that are enough, those that answer come first."""
        needed, pods = self._pods_for(plan), self._pods
        if pods is None or not pods.shape.holds(needed.shape):
            return needed, needed.ranks(plan)
        hosts, known = pods.training, self.agents.known
        if len(hosts) > len(needed.training):
            hosts.sort(key=lambda host: host in known and known[host].channel.away > self.gone_seconds)
        return pods, pods.ranks(plan, hosts)

    def _where(self, plan: Plan) -> dict[int, str]:
        hosts = {rank: host for host, ranks in self._laid_over(plan)[1].items() for rank in ranks}
        return hosts | {each.rank: each.address.partition(".")[0] for each in plan.processes if each.address}

    def _folder(self, named: str | None, run: Path) -> str | None:
        """The pods' name of a folder of checkpoints that is named as on this machine."""
        options = self._options
        if named is None or "://" in named or (options.claim and Path(named).is_relative_to(options.claim_path)):
            return named
        # Runs of one name, of other people or in other folders, have a folder each.
        about = hashlib.sha256(f"{os.uname().nodename}:{named}".encode()).hexdigest()[:8]
        return f"{options.claim_path if options.claim else '/tmp'}/pipeline/{run.name}-{about}/checkpoints"

    def missing(self, names: Sequence[str]) -> str:
        """The reason for which hosts are still absent. Raises `LaunchError` if they will not come."""
        assert self._follower is not None
        self._follower.check(names, [name for name in names if name not in self.agents.known])
        unreached = {name: self.agents.endpoint.channel(name).problem for name in names}
        if (barred := next((text for text in unreached.values() if text.startswith("Expected")), None)) is not None:
            raise LaunchError(barred)
        words = self._follower.waits_for(names, unreached)
        if words != self._sentence and time.monotonic() > self._since + SAY_SECONDS:
            self._sentence = words
            self.agents.warnings.append(f"Waiting for pods: {words}.")
        expected = f"{len(names)} pods more to answer within {self._options.timeout:g} s"
        return str(LaunchError(expected, words, f"cluster.options.timeout={2 * self._options.timeout:g}"))
