"""Nodes of a Slurm cluster, an agent on each: a job of its own, or the allocation that this command was typed in.

Agents find this command by its address, and prove by a token in a file that nobody else can read that they are its own.
A job that is put back into the queue, or whose node is lost, comes back with other agents, maybe on other nodes.
"""

import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL

from pipeline.config.schema import ClusterConfig
from pipeline.launch import Cancelled, Job, LaunchError, options_of, this_machine
from pipeline.launch.agents.dialling import DiallingCluster, reached_from, with_port
from pipeline.launch.agents.messages import Close
from pipeline.launch.agents.remote import POLL_SECONDS, Known
from pipeline.launch.mpi import SLURM, place_of
from pipeline.launch.slurm import queue
from pipeline.launch.slurm.script import SlurmOptions, batch_script, check, clean, srun
from pipeline.plan.checks import stays_here
from pipeline.plan.machine import Host, Machine, inventory
from pipeline.plan.plan import Plan
from pipeline.record.files import forget_agents
from pipeline.record.log import SECRET, read_json, write_json, write_whole

NAME, POINT = "pipeline", "point"
TOKEN, SCRIPT = "token", "job.sh"
# What stands for what is not known before a job is submitted.
ANYWHERE = "HOST:PORT"
# For a job to end by itself, whose agents were told to end; for one that ends by Slurm's will, whatever its KillWait.
END_SECONDS, SETTLE_SECONDS = 6.0, 120.0
# Of a job's log, what a user is shown, and of which kind lines must be none.
LOG_LINES = 3
PREEMPTED = 75


