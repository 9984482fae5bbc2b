"""Runs commands that train nothing in forks of a process that has imported what they import, most of their time.

The code of `python -m pipeline` runs from its first line to its exit code, in a process of its own with the folder, the
environment, the arguments and the module path of one that was started. What is imported already is not imported again.
"""

import contextlib
import gc
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from warm import running
from warm.running import Forking, path_of_all, run, take_streams


class Asking(Forking):
    """The process of which commands that train nothing are forks."""

    def __init__(self) -> None:
        super().__init__("asking")

    def ask(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str], module: str, timeout: float
    ) -> tuple[int, str, str]:
        """The exit code, stdout and stderr of `python -m module arguments`. Raises `TimeoutError`."""
        asked = {"module": module, "arguments": arguments, "folder": str(folder), "environ": {**environ}}
        self.socket.settimeout(timeout)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            code = self.asked((out.fileno(), err.fileno()), **asked)
            for written in (out, err):
                written.seek(0)
            return code, out.read(), err.read()


def serve(descriptor: int) -> None:
    """Imports what commands do, and runs them, one after the other, until the tests have ended."""
    compose_once()
    become = partial(_run, path=path_of_all())
    running.serve(descriptor, 2, os.fork, become, lambda pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def compose_once() -> None:
    """What the first command of a process pays for: imports, the grammar of overrides, Hydra's search for plugins."""
    gc.disable()
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton

    from pipeline.commands import running as commands  # noqa: F401
    from pipeline.commands import train
    from pipeline.config import config

    # What a command imports once it runs or reports something.
    from pipeline.driver import parallel, predicting, resume, supervisor  # noqa: F401
    from pipeline.views import report  # noqa: F401
    from pipeline.views.terminal import live  # noqa: F401

    config.OverridesParser.create().parse_overrides(["a=1", "+b={c: [1, x.y]}", "~c", "d='e'", "f=g,h"])
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(["--cfg=job"])
    # Each looks anew for the plugins on its own path.
    del Singleton._instances[Plugins]
    # Memory that a fork looks through for garbage is copied for it.
    gc.freeze()
    gc.enable()


def _run(
    module: str, arguments: Sequence[str], folder: str, environ: Mapping[str, str], streams: Sequence[int],
    path: Sequence[str],
) -> NoReturn:  # fmt: skip
    take_streams(streams, 1)
    os.chdir(folder)
    run(module, arguments, environ, path)
