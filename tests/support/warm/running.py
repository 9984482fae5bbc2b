"""Runs `python -m MODULE` in a process that was forked, from its first line to its exit code, as if it were started.

The folder, the environment, the arguments, the module path and the streams are those of a process that was started.
What is imported already is not imported again.
"""

import atexit
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NoReturn


def run(program: str, arguments: Sequence[str], environ: Mapping[str, str], path: Sequence[str]) -> NoReturn:
    """Runs the module or file in the folder that this process is in, and ends with its exit code."""
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = [os.getcwd(), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv[:] = [program, *arguments]
    # Those that Python made when it started know of other files.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = _code(ended)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _end(code)


def _end(code: int) -> NoReturn:
    """Ends as Python does, but for taking apart all that was imported, which takes long."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    os._exit(code)


def _code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1
