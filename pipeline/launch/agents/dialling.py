"""What all clusters have in common whose hosts' agents dial this command: a kind says how agents are started there."""

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.schema import ClusterConfig
from pipeline.launch import machine
from pipeline.launch.agents.conductor import POLL_SECONDS, AgentLine, Agents, Known
from pipeline.launch.agents.messages import Close
from pipeline.launch.agents.remote import RemoteJob, Taken
from pipeline.launch.asking import Helpers
from pipeline.launch.errors import LaunchError
from pipeline.launch.line.handshake import new_token
from pipeline.launch.steady import Steady
from pipeline.plan.machine import Host, Machine, inventory
from pipeline.plan.plan import DATA_SERVER, Plan
from pipeline.record.kept import Kept, forget
from pipeline.record.log import SECRET, from_here, write_whole

# For how long agents may take to dial, and a host that counts as gone to come back once it is needed again.
DIAL_SECONDS, RETURN_SECONDS = 60.0, 20.0
# For how long agents of an earlier conductor, which dial every second, may take to find this one, and to end.
ATTACH_SECONDS = 15.0
SAY_SECONDS = 3.0


@dataclass(frozen=True)
class Contact:
    """What an agent needs to dial: HOST:PORT, and the token, which is never to be on a command line or in a log."""

    address: str
    token: bytes

    def write(self, path: Path) -> Path:
        """Puts the token into a file that nobody else can read, for `python -m pipeline.launch --token-file`."""
        write_whole(path, self.token.decode(), SECRET)
        return path


