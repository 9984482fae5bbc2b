"""Pods of a Kubernetes cluster: made for a command's plans, followed, and deleted with it.

The conductor stays where the command was typed. It reaches the agents in the pods through the API server, or they dial
it where `cluster.options.conductor` names an address of it that they reach.
"""

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config.schema import ClusterConfig
from pipeline.launch.agents.dialling import Contact, DiallingCluster
from pipeline.launch.agents.messages import Close
from pipeline.launch.agents.remote import RemoteJob
from pipeline.launch.errors import LaunchError
from pipeline.launch.kubernetes.client import GONE, Client
from pipeline.launch.kubernetes.door import LOOPBACK, Ways
from pipeline.launch.kubernetes.earlier import Earlier
from pipeline.launch.kubernetes.following import Follower
from pipeline.launch.kubernetes.manifest import (
    DOOR_PORT,
    Made,
    Pod,
    Shape,
    Slot,
    addresses_of,
    host_of,
    hosts_of,
    manifests,
    pods_of,
    secret_of,
    shape_of,
    to_yaml,
)
from pipeline.launch.kubernetes.options import JOB, options_of
from pipeline.plan.machine import Machine
from pipeline.plan.plan import LaunchPart, Plan
from pipeline.record.kept import Kept, forget

# For how long pods that were told to end are waited for, and what was deleted, before others of their names are made.
GONE_SECONDS = 60.0
POLL_SECONDS = 0.3
# Before it is said what pods wait for.
SAY_SECONDS = 5.0
# Where training may go on with fewer, a pod has so long to come back.
RETURN_SECONDS = 60.0


