"""The verbs of MLflow's store: `sync` uploads what it lacks of runs, `ui` serves its pages at the runs by speedup."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from pipeline.commands.verbs import verb
from pipeline.errors import UserError, refuse
from pipeline.launch import signals
from pipeline.views import terminal as show
from pipeline.views.mlflow import sync_runs, texts
from pipeline.views.mlflow.stores import logged_in, open_client, prepare, sqlite_path, without_password

HOST = "127.0.0.1"
# Until the server answers, which imports MLflow first.
START_SECONDS, STOP_SECONDS = 120.0, 5.0
# Waits until its input, which this process alone holds, ends, and then ends the session that it is given.
GUARD = """read line; kill -s TERM -- -$0
for second in 1 2 3 4 5; do sleep 1; kill -s 0 -- -$0 || exit; done
kill -s KILL -- -$0"""


@verb("[FOLDER ...]", uri="another MLflow store than each run's own")
def sync(*folders: str, output_dir: str = "outputs", uri: str = "") -> int:
    """Uploads to MLflow what it lacks of the runs' event logs; repeating it changes nothing.

    A FOLDER is a run's, or holds some; without one, all runs are uploaded.
    """
    instead = f"uri=http://{HOST}:5000, or uri={sync_runs.local_uri(Path('outputs'))}"
    is_store = not uri or re.match(r"https?://|(sqlite|postgresql|mysql|mssql)(\+\w+)?://", uri)
    elsewhere = next((word for word in folders if not Path(word).is_dir()), None)
    refuse(
        (elsewhere is not None, "a run's folder, or one that holds some", elsewhere, sync.usage),
        (not is_store, "uri to be an MLflow store", without_password(uri), instead),
    )
    if path := sqlite_path(uri):
        uri = f"sqlite:///{path.resolve()}"
    prepare(os.environ)
    uri, say = uri and logged_in(uri, os.environ), partial(show.say, show.console_on(sys.stdout))
    try:
        return int(not sync_runs.sync([*map(Path, folders)], Path(output_dir), uri or None, say))
    except KeyboardInterrupt:
        return 130


@verb(port="port on 127.0.0.1")
def ui(*, port: str = "5000", output_dir: str = "outputs") -> int:
    """Opens MLflow's UI at the runs by speedup, on this machine only."""
    try:
        with signals.interrupt():
            return _serve(_free(port), Path(output_dir).resolve())
    except signals.Interrupted:
        return 0
    except OSError as error:
        where, why = error.filename or output_dir, error.strerror or error
        raise UserError(f"to be able to write {where}", why, "output_dir=..") from error


def _free(port: str) -> int:
    number = int(port) if port.isascii() and port.isdigit() else 0
    refuse((not 1 <= number <= 65535, "a port from 1 to 65535", port, "port=5001"))
    with socket.socket() as listener:
        # A connection that has just ended does not count, nor does it for the server.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, number))
        except OSError as error:
            instead = number + 1 if number < 65535 else 5001
            raise UserError(f"port {number} of {HOST} to be free", error.strerror, f"port={instead}") from error
    return number


def _serve(port: int, output: Path) -> int:
    output.mkdir(parents=True, exist_ok=True)
    store, log, server = output / "mlflow.db", output / "ui.log", f"http://{HOST}:{port}"
    prepare(os.environ)
    if not store.is_file():
        # Under a lock: a run may make it at this very moment.
        open_client(f"sqlite:///{store}", (output / "mlartifacts").as_uri())
    places = ("--backend-store-uri", f"sqlite:///{store}", "--artifacts-destination", str(output / "mlartifacts"))
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1", *places]
    # Its jobs are for other things than runs, and take a process each.
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ, start_new_session=True
        )
    with _ended_with_this(process):
        print(f"MLflow starts on {server}; Ctrl-C ends it.", flush=True)
        _wait(process, server, log)
        address = _address_of(server)
        print(f"Runs by speedup: {address}", flush=True)
        # Where there is a desktop; elsewhere a browser in the terminal would take it over.
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            with suppress(webbrowser.Error, OSError):
                webbrowser.open(address)
        code = process.wait()
        show.say_error(f"MLflow's server has ended with code {code}; see {log}.")
        return 1


def _address_of(server: str) -> str:
    """Where a server shows runs by speedup, of the experiment used last; its first page where there is none."""
    query = {"max_results": 1, "order_by": ["last_update_time DESC"], "filter": f"tags.`{texts.PAGE_TAG}` LIKE '%'"}
    request = urllib.request.Request(
        f"{server}/api/2.0/mlflow/experiments/search", json.dumps(query).encode(), {"Content-Type": "application/json"}
    )
    experiments: list[dict[str, str]] = []
    with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=30) as answer:
        experiments = json.load(answer).get("experiments", [])
    page = f"runs?viewStateShareKey={texts.VIEW}&workflowType={texts.WORKFLOW}"
    return f"{server}/#/experiments/{experiments[0]['experiment_id']}/{page}" if experiments else server


def _wait(process: subprocess.Popen[bytes], server: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError):
            urllib.request.urlopen(f"{server}/health", timeout=2).close()
            return
        time.sleep(0.2)
    last = log.read_text(errors="replace").strip().rpartition("\n")[2].strip().rstrip(".") or "nothing"
    raise UserError("MLflow's server to start", last, f"again once what {log} says is put right")


@contextmanager
def _ended_with_this(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the server at the end, and where this process is killed before it could."""
    command, null = ["/bin/sh", "-c", GUARD, str(process.pid)], subprocess.DEVNULL
    guard = None
    try:
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)
        yield
    finally:
        # With the processes that it started, which are of its session.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        if guard is not None:
            guard.kill()
            guard.communicate()
