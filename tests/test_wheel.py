"""The wheel works on its own: outside of the checkout, with the choices that it brings."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder into which the wheel of a copy of this checkout, built as `make wheel` builds it, is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pipeline", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(built, check=True, capture_output=True)
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, capture_output=True)
    return site


def python(site: Path, folder: Path, *arguments: str) -> str:
    """What Python prints with the installed package alone on the path; -P keeps the current folder off it."""
    environ = os.environ | {"PYTHONPATH": str(site)}
    ran = subprocess.run([sys.executable, "-P", *arguments], cwd=folder, env=environ, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def test_the_wheel_holds_the_package_its_choices_and_nothing_else(installed):
    (wheel,) = installed.parent.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"pipeline", "distributed_keras_pipeline"}
    choices = {f"pipeline/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert choices == {name for name in names if name.endswith(".yaml")}


def test_it_runs_from_any_folder_with_the_conf_inside_the_wheel(installed, tmp_path):
    before = (installed / "pipeline/conf/model/cnn.yaml").read_text()
    shown = python(installed, tmp_path, "-m", "pipeline", "--info", "searchpath")
    assert f"file://{installed}/pipeline/conf" in shown
    assert str(ROOT) not in shown
    try:
        (installed / "pipeline/conf/model/cnn.yaml").write_text(before.replace("dense_units: 128", "dense_units: 129"))
        assert "dense_units: 129" in python(installed, tmp_path, "-m", "pipeline", "--cfg", "job")
    finally:
        (installed / "pipeline/conf/model/cnn.yaml").write_text(before)


@pytest.mark.parametrize(("typed", "words"), [
    ("mode=plan strategy=multi_worker hardware=2cpu model=resnet20", "resnet20 on mnist5k, multi_worker by shared"),
    ("prepare data=digits out=d processes=1", "train      1,438 examples, 1 shard"),
])  # fmt: skip
def test_it_plans_and_prepares_with_its_own_functions_and_choices(installed, tmp_path, typed, words):
    assert words in python(installed, tmp_path, "-m", "pipeline", *typed.split())


def test_its_hints_fit_where_there_is_no_checkout(installed, tmp_path):
    """Nothing that it prints names a file or a command of the checkout."""
    asks = (["--help"], ["--help", "all"], ["prepare", "--help"], ["ui", "--help"], ["--help", "tracking"])
    one_after_the_other = (
        "import sys\nfrom pipeline.commands import verbs\n"
        f"for sys.argv[1:] in {asks}:\n    assert verbs.main() == 0\n    print('ENDED')"
    )
    shown = python(installed, tmp_path, "-c", one_after_the_other).split("ENDED\n")
    assert all(len(each) > 100 for each in shown[:-1]), shown
    assert len(shown) == len(asks) + 1
    assert not re.search(r"\bmake (ui|run|setup)\b|conf/|docs/", "".join(shown))