class KubernetesCluster(DiallingCluster):
    """Pods, as many as a plan needs."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._options = options_of(config.options)
        self._name = self._options.name or f"pipeline-{secrets.token_hex(4)}"
        self._shape: Shape | None = None
        self._launch: LaunchPart | None = None
        self._client: Client | None = None
        self._follower: Follower | None = None
        self._ways: Ways | None = None
        self._is_made = False
        # Since when pods are waited for, and what was said of that last.
        self._since, self._said = 0.0, ""

    @property
    def count(self) -> int:
        """How many pods there are."""
        return 0 if self._shape is None else self._shape.pods

    def listens_at(self) -> str:
        """Where pods dial; on loopback where they do not."""
        given = self._options.conductor
        return f"{LOOPBACK}:0" if given is None else given if ":" in given else f"{given}:0"

    def assumed(self) -> Machine:
        """What a pod is to have, of which as many are made as are needed."""
        options = self._options
        selected = ", ".join(f"{key}={value}" for key, value in (options.node_selector or {}).items())
        return Machine(
            hostname=f"kubernetes {options.context or ''}".strip(),
            cores=tuple(range(options.cpu)),
            memory_gib=round(options.memory_gib, 1),
            cpu=f"a node with {selected}" if selected else "any node",
            gpus=(options.gpu_resource,) * options.gpus,
            grows=True,
        )

    def inventory(self) -> Machine:
        """The same, since a plan says how many pods are made; refuses what no pod could be made with."""
        self._ask_by()
        return self.assumed()

    def addresses(self, plan: Plan) -> Sequence[str]:
        """The names that pods have under their headless Service, and ports that they have to themselves."""
        return addresses_of(plan, self._pods(plan), self._name, self._options.port)

    def describe(self, plan: Plan) -> str:
        """What would be made."""
        given = self._options.conductor
        dialled = None if given is None else given if ":" in given else f"{given}:PORT"
        lines = [f"The Secret {secret_of(self._name)}, which holds the run's token, is made beside it and never shown."]
        if self._options.image is None:
            lines.append("A run needs cluster.options.image, which is not set.")
        made = Made(self._name, self._options, plan.launch, self.config.start_method.value, dialled)
        comment = "".join(f"# {line}\n" for line in lines)
        return f"{comment}{to_yaml(manifests(shape_of(plan), made)).rstrip()}"

    def start(self, plan: Plan, group: str, folder: Path) -> RemoteJob:
        """Has the agents of a plan's pods start its processes; the pods are made where they are not there."""
        self._since, self._said = time.monotonic(), ""
        if not self._taken.get(group):
            shape = shape_of(plan)
            enough = self._shape is not None and self._shape.holds(shape)
            # Before they are made: who is killed meanwhile leaves them.
            Earlier(self._kind, self._name, self._shape if enough and self._shape else shape).write(folder)
            if not enough:
                self._make(plan)
        returns = RETURN_SECONDS if plan.launch.elastic else self._options.timeout
        return self._start(self._in_pods(plan, folder), group, folder, self._options.timeout, returns)

    def returns(self, ends: bool) -> str | None:
        """Once a pod is taken away, whose processes have saved a checkpoint, in another that is made in its place."""
        return None if ends else "Once Kubernetes has made another pod, training goes on there"

    def end_earlier(self, folder: Path) -> None:
        """Deletes what a command that was killed has made for the run in a folder: its pods train on."""
        earlier = Earlier.read(folder)
        if earlier is None or (self._is_made and (earlier.kind, earlier.name) == (self._kind, self._name)):
            return
        if self._ask_by().failed(earlier.kind, earlier.name) != GONE:
            self._ask_by().delete(earlier.kind, earlier.name)
            self._wait_until_gone(earlier.kind, earlier.name)
            self.agents.warn(f"The pods of {earlier.name}, which an earlier command had left, were deleted.")
        forget(folder)

    def attach(self, folder: Path) -> bool:
        """Takes the place of the conductor of the run in a folder, whose pods train on. Raises `LaunchError`."""
        earlier = Earlier.read(folder)
        if earlier is None or self._ask_by().failed(earlier.kind, earlier.name) == GONE:
            return False
        self._name, self._shape = earlier.name, earlier.shape
        return super().attach(folder)

    def met_at(self, kept: Kept) -> str:
        """Where pods dial; where this command comes to them, any port of its own is as good."""
        return kept.address if self._options.conductor else self.listens_at()

    def found(self, folder: Path) -> None:
        """Follows the pods that an earlier command has made."""
        assert self.contact is not None
        self._follow(self.contact)

    def begin(self, contact: Contact) -> None:
        """Makes what the pods are made of, and follows them."""
        assert self._shape is not None
        assert self._launch is not None
        options, client = self._options, self._ask_by()
        dialled = None if options.conductor is None else contact.address
        made = Made(self._name, options, self._launch, self.config.start_method.value, dialled)
        client.create(manifests(self._shape, made), contact.token)
        self._follow(contact)

    def _follow(self, contact: Contact) -> None:
        """Follows the pods that there are, and keeps a way into each that does not dial."""
        assert self._shape is not None
        self._is_made, client = True, self._ask_by()
        follower = self._follower = Follower(client, self._kind, self._name, self.agents.warn)
        if self._options.conductor is None:

            def forward(host: str) -> socket.socket:
                state = follower.pod(host)
                if state is None or not state.running:
                    raise OSError("its pod does not run yet")
                return client.forward(state.name, DOOR_PORT)

            self._ways = Ways(contact.address, forward)
            for host in hosts_of(self._shape, self._name, self._options.kind):
                self._ways.keep(host)

    def end(self) -> None:
        """Deletes what was made."""
        for made in (self._ways, self._follower):
            if made is not None:
                made.close()
        self._ways = self._follower = None
        if self._client is not None and self._is_made:
            self._is_made = False
            self._client.delete(self._kind, self._name)

    def _ask_by(self) -> Client:
        """The client, where there is what pods need. Raises `LaunchError`."""
        if self._options.image is None:
            raise LaunchError(
                "an image that pods run",
                "none",
                "cluster.options.image=..., one that holds this program and your own modules",
            )
        self._client = self._client or Client(self._options, self.environ)
        return self._client

    @property
    def _kind(self) -> str:
        return "Job" if self._options.kind == JOB else "JobSet"

    def _make(self, plan: Plan) -> None:
        """Makes pods for a plan; those that there are, and are too few, are ended first."""
        if self._shape is not None:
            for host in hosts_of(self._shape, self._name, self._options.kind):
                self.agents.say(host, Close(0))
            self.end()
            self._wait_until_gone(self._kind, self._name)
        self._shape, self._launch = shape_of(plan), plan.launch
        if self.contact is None:
            self.contact = Contact(self._listen(self.listens_at()), self.agents.hub.token)
        self._begun = True
        self.begin(self.contact)

    def _wait_until_gone(self, kind: str, name: str) -> None:
        client, until = self._ask_by(), time.monotonic() + GONE_SECONDS
        while client.failed(kind, name) != GONE or client.pods(name):
            if time.monotonic() > until:
                raise LaunchError(
                    f"the pods of {name} to end within {GONE_SECONDS:g} s",
                    "some that have not",
                    "the same command again",
                )
            time.sleep(POLL_SECONDS)

    def _pods(self, plan: Plan) -> tuple[Pod, ...]:
        """The pods of a plan's processes: of those that there are, where they are enough, rather such that answer."""
        shape = shape_of(plan)
        if self._shape is None or not self._shape.holds(shape):
            return pods_of(plan, shape, self._name, self._options.kind)
        slots = self._shape.training
        if len(slots) > len(shape.training):
            slots = tuple(sorted(slots, key=self._is_gone))
        return pods_of(plan, self._shape, self._name, self._options.kind, slots)

    def _is_gone(self, slot: Slot) -> bool:
        assert self._shape is not None
        host = host_of(self._shape, self._name, self._options.kind, *slot)
        return host in self.agents.known and self.agents.hub.link(host).away > self.gone_seconds

    def _where(self, plan: Plan) -> dict[int, str]:
        """The pod of each process: the one that its address names."""
        where = {rank: pod.host for pod in self._pods(plan) for rank in pod.ranks}
        named = {process.rank: process.address.partition(".")[0] for process in plan.processes if process.address}
        return where | named

    def _in_pods(self, plan: Plan, folder: Path) -> Plan:
        """The plan as processes in pods have it: on any of a pod's cores, which are a share of time, and with folders
        that are there."""
        kept = plan.checkpoint
        moved = replace(kept, folder=self._folder(kept.folder, folder), before=self._folder(kept.before, folder))
        processes = tuple(replace(process, cores=()) for process in plan.processes)
        return replace(plan, processes=processes, checkpoint=moved)

    def _folder(self, named: str | None, run: Path) -> str | None:
        """Where pods have a folder of checkpoints that is named as this machine has it."""
        options = self._options
        if named is None or "://" in named or (options.claim and Path(named).is_relative_to(options.claim_path)):
            return named
        # Of runs of other people, or in other folders, that have one name, each has its own.
        about = hashlib.sha256(f"{os.uname().nodename}:{named}".encode()).hexdigest()[:8]
        top = options.claim_path if options.claim else "/tmp"
        return f"{top}/pipeline/{run.name}-{about}/checkpoints"

    def _missing(self, names: Sequence[str]) -> str:
        """Why hosts that are waited for are not there. Raises `LaunchError` where they will not come."""
        assert self._follower is not None
        never = [name for name in names if name not in self.agents.known]
        self._follower.check(names, never)
        unreached = {} if self._ways is None else self._ways.problems
        if (barred := next((text for text in unreached.values() if text.startswith("Expected")), None)) is not None:
            raise LaunchError(barred)
        words = self._follower.waits_for(names, unreached)
        if words != self._said and time.monotonic() > self._since + SAY_SECONDS:
            self._said = words
            self.agents.warn(f"Waiting for pods: {words}.")
        return (
            f"Expected {len(names)} pods more to answer within {self._options.timeout:g} s, received: {words}. "
            f"Try cluster.options.timeout={2 * self._options.timeout:g}."
        )