class DiallingCluster(Steady, ABC):
    """Hosts whose agents dial this command, which starts processes by them.

    A kind says how many hosts there are (`count`), how agents are started there (`begin`), whether that has failed
    (`check`), what is to be ended of it (`end`), what it would do in words or scripts (`describe`), and what the hosts
    have while nobody asks them (`assumed`). An agent is

        python -m pipeline.launch HOST:PORT --name NAME --order NUMBER [--address ADDRESS] [--token-file FILE]

    where the token comes by standard input if not by a file. NAME is what a person calls the host, and NUMBER its place
    among all, from 0; ADDRESS is where other hosts reach it, its name if it is left out.
    """

    # Seconds for agents to dial, None for no limit; and after how many without a line a host is laid over no more.
    dial_seconds: float | None = DIAL_SECONDS
    gone_seconds = 10.0

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        self.config, self.environ = config, environ
        self.agents = Agents(new_token())
        self.contact: Contact | None = None
        self.say: Callable[[str], None] = lambda text: None
        self._begun = False
        # By group, the jobs of an earlier conductor that are gone on with once they are started again.
        self._taken: dict[str, list[int]] = {}
        # An earlier conductor's agents that did not answer, which are told to end once they do.
        self._unheard: Agents | None = None
        self._last: Sequence[Known] = ()

    # What a kind says.

    @property
    @abstractmethod
    def count(self) -> int:
        """How many agents are to dial."""

    @abstractmethod
    def listens_at(self) -> str:
        """HOST:PORT at which agents reach this command; port 0 is any. On loopback unless others must reach it."""

    @abstractmethod
    def begin(self, contact: Contact) -> None:
        """Has the agents started, and does not wait for them. Raises `LaunchError`."""

    @abstractmethod
    def describe(self, plan: Plan) -> str:
        """In full, what would be typed or submitted for a plan; contacts nobody."""

    def check(self, absent: int) -> None:
        """Raises `LaunchError` where so many agents have not dialled yet and it is known that they will not."""

    def begin_again(self, names: Sequence[str]) -> None:
        """Has agents started anew on hosts that were lost, where that can be done."""

    def waiting(self) -> str:
        """What is waited for while agents have not dialled."""
        return f"Waiting for {self.count} hosts."

    def end(self) -> None:
        """Ends what was begun, once all agents were told to end."""

    def found(self, folder: Path) -> None:
        """Learns what an earlier command had begun, whose agents are met for the run in a folder."""

    def met_at(self, kept: Kept) -> str:
        """HOST:PORT at which an earlier command's agents reach this one."""
        return kept.address

    def assumed(self) -> Machine:
        """What the hosts are taken to have while nobody asks them: what this machine has."""
        here = machine.detect(self.environ)
        return inventory([Host(f"host {number}", here.cores, here.memory_gib, here.cpu, here.gpus, here.tpus)
                          for number in range(self.count)])  # fmt: skip

    # The rest is a `pipeline.launch.Cluster`.

    def serve(self, say: Callable[[str], None], asked: Callable[[], str | None]) -> int | None:
        """None: nobody else conducts."""
        self.say = say
        return None

    def warm_up(self) -> None:
        """Nothing: agents begin to import as soon as they are there."""

    def inventory(self) -> Machine:
        """The hosts as they are, but for those that are gone; has their agents started. Raises `LaunchError`."""
        self.gather()
        self._last = self._there() or self._last
        return inventory([known.host for known in self._last])

    def gather(self) -> None:
        """Has agents started, unless they were, and waits until all have dialled. Raises `LaunchError`."""
        if not self._begun:
            self._begun = True
            self.contact = Contact(self._listen(self.listens_at()), self.agents.hub.token)
            self.begin(self.contact)
            self._wait()

    def attach(self, folder: Path) -> bool:
        """Takes the place of the conductor of the run in a folder: has any of its agents come? Raises `LaunchError`."""
        kept = Kept.read(folder)
        if kept is None:
            return False
        self.agents.hub.close()
        self.agents = Agents(kept.token.encode())
        self._taken = {group: list(numbers) for group, numbers in kept.jobs.items()}
        for number in (number for numbers in kept.jobs.values() for number in numbers):
            self.agents.take_over(number)
        self._begun = True
        self.contact = Contact(self._listen(self.met_at(kept)), self.agents.hub.token)
        self.found(folder)
        until = time.monotonic() + ATTACH_SECONDS
        while len(self.agents.ordered()) < self.count and time.monotonic() < until:
            self.agents.listen_to((), POLL_SECONDS)
        return bool(self._there())

    def end_earlier(self, folder: Path) -> None:
        """Ends the agents that a command which was killed has left, and with them its processes.

        They dial where that listened, and hear here that they are to end. Raises `LaunchError`.
        """
        kept = Kept.read(folder)
        if kept is None or kept.token.encode() == self.agents.hub.token:
            return
        self.say(f"What an earlier command, which was killed, has left of {from_here(folder)} is ended.")
        mine = self.contact is not None and self.contact.address == kept.address
        if mine:
            # One that others are told of in advance, at which this command's own agents dial as well.
            self.agents.hub.stop_listening()
        earlier = Agents(kept.token.encode())
        earlier.tolerates = True
        absent = self._end_all(earlier, kept)
        forget(folder)
        if mine or not absent:
            earlier.hub.close()
        else:
            self._unheard = earlier
        if mine:
            self._listen(kept.address)
        if absent:
            self.say(f"{' and '.join(absent)} did not answer: what is left there ends once it does, or by itself.")

    def _end_all(self, earlier: Agents, kept: Kept) -> list[str]:
        """Tells an earlier conductor's agents to end, waits until they have, and gives the names of who did not."""
        self._listen(kept.address, earlier)
        for name in kept.agents:
            earlier.say(name, Close(0))
        until, absent = time.monotonic() + ATTACH_SECONDS, kept.agents
        while absent and time.monotonic() < until:
            earlier.listen_to((), POLL_SECONDS)
            links = [earlier.hub.link(name) for name in absent]
            # Who has heard it hangs up once its processes have ended.
            absent = [link.name for link in links if link.kept or link.connection is not None]
        return absent

    def leave(self) -> None:
        """Leaves the agents and their processes to another conductor."""
        self.agents.left = True

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Ports that the hosts' agents hold for the plan's processes."""
        base, where = self.config.base_port, self._where(plan)
        if not self._begun:
            # Nothing is to be started.
            return [f"{where[process.rank]}:{base + process.rank if base else 0}" for process in plan.processes]
        wanted: dict[str, list[int]] = {name: [] for name in where.values()}
        for rank, name in where.items():
            wanted[name].append(0 if base is None else base + rank)
        found = {name: iter(ports) for name, ports in self.agents.ports(wanted).items()}
        hosts = {name: self.agents.known[name].hello.address for name in wanted}
        return [f"{hosts[where[process.rank]]}:{next(found[where[process.rank]])}" for process in plan.processes]

    def start(self, plan: Plan, group: str, folder: Path) -> RemoteJob:
        """Has the agents start a plan's processes, or goes on with those that they have of an earlier conductor's."""
        return self._start(plan, group, folder, self.dial_seconds or DIAL_SECONDS, RETURN_SECONDS)

    def _start(self, plan: Plan, group: str, folder: Path, timeout: float, returns: float) -> RemoteJob:
        """The same, of agents that have so long to dial, and to come back."""
        taken = self._take_over(group)
        if taken is None:
            # Whatever an earlier conductor had besides is over.
            self._taken.clear()
        job = RemoteJob(
            self.agents,
            plan,
            group,
            folder,
            self._where(plan),
            missing=self._missing,
            timeout=timeout,
            returns=returns,
            taken=taken,
        )
        if taken is None and self.contact is not None:
            kept = Kept.read(folder) or Kept(self.contact.address, self.contact.token.decode())
            # Where nothing can be written, nobody takes this conductor's place.
            with suppress(OSError):
                kept.with_job(group, job.number, job.hosts).write(folder)
        return job

    def helpers(self) -> Helpers:
        """The hosts whose agents have dialled, whatever they have; what is wrong with the others, by their names."""
        self.agents.tolerates = True
        absent: dict[str, str] = {}
        try:
            self.gather()
        except LaunchError as error:
            absent[f"{self.config.name}"] = str(error)
        there = self.agents.ordered()
        return Helpers(
            {known.link.name: AgentLine(self.agents, known.link.name) for known in there},
            {known.link.name: known.hello.address for known in there},
            absent,
        )

    def close(self, code: int) -> None:
        """Tells the agents to end, and ends what was begun."""
        self.agents.close(code)
        if self._unheard is not None:
            self._unheard.hub.close()
        if self._begun and not self.agents.left:
            self.end()

    def _take_over(self, group: str) -> Taken | None:
        """The next job of a group that an earlier conductor had started, as its agents have it."""
        if not self._taken.get(group):
            return None
        number = self._taken[group].pop(0)
        jobs = [(known, held) for known in self.agents.ordered() for held in known.hello.jobs if held.job == number]
        return Taken(number, {known.link.name: held for known, held in jobs})

    def _listen(self, address: str, agents: Agents | None = None) -> str:
        try:
            return (agents or self.agents).hub.listen(address)
        except OSError as error:
            raise LaunchError(
                f"Expected to be able to listen at {address}, received: {error.strerror or error}. "
                f"Try another cluster.options.conductor=HOST:PORT."
            ) from error

    def _wait(self) -> None:
        began, said = time.monotonic(), False
        while len(there := self.agents.ordered()) < self.count:
            waited = time.monotonic() - began
            self.agents.listen_to((), POLL_SECONDS)
            self.check(self.count - len(there))
            if waited > SAY_SECONDS and not said:
                said = True
                self.say(self.waiting())
            if self.dial_seconds is not None and waited > self.dial_seconds:
                raise LaunchError(
                    f"Expected the agents of {self.count} hosts to dial {self.contact.address if self.contact else ''} "
                    f"within {self.dial_seconds:g} s, received {len(there)}. Is the way there barred by a firewall? "
                    f"Try cluster.options.conductor=HOST:PORT, an address of this machine that they reach."
                )

    def _there(self) -> list[Known]:
        """The agents of hosts that do not count as gone."""
        self.agents.listen_to((), 0.0)
        return [known for known in self.agents.ordered() if known.link.away < self.gone_seconds]

    def _where(self, plan: Plan) -> dict[int, str]:
        """The name of the host of each process."""
        names = plan.hardware.host_names or tuple(known.link.name for known in self.agents.ordered())
        training = [process.host for process in plan.processes if process.role != DATA_SERVER]
        if max(training) >= len(names):
            raise LaunchError(
                f"a plan for the {len(names)} hosts of the cluster",
                f"one for {max(training) + 1}",
                f"hardware.hosts={len(names)}",
            )
        return {process.rank: names[process.host % len(names)] for process in plan.processes}

    def _missing(self, names: Sequence[str]) -> str:
        self.begin_again(names)
        return (
            f"Expected {' and '.join(names)} to answer, received nothing for {DIAL_SECONDS:g} s. "
            f"Try again once it can be reached."
        )


def reached_from(host: str) -> str:
    """The address of this machine from which it reaches a host: the one at which that reaches this one, as a rule."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            # Nothing is sent: the kernel only looks up the way.
            asking.connect((host, 9))
            return str(asking.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"Expected {host} to be an address or a name that this machine knows, received: {error.strerror or error}. "
            f"Try its address."
        ) from error
