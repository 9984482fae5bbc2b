"""What a shell offers at the TAB key, asked of real shells."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT


def script(shell: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", "--completion", shell]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "completion.bash"
    made = script("bash")
    assert made.returncode == 0, made.stderr
    path.write_text(made.stdout)
    return path


def offered(bash, typed: str) -> list[str]:
    """What bash would put in place of the last word, as it cuts words."""
    asked = (
        f'source {bash}; COMP_LINE="{typed}"; COMP_POINT=${{#COMP_LINE}}; _pipeline; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    ran = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize(
    ("typed", "some", "none"),
    [
        ("pipeline rep", ["report"], ["compare"]),
        ("pipeline strat", ["strategy=mirrored", "strategy=multi_worker", "strategy.name="], ["model=cnn"]),
        ("pipeline strategy=mu", ["multi_worker"], ["mirrored"]),
        ("pipeline -m strategy=mirrored,mu", ["mirrored,multi_worker"], []),
        ("pipeline train.determ", ["train.deterministic=", "train.deterministic=true"], ["train.epochs="]),
        ("pipeline data.cache=", ["none", "memory", "file"], ["true"]),
        ("pipeline cluster=", ["env", "local"], []),
        ("pipeline hardware=", ["auto", "4cpu", "2x4gpu"], []),
    ],
)
def test_bash_offers_verbs_choices_keys_and_values(bash, typed, some, none):
    found = offered(bash, typed)
    assert set(some) <= set(found)
    assert not set(none) & set(found)


def test_what_is_no_shell_is_refused_with_one_that_is():
    ran = script("bsh")
    assert ran.returncode == 2
    assert (
        "Expected --completion with one of bash, fish, zsh, received bsh. Try pipeline --completion bash." in ran.stderr
    )


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_takes_its_script():
    assert subprocess.run(["fish", "-c", script("fish").stdout], timeout=30).returncode == 0