class SlurmCluster(DiallingCluster):
    """The nodes that `cluster.options` asks of Slurm, or that it has given already."""

    dial_seconds = None

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._options = options_of(config, SlurmOptions)
        check(self._options)
        self._inside = queue.allocation_of(environ)
        if self._inside is not None:
            self._options = within(self._options, self._inside)
        self.count = self._options.nodes
        self.waiting = f"Waiting for agents on {self.count} node{'s' * (self.count > 1)} of Slurm."
        self._slurm = queue.Slurm(environ)
        self._job: queue.Followed | None = None
        self._step: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self._folder: Path | None = None
        # Lives of agents whose job Slurm ends, and those that were last laid over.
        self._doomed, self._laid_over = set[str](), set[str]()

    def arrived(self) -> bool:
        """True if there are nodes already; they are asked for once a run needs them."""
        return self.address is not None

    def listens_at(self) -> str:
        """`cluster.options.conductor`, or the address of this machine from which it reaches nodes."""
        if self._options.conductor is not None:
            return with_port(self._options.conductor)
        nodes = list(self._inside.nodes) if self._inside else self._slurm.addresses(self._options.partition)
        if nodes and all(map(stays_here, nodes)):
            return "127.0.0.1:0"
        for node in nodes:
            with suppress(LaunchError):
                return f"{reached_from(node)}:0"
        return f"{reached_from(socket.gethostname())}:0"

    def begin(self, address: str) -> None:
        """Submits the job; inside of an allocation, starts its step."""
        place = place_of(SLURM, self.environ)
        if place is not None and place.size > 1:
            instead = "it without srun, or cluster=mpi, which makes one of them"
            raise LaunchError("one command in an allocation", f"{place.size} of it, started by srun", instead)
        folder = Path(self._options.folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d_%H-%M-%S_"), dir=folder))
        write_whole(self._folder / TOKEN, self.token.decode(), SECRET)
        if self._inside is None:
            (self._folder / SCRIPT).write_text(self._script(address, self._folder))
            self._submit()
            return
        self._log = self._folder / f"slurm-{self._inside.job}.log"
        command = self._srun(address, self._folder)
        if shutil.which(command[0], path=self.environ.get("PATH")) is None:
            expected = f"the command {command[0]} in the allocation of Slurm's job {self._inside.job}"
            raise LaunchError(expected, "none", "it outside of a container")
        with self._log.open("ab") as log:
            # A Ctrl-C at the terminal is this command's to handle.
            self._step = subprocess.Popen(
                command, env=clean(self.environ), stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def found(self, folder: Path) -> None:
        """Follows the job that an earlier command has submitted."""
        if (before := read_json(queue.Earlier, folder / queue.FILE)) is None:
            return
        self._folder = Path(self._options.folder).resolve() / before.name
        self._log = self._folder / f"slurm-{before.job}.log"
        if not before.step:
            self._follow(before.job)

    def attach(self, folder: Path) -> bool:
        """Takes the place of the driver of the run in a folder, laid over the nodes whose agents have come."""
        met = super().attach(folder)
        self._laid_over = {agent.life for agent in self._present()}
        return met

    def check(self, absent: int) -> None:
        """Follows the job. Raises `LaunchError` where it is over, or runs and its agents do not come."""
        if self._job is None:
            if self._step is not None and self._step.poll() not in (None, 0):
                received = f"one that has ended with {self._step.returncode}{self._tail()}"
                instead = f"other cluster.options, and see {self._log}"
                raise LaunchError("srun to start agents in the allocation", received, instead)
            return
        state = self._job.look()
        # The script of a job that has run for long starts lost agents anew.
        away = [agent.channel.away for agent in self.agents.known.values() if agent.channel.away]
        waited = min([time.monotonic() - self._job.since, *away])
        if state.name in (queue.CANCELLED, "GONE"):
            raise _cancelled(self._job.job)
        if state.name in queue.AGAIN and self._options.requeue:
            self._submit()
        elif state.name in queue.OVER:
            expected = f"agents on the nodes of Slurm's job {self._job.job}"
            instead = f"other cluster.options.setup or modules, see {self._log}"
            raise LaunchError(expected, f"one that has ended as {state.name}{self._tail()}", instead)
        elif state.name == queue.RUNNING and waited > self._options.timeout:
            raise LaunchError(
                f"Expected the agents on {self.count} nodes to dial {self.address or ''}, "
                f"received nothing from {absent} of them for {self._options.timeout:g} s{self._tail()}. Is the way "
                f"there barred by a firewall? Try cluster.options.conductor=HOST:PORT, an address that nodes reach, "
                f"and see {self._log}."
            )

    def missing(self, names: Sequence[str]) -> str:
        """Looks at the job: Slurm starts agents anew, by the script's loop or by another start of the job."""
        self.check(len(names))
        return super().missing(names)

    def inventory(self) -> Machine:
        """The nodes as they are. Waits for all of them, also for those that come back."""
        self.gather()
        self._wait()
        present = self._present()
        self._laid_over = {agent.life for agent in present}
        return inventory([agent.host for agent in present])

    def moved(self) -> bool:
        """True if there are other agents than were laid over, maybe on other nodes, or none yet."""
        return self.address is not None and {agent.life for agent in self._present()} != self._laid_over

    def returns(self, ends: bool) -> str | None:
        """Makes Slurm start the job again, once it has asked for its nodes. Raises `Cancelled`."""
        if (inside := self._inside) is not None and self._job is None:
            # The job of a script whose allocation Slurm takes away goes back into the queue.
            state = self._slurm.look(inside.job) or queue.JobState(queue.RUNNING)
            if state.name == queue.COMPLETING and state.restarts == inside.restarts and state.left not in queue.UP:
                raise _cancelled(inside.job)
            again = inside.batch and state.name == queue.RUNNING and self._options.requeue
            if again and self._slurm.requeue(inside.job):
                self.say(f"Slurm's job {inside.job} is in the queue again: the same script goes on there.")
        if self._job is None or ends:
            return None
        job, state = self._job.job, self._job.look(now=True)
        before = state.restarts
        requeued = state.name == queue.RUNNING and self._options.requeue and self._slurm.requeue(job)
        self._doomed |= {agent.life for agent in self.agents.known.values()}
        if state.name != queue.RUNNING or requeued:
            # It ends sooner where nothing of it is left.
            for name in self.agents.known:
                self.agents.send(name, Close(PREEMPTED))
            state = self._job.settled(SETTLE_SECONDS)
        if state.name in (queue.CANCELLED, "GONE"):
            raise _cancelled(job)
        if not self._options.requeue:
            return None
        if state.name in queue.OVER or (state.name == queue.RUNNING and state.restarts == before):
            self._slurm.cancel(job)
            self._submit()
            return f"Slurm's job {job} has ended as {state.name}; job {self._job.job} goes on in its place"
        return f"Slurm's job {job} is in the queue again"

    def end(self) -> None:
        """Ends the job, where it has not ended with its agents; removes the token."""
        if self._folder is not None:
            (self._folder / TOKEN).unlink(missing_ok=True)
        # Looked at anew: it may run by now, though it was waiting when its agents came.
        if self._job is not None and self._job.settled(END_SECONDS).name not in queue.OVER:
            self._slurm.cancel(self._job.job)
        if self._step is not None:
            try:
                self._step.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._step.terminate()
                self._step.wait()

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        """Starts a plan's processes by the agents."""
        if group == POINT and not self._taken.get(POINT):
            write_json(folder / queue.FILE, self._mine())
        return super().start(plan, group, folder)

    def end_earlier(self, folder: Path) -> None:
        """Ends the job of a command that was killed, and with it the agents and processes that it had there."""
        before = read_json(queue.Earlier, folder / queue.FILE)
        if before is not None and before != self._mine():
            before.end(self._slurm, self.say)
            forget_agents(folder)

    def describe(self, plan: Plan) -> str:
        """The script that is submitted, or, inside of an allocation, the `srun` that is typed."""
        folder = Path(self._options.folder).resolve() / "TIME"
        if self._inside is None:
            return f"Submitted with sbatch:\n\n{self._script(ANYWHERE, folder)}"
        return f"In the allocation of job {self._inside.job}:\n\n{shlex.join(self._srun(ANYWHERE, folder))}"

    def assumed(self) -> Machine:
        """The nodes as they are asked for; of memory, of which nothing is asked, with as much as there is here."""
        options, own = self._options, this_machine.detect(self.environ)
        cores = tuple(range(options.tasks_per_node * options.cpus_per_task))
        gpus = ("GPU",) * (options.tasks_per_node * options.gpus_per_task)
        names = self._inside.nodes if self._inside else [f"node{number}" for number in range(self.count)]
        return inventory([Host(name, cores, own.memory_gib, "any processor", gpus) for name in names])

    def _mine(self) -> queue.Earlier:
        assert self._folder is not None
        job = self._job.job if self._job else self._inside.job if self._inside else ""
        return queue.Earlier(job, self._folder.name, step=self._job is None)

    def _wait(self) -> None:
        if self._job is None and len(self._present()) < self.count:
            self.say(self.waiting)
        while (absent := self.count - len(self._present())) > 0:
            self.agents.listen_to((), POLL_SECONDS)
            self.check(absent)

    def _present(self) -> list[Known]:
        self.agents.listen_to((), 0.0)
        agents = [agent for agent in self.agents.ordered() if agent.life not in self._doomed and not agent.channel.away]
        return agents[: self.count]

    def _submit(self) -> None:
        assert self._folder is not None
        job = self._slurm.submit(self._folder / SCRIPT)
        self._log = self._folder / f"slurm-{job}.log"
        self._follow(job)

    def _follow(self, job: str) -> None:
        # What it says is shown by the point that has the job then.
        self._job = queue.Followed(self._slurm, job, lambda text: self.say(text))
        self._job.look(now=True)

    def _script(self, address: str, folder: Path) -> str:
        return batch_script(self._options, self._agent(address, folder), folder, NAME)

    def _srun(self, address: str, folder: Path) -> list[str]:
        program, *rest = srun(self._options, self._agent(address, folder), folder)
        # This command may be a step itself, which has all that the job has.
        return [program, "--overlap", *rest]

    def _agent(self, address: str, folder: Path) -> list[str]:
        python = self._options.python or ("python3" if self._options.container else sys.executable)
        arguments = ["--token-file", str(folder / TOKEN), "--start-method", self.config.start_method.value]
        agent = shlex.join([python, "-m", "pipeline.launch", address, *arguments])
        return ["sh", "-c", f'exec {agent} --name "$SLURMD_NODENAME" --order "$SLURM_PROCID"']

    def _tail(self) -> str:
        if self._log is None or not self._log.exists():
            return ""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f": {' '.join(lines[-LOG_LINES:]).rstrip('.')}" if lines else ""


def within(options: SlurmOptions, inside: queue.Allocation) -> SlurmOptions:
    """The options of what an allocation has, whatever is asked for besides."""
    nodes = len(inside.nodes)
    return replace(options, nodes=nodes, tasks=nodes, cpus_per_task=inside.cores, gpus_per_task=inside.gpus)


def _cancelled(job: str) -> Cancelled:
    return Cancelled(f"Slurm's job {job} was cancelled (scancel).")
