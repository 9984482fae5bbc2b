"""Looks at the pods of a run now and then, and says of them what a person should know."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pipeline.launch.errors import LaunchError
from pipeline.launch.kubernetes.client import Client
from pipeline.launch.kubernetes.pods import PodState

# Between two looks: while pods are waited for, and once all are there.
SOON_SECONDS, LATER_SECONDS = 1.0, 3.0
# For so long after it was asked last, it takes pods to be waited for.
WAITED_SECONDS = 10.0
# Hosts that are named in a sentence.
MOST_NAMED = 3


class Follower:
    """Looks in a thread of its own. `kind` and `name` are of what pods belong to; `tell` hears what became of these."""

    def __init__(self, client: Client, kind: str, name: str, tell: Callable[[str], None] = lambda text: None) -> None:
        self._client, self._kind, self._name, self._tell = client, kind, name, tell
        self._lock, self._over = threading.Lock(), threading.Event()
        self._pods: dict[str, PodState] = {}
        self._failed: str | None = None
        # Pods, by their numbers, whose end was told of.
        self._told = set[str]()
        self._soon_until = time.monotonic() + WAITED_SECONDS
        self._thread = threading.Thread(target=self._look, name="pods", daemon=True)
        self._thread.start()

    def pod(self, host: str) -> PodState | None:
        """How the last pod of a host is; None where there is none yet."""
        with self._lock:
            return self._pods.get(host)

    def check(self, absent: Sequence[str], never: Sequence[str]) -> None:
        """Raises `LaunchError` where absent hosts will not come; of those that `never` were there, an end is one.

        While it is asked, it looks more often.
        """
        self._soon_until = time.monotonic() + WAITED_SECONDS
        with self._lock:
            pods, failed = dict(self._pods), self._failed
        for host in absent:
            state = pods.get(host)
            if state is None:
                continue
            if state.instead is not None and not state.ended:
                raise LaunchError(f"Expected {host} to run, received: {state.words}. Try {state.instead}.")
            if state.ended and host in never and state.words.startswith("ended"):
                raise LaunchError(self._ended(state))
        if failed is not None:
            ended = next((state for state in pods.values() if state.ended and state.words.startswith("ended")), None)
            if ended is not None:
                raise LaunchError(self._ended(ended))
            raise LaunchError(
                f"the {self._kind} {self._name} to go on",
                f"that it will not ({failed.rstrip('.')})",
                "the same command again, which goes on from the last checkpoint",
            )

    def waits_for(self, absent: Sequence[str], unreached: Mapping[str, str] = MappingProxyType({})) -> str:
        """Why hosts are not there yet, in words: those with one reason together.

        `unreached` says of hosts why there is no way to their agents.
        """
        named: dict[str, list[str]] = {}
        for host in absent:
            state = self.pod(host)
            if state is None:
                words = "it has no pod yet"
            else:
                words = state.words or unreached.get(host) or "its agent has not answered yet"
            named.setdefault(words, []).append(host)
        return "; ".join(f"{_some(hosts)}: {words}" for words, hosts in named.items())

    def close(self) -> None:
        """Looks no more."""
        self._over.set()
        self._thread.join()

    def _ended(self, state: PodState) -> str:
        lines = " | ".join(self._client.last_lines(state.name)) or "it has written nothing"
        return (
            f"Expected {state.host} to run an agent, received a pod that {state.words}: {lines.rstrip('.')}. "
            f"Try kubectl logs {state.name}, or another cluster.options.image."
        )

    def _look(self) -> None:
        while not self._over.is_set():
            try:
                pods, failed = self._client.pods(self._name), self._client.failed(self._kind, self._name)
            except LaunchError:
                # It may be there again later, and agents need it only where it is their way here.
                self._over.wait(SOON_SECONDS)
                continue
            with self._lock:
                self._pods, self._failed = {state.host: state for state in pods}, failed
            for state in pods:
                if state.ended and state.words and state.uid not in self._told:
                    self._told.add(state.uid)
                    self._tell(f"{state.host} {state.words}. Kubernetes starts another pod in its place.")
            self._over.wait(SOON_SECONDS if time.monotonic() < self._soon_until else LATER_SECONDS)


def _some(hosts: Sequence[str]) -> str:
    """The names of hosts, of many the first.

    >>> _some(["a", "b"]), _some(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    more = len(hosts) - MOST_NAMED
    return ", ".join(hosts[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
