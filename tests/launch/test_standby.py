"""A fork server that stays for the next command: who gets it, who does not, and how it ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from conftest import ROOT
from under_way import until

from pipeline.errors import UserError
from pipeline.launch import standby

# A command of one process, which says whose child that is; its server imports nothing slow.
COMMAND = """
import multiprocessing as mp, os, sys
from pipeline.launch import standby
standby.PRELOAD = []
def child(sender):
    sender.send((os.getppid(), os.environ.get("OWN"), os.getcwd()))
if __name__ == "__main__":
    server = standby.Standby(standby.seconds_of(sys.argv[1]))
    server.ensure()
    context = mp.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender,))
    process.start()
    print(*receiver.recv())
    process.join()
    assert process.exitcode == 0
    server.close()
"""


@pytest.fixture
def command(tmp_path_factory, monkeypatch):
    """Types a command of one user in one folder, with variables; returns the parent of its process, which had them."""
    # Short, as a socket's path has to be.
    folder = tmp_path_factory.getbasetemp() / f"k{time.monotonic_ns() % 10**6}"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (folder / "command.py").write_text(COMMAND)

    def typed(keep: str = "60s", **environ: str) -> int:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OWN": "", **environ}
        done = subprocess.run(
            [sys.executable, "command.py", keep], cwd=folder, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        parent, *told = done.stdout.split(" ")
        assert told == [env["OWN"], f"{folder}\n"]
        return int(parent)

    yield typed
    for pid, _ in standby.servers():
        os.kill(pid, signal.SIGKILL)


def test_commands_share_it_in_one_environment_and_the_next_begins_anew_where_it_was_killed_or_is_stopped(command):
    first = command()
    assert command() == first
    ((pid, ends),) = standby.servers()
    assert (pid, standby.children(pid)) == (first, [])
    assert time.time() < ends < time.time() + 61
    # It has a session of its own, and holds no terminal open.
    assert os.getsid(pid) == pid
    assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {os.devnull}
    # Another environment has one of its own.
    other = command(OWN="another")
    assert other != first
    assert command(SHLVL="7") == first
    assert {pid for pid, _ in standby.servers()} == {first, other}
    os.kill(first, signal.SIGKILL)
    second = command()
    assert second != first
    os.kill(second, signal.SIGSTOP)
    assert command() not in (first, second)


def test_it_ends_by_itself_once_no_command_has_used_it_so_long_and_leaves_no_socket(command):
    command("1s")
    until(lambda: not [*standby.servers()], 60)
    assert not [*standby.folder().glob("*.s")]


def test_a_folder_that_others_can_open_is_refused(monkeypatch):
    # A socket's path is short, and a test's own folder is not.
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        folder = standby.folder()
        assert folder.stat().st_mode & 0o777 == 0o700
        for spoil in (lambda: folder.chmod(0o750), lambda: (folder.rmdir(), folder.symlink_to("/tmp"))):
            spoil()
            with pytest.raises(UserError, match="only you can open"):
                standby.folder()


@pytest.mark.parametrize("keep", ["", "10", "0m", "-1s", "1d", "10 m"])
def test_a_time_that_is_none_is_refused(keep):
    with pytest.raises(UserError, match=r"Try launch\.keep=10m"):
        standby.seconds_of(keep)
