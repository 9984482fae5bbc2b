"""The processes that train cases, on one device and on two. They live for many cases."""

import multiprocessing as mp
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from differing.asked import Answer, Asked, Place
from differing.case import Case

# What a case takes at most, on a machine that others use too; and what the others take once one has failed.
CASE_SECONDS, PEER_SECONDS = 900.0, 10.0
# TensorFlow keeps something of each graph for the process's life.
CASES_OF_A_PROCESS = 40


class Pair:
    """Two replicas under a strategy, `mirrored` or `multi_worker`, and beside them a process with one device."""

    def __init__(self, strategy: str, folder: Path) -> None:
        self._one = _Group((Place("one_device"),), folder)
        places = tuple(Place(strategy, rank) for rank in range(2 if strategy == "multi_worker" else 1))
        self._several = _Group(places, folder)

    def both(self, case: Case) -> tuple[Answer, Answer]:
        """What the training of a case comes to on one device, and on two at the same time."""
        self._one.ask(Asked(case))
        self._several.ask(Asked(case))
        return self._one.answer(), self._several.answer()

    def in_another_order(self, case: Case, seed: int) -> Answer:
        """What one device comes to where the examples of each batch are in another order."""
        self._one.ask(Asked(case, seed))
        return self._one.answer()

    def end(self) -> None:
        """Ends the processes."""
        self._one.end()
        self._several.end()


class _Group:
    """Processes that train a case together, started anew after failures."""

    def __init__(self, places: Sequence[Place], folder: Path) -> None:
        self._places, self._folder = places, folder
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._asked = 0

    def ask(self, asked: Asked) -> None:
        """Has them train a case."""
        if self._asked >= CASES_OF_A_PROCESS:
            self.end()
        if not self._processes:
            self._start()
        self._asked += 1
        for pipe in self._pipes:
            pipe.send(asked)

    def answer(self) -> Answer:
        """What the first of them answers, or the first that failed."""
        waiting, answers = dict(zip(self._pipes, range(len(self._pipes)), strict=True)), dict[int, Answer]()
        until = time.monotonic() + CASE_SECONDS
        while waiting and (left := until - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                answer = Answer(error="A process died.", trace=f"See {self._folder}.")
                with suppress(EOFError, ConnectionResetError):
                    answer = pipe.recv()
                if answer.error:
                    until = min(until, time.monotonic() + PEER_SECONDS)
                answers[waiting.pop(pipe)] = answer
        failed = next((answer for answer in answers.values() if answer.error), None)
        # Of processes that train together, one that failed leaves others in the middle of a step.
        if waiting or (failed and len(self._places) > 1):
            self.end()
        late = Answer(error="Nothing came of it in time.", trace=f"{CASE_SECONDS:g} seconds were over.")
        return failed or (late if waiting else answers[0])

    def end(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes, self._asked = [], [], 0

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["differing.trained"])
        addresses = _addresses(len(self._places))
        for place in self._places:
            ours, theirs = context.Pipe()
            log = str(self._folder / f"{place.strategy}{place.rank}.log")
            process = context.Process(target=_main, args=(theirs, place, addresses, log), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _main(asked: Connection, place: Place, addresses: tuple[str, ...], log: str) -> None:
    # There, and not in the process that asks: it imports TensorFlow.
    from differing import trained

    trained.main(asked, place, addresses, log)


def _addresses(count: int) -> tuple[str, ...]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = tuple(f"127.0.0.1:{one.getsockname()[1]}" for one in held)
    for one in held:
        one.close()
    return found
