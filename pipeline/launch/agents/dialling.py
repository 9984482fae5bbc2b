"""Clusters whose hosts' agents dial this command; each kind says how agents are started."""

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from pipeline.config.schema import ClusterConfig
from pipeline.launch import Cluster, Helpers, Job, LaunchError, Line
from pipeline.launch.agents.channel import new_token
from pipeline.launch.agents.endpoint import Endpoint
from pipeline.launch.agents.messages import Close
from pipeline.launch.agents.remote import DIAL_SECONDS, POLL_SECONDS, SAY_SECONDS, Agents, Known, RemoteJob, Taken
from pipeline.launch.local import LocalCluster
from pipeline.plan.machine import Machine, inventory
from pipeline.plan.plan import DATA_SERVER, Plan
from pipeline.record.files import Kept, forget_agents
from pipeline.record.log import from_here

# For agents of an earlier driver, which dial every second, to find this one, and to end.
ATTACH_SECONDS = 15.0
CONDUCTOR, AGAIN = "another cluster.options.conductor=HOST:PORT", "again once nothing else listens there"


class DiallingCluster(Cluster, ABC):
    """Hosts whose agents dial this command, which starts processes by them. An agent is

        python -m pipeline.launch HOST:PORT --name NAME --order NUMBER [--address ADDRESS] [--token-file FILE]

    where the token comes by standard input if not by a file. NAME is what a user calls the host, and NUMBER its place
    among all, from 0; ADDRESS is where other hosts reach it, its name if it is left out.
    """

    # How many agents will dial, and what a user is told meanwhile.
    count, waiting = 0, "Waiting for hosts."
    # Seconds for agents to dial, None for no limit; for a host that counts as gone to come back, once it is needed;
    # and after how many without a line a host is laid over no more.
    dial_seconds: float | None = DIAL_SECONDS
    return_seconds, gone_seconds = 20.0, 10.0
    # What starts the processes of this command's own place, where it is one of the hosts, and what that is called.
    local: LocalCluster | None = None
    own_name: str | None = None

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str], token: bytes | None = None) -> None:
        self.config, self.environ = config, environ
        # The secret by which agents prove that they are this command's.
        self.token = token or new_token()
        # HOST:PORT that agents dial, once they were begun; empty where they are dialled.
        self.address: str | None = None
        self.say: Callable[[str], None] = lambda text: None
        self._begun = False
        # By group, the jobs of an earlier driver that are gone on with once they are started again.
        self._taken: dict[str, list[int]] = {}
        # An earlier driver's agents that did not answer, which are told to end once they do.
        self._unheard: Agents | None = None
        self._last: Sequence[Known] = ()

    @cached_property
    def agents(self) -> Agents:
        """The driver's end of all channels; what encrypts them takes a moment to import, which a plan does not need."""
        return Agents(self.token)

    @abstractmethod
    def listens_at(self) -> str:
        """HOST:PORT at which agents reach this command, 0 for any port; empty where it dials them."""

    def begin(self, address: str) -> None:
        """Starts agents, which dial HOST:PORT and need `token`, and does not wait for them. Raises `LaunchError`."""

    def check(self, absent: int) -> None:
        """Raises `LaunchError` where so many agents have not dialled yet and it is known that they will not."""

    def missing(self, names: Sequence[str]) -> str:
        """Starts agents that are needed anew where that can be done; says what a user can do about them."""
        received, instead = f"nothing for {DIAL_SECONDS:g} s", "again once it can be reached"
        return str(LaunchError(f"{' and '.join(names)} to answer", received, instead))

    def end(self) -> None:
        """Ends what was begun, once all agents were told to end."""

    def found(self, folder: Path) -> None:
        """Learns what an earlier command had begun, whose agents are met for the run in a folder."""

    def serve(self, say: Callable[[str], None], signalled: Callable[[], int | None]) -> int | None:
        """Returns None: nobody else drives."""
        self.say = say
        return None

    def warm_up(self) -> None:
        """Begins the imports of processes that this command starts itself."""
        if self.local is not None:
            self.local.warm_up()

    def inventory(self) -> Machine:
        """The hosts as they are, but for those that are gone; has their agents started. Raises `LaunchError`."""
        self.gather()
        self._last = self._there() or self._last
        return inventory([agent.host for agent in self._last])

    def gather(self) -> None:
        """Starts agents, unless they were, and waits until all have dialled. Raises `LaunchError`."""
        if not self._begun:
            self._begun = True
            self.address = self._listen(self.listens_at())
            self.begin(self.address)
            self._wait()

    def attach(self, folder: Path) -> bool:
        """Takes the place of the driver of the run in a folder; true if any of its agents has come."""
        if (record := Kept.read(folder)) is None:
            return False
        self.agents.endpoint.close()
        self.token = record.token.encode()
        self.agents = Agents(self.token)
        self._taken = {group: list(map(self.agents.number, numbers)) for group, numbers in record.jobs.items()}
        self._begun = True
        self.address = self._listen(record.address, instead=AGAIN)
        self.found(folder)
        until = time.monotonic() + ATTACH_SECONDS
        while len(self.agents.ordered()) < self.count and time.monotonic() < until:
            self.agents.listen_to((), POLL_SECONDS)
        return bool(self._there())

    def end_earlier(self, folder: Path) -> None:
        """Ends the agents of a killed command, which dial where that listened, and their processes."""
        record = Kept.read(folder)
        if record is None or record.token.encode() == self.token:
            return
        self.say(f"What an earlier command, which was killed, has left of {from_here(folder)} is ended.")
        shared = self.address == record.address
        if shared:
            # One that others are told of in advance, at which this command's own agents dial as well.
            self.agents.endpoint.stop_listening()
        earlier = Agents(record.token.encode())
        earlier.tolerates = True
        self._listen(record.address, earlier.endpoint, AGAIN)
        for name in record.agents:
            earlier.send(name, Close(0))
        until, absent = time.monotonic() + ATTACH_SECONDS, record.agents
        while absent and time.monotonic() < until:
            earlier.listen_to((), POLL_SECONDS)
            channels = [earlier.endpoint.channel(name) for name in absent]
            # Who has heard it hangs up once its processes have ended.
            absent = [each.name for each in channels if each.kept or each.connection is not None]
        forget_agents(folder)
        if shared or not absent:
            earlier.endpoint.close()
        else:
            self._unheard = earlier
        if shared:
            self._listen(record.address)
        if absent:
            self.say(f"{' and '.join(absent)} did not answer: what is left there ends once it does, or by itself.")

    def leave(self) -> None:
        """Leaves the agents and their processes to another driver."""
        self.agents.left = True

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Ports that the hosts' agents hold for the plan's processes."""
        base, where = self.config.base_port, self._where(plan)
        if not self._begun:
            # Nothing is to be started.
            return [f"{where[process.rank]}:{base + process.rank if base else 0}" for process in plan.processes]
        requests: dict[str, list[int]] = {name: [] for name in where.values()}
        for rank, name in where.items():
            requests[name].append(base + rank if base else 0)
        held = {name: iter(addresses) for name, addresses in self.hold(requests).items()}
        return [next(held[where[process.rank]]) for process in plan.processes]

    def hold(self, requests: dict[str, list[int]]) -> dict[str, list[str]]:
        """HOST:PORT of ports that hosts hold, of which 0 is any that is free there. Raises `LaunchError`."""
        held = self.agents.ports(requests).items()
        return {name: [f"{self.agents.known[name].hello.address}:{port}" for port in ports] for name, ports in held}

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        """Starts a plan's processes by the agents, or goes on with those that an earlier driver has started."""
        taken: Taken = None
        if self._taken.get(group):
            number, agents = self._taken[group].pop(0), self.agents.ordered()
            taken = number, {each.channel.name: each.hello.jobs[number] for each in agents if number in each.hello.jobs}
        else:
            # Whatever an earlier driver had besides is over.
            self._taken.clear()
        where = {rank: name for rank, name in self._where(plan).items() if name != self.own_name}
        if self.local is not None and not where:
            # At once, as others may be waited for first.
            return self.local.start(plan, group, folder)
        self.gather()
        job = RemoteJob(self, plan, group, folder, where, taken)
        if taken is None and self.address is not None and self.local is None:
            record = Kept.read(folder) or Kept(self.address, self.token.decode())
            # Where nothing can be written, nobody takes this driver's place.
            with suppress(OSError):
                record.with_job(group, job.number, where.values()).write(folder)
        return job

    def helpers(self) -> Helpers:
        """The hosts whose agents have dialled, whatever they have, and what is wrong with the others."""
        self.agents.tolerates, absent = True, dict[str, str]()
        try:
            self.gather()
        except LaunchError as error:
            absent[self.config.name] = str(error)
        addresses = {agent.channel.name: agent.hello.address for agent in self.agents.ordered()}
        return Helpers({name: Line(partial(self.agents.ask, name)) for name in addresses}, addresses, absent)

    def close(self, code: int) -> None:
        """Tells the agents to end, and ends what was begun."""
        if "agents" in vars(self):
            self.agents.close(code)
        if self._unheard is not None:
            self._unheard.endpoint.close()
        if self._begun and not self.agents.left:
            self.end()
        if self.local is not None:
            self.local.close(code)

    def _listen(self, address: str, endpoint: Endpoint | None = None, instead: str = CONDUCTOR) -> str:
        try:
            return (endpoint or self.agents.endpoint).listen(address) if address else ""
        except OSError as error:
            raise LaunchError(f"to be able to listen at {address}", error.strerror or error, instead) from error

    def _wait(self) -> None:
        began, shown = time.monotonic(), False
        while len(agents := self.agents.ordered()) < self.count:
            waited = time.monotonic() - began
            self.agents.listen_to((), POLL_SECONDS)
            self.check(self.count - len(agents))
            if waited > SAY_SECONDS and not shown:
                shown = True
                self.say(self.waiting)
            if self.dial_seconds is not None and waited > self.dial_seconds:
                raise LaunchError(
                    f"Expected the agents of {self.count} hosts to dial {self.address or ''} "
                    f"within {self.dial_seconds:g} s, received {len(agents)}. Is the way there barred by a firewall? "
                    f"Try cluster.options.conductor=HOST:PORT, an address of this machine that they reach."
                )

    def _there(self) -> list[Known]:
        self.agents.listen_to((), 0.0)
        return [agent for agent in self.agents.ordered() if agent.channel.away < self.gone_seconds]

    def _where(self, plan: Plan) -> dict[int, str]:
        names = plan.hardware.host_names or tuple(agent.channel.name for agent in self.agents.ordered())
        hosts, needed = len(names), 1 + max(each.host for each in plan.processes if each.role != DATA_SERVER)
        if needed > hosts:
            raise LaunchError(
                f"a plan for the {hosts} hosts of the cluster", f"one for {needed}", f"hardware.hosts={hosts}"
            )
        return {process.rank: names[process.host % len(names)] for process in plan.processes}


def with_port(address: str, port: str = "0") -> str:
    """The address as HOST:PORT, with that port if it has none.

    >>> with_port("login1"), with_port("login1:7000")
    ('login1:0', 'login1:7000')
    """
    return address if ":" in address else f"{address}:{port}"


def reached_from(host: str) -> str:
    """The address of this machine from which it reaches a host: the one at which that reaches this one, as a rule."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            # Nothing is sent: the kernel only looks up the way.
            asking.connect((host, 9))
            return str(asking.getsockname()[0])
    except OSError as error:
        expected = f"{host} to be an address or a name that this machine knows"
        raise LaunchError(expected, error.strerror or error, "its address") from error
