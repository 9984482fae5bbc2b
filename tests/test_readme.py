"""What README and docs promise, typed as it stands there; its links and classes; and the wheel, on its own."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import zipfile
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Ran, sampled
from hydra.core.override_parser.overrides_parser import OverridesParser
from PIL import Image

from pipeline.commands.verbs import MODULES
from pipeline.config import config as configs
from pipeline.config.composing import config_of
from pipeline.config.schema import Config, PrepareConfig

# Verbs that have keys of their own, and none of a config.
FOR_A_RUN = {
    name: getattr(import_module(f"pipeline.commands.{MODULES.get(name, (name,))[0]}"), name)
    for name in ("report", "compare", "sync", "ui", "clean", "attach")
}
TOP = tuple(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"))
PAGES = {page.name: page.read_text() for page in (*TOP, *sorted((ROOT / "docs").glob("*.md")))}
# What README and docs show as code: (page, what is typed after `python -m pipeline`).
DOCUMENTED = [
    (page, typed.partition(" #")[0].strip())
    for page, text in PAGES.items()
    if page not in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    for typed in re.findall(r"^ {4,}.*python -m pipeline (.*)$", text.replace("\\\n", " "), re.M)
]
DOCUMENTED += [
    ("commands.md", typed) for typed in re.findall(r"`python -m pipeline ([^`]*=[^`]*)`", PAGES["commands.md"])
]
OF_CONFIGS = [(page, typed) for page, typed in DOCUMENTED if typed.split()[0] not in FOR_A_RUN]
# What a plan would have to reach, or to find made; other tests run these for real.
NOT_PLANNED = re.compile(
    r"^(prepare|doctor)\b|data=(tfds|tfrecord)|cluster=(env|mpi)|collective=horovod|experiment=theirs"
)
PLANNED = [(page, typed) for page, typed in OF_CONFIGS if not NOT_PLANNED.search(typed)]


@pytest.mark.slow
def test_a_folder_of_images_is_trained_on_with_the_two_commands_of_the_readme(pipeline, tmp_path):
    random = np.random.default_rng(0)
    for number, name in enumerate(("cat", "dog", "owl")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for place in range(40):
            pixels = random.integers(0, 99, (12, 16, 3)) + 50 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{place}.png")
    commands = r"\n    python -m pipeline (prepare .*)\n    python -m pipeline (data=tfrecord .*)\n"
    ((prepare, train),) = re.findall(commands, PAGES["README.md"])
    assert "cat 32, dog 32, owl 32" in pipeline(*prepare.split()).ok().out
    out = pipeline(*train.split()).ok().out
    assert "FINISHED" in out
    assert "speedup" in out


@pytest.mark.parametrize("typed", [typed for _, typed in DOCUMENTED if typed.split()[0] in FOR_A_RUN])
def test_every_verb_of_a_page_takes_what_is_typed_there(typed):
    verb, *arguments = shlex.split(typed)
    FOR_A_RUN[verb].typed([argument for argument in arguments if not argument.startswith("[")])


@pytest.mark.parametrize(("page", "typed"), OF_CONFIGS)
def test_every_command_of_a_page_has_keys_and_choices_that_are_there(tmp_path, page, typed):
    words = [word for word in shlex.split(typed) if word not in ("...", "-m", "predict", "explain")]
    prepares, own = words[0] == "prepare", str(tmp_path) if "--config-dir" in words else None
    overrides = [first_value(word) for word in words[prepares:] if "=" in word and word != "experiment=theirs"]
    write_configs_of(page, tmp_path)
    schema = PrepareConfig if prepares else Config
    configs.register(lambda: 2)
    assert isinstance(config_of(schema, overrides, own), schema)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "typed"), sampled(PLANNED, len(PLANNED) // 4))
def test_every_command_of_a_page_is_planned_as_it_stands_there(asked, tmp_path, page, typed):
    write_configs_of(page, tmp_path / "conf")
    # The modules that a page names, of what it shows or, where it shows nothing, of what README does.
    codes = next(filter(None, (re.findall(r"```python\n(.*?)```", PAGES[name], re.S) for name in (page, "README.md"))))
    # Functions that a page leaves to the reader.
    others = "from pipeline.data import digits\ngan = globals().get('wide')\n"
    for name in {*re.findall(r"\b(my_\w+)\.\w", PAGES[page])} - {"my_package"}:
        (tmp_path / f"{name}.py").write_text("\n\n".join([*codes, others]))
    words = [word for word in shlex.split(typed) if word not in ("...", "predict", "explain", "mode=predict")]
    assert asked(*words, "mode=plan").ok().out


def write_configs_of(page: str, folder: Path) -> None:
    """Writes the choices of one's own that a page shows."""
    shown = r"`conf/(\w+/\w+\.yaml)`[^\n]*:\n\n(?:```yaml\n(.*?)```| {4}(\{.*?\})\n)"
    for name, block, line in re.findall(shown, PAGES[page], re.S):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(block or line)


def first_value(word: str) -> str:
    """An override with the first of the values that a sweep would give it."""
    (override,) = OverridesParser.create().parse_overrides([word])
    if not override.is_sweep_override():
        return word
    return f"{word.partition('=')[0]}={next(iter(override.sweep_string_iterator()))}"


def test_the_estimate_that_docs_show_is_what_a_plan_prints(asked):
    shown = re.search(r"^ {4}memory .*?(?=^\S)", PAGES["planning.md"], re.M | re.S)
    ran: Ran = asked("mode=plan", "strategy=parameter_server", "workers=2").ok()
    assert textwrap.dedent(shown[0]).strip() in "\n".join(line.rstrip() for line in ran.out.splitlines())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return {
        re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.M)
    }


def test_every_link_of_a_page_leads_to_a_heading():
    wrong = []
    for page in (*TOP, *(ROOT / "docs").glob("*.md")):
        for place, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            target = page.parent / place if place else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{page.name}: {place}#{anchor}")
    assert wrong == []


def test_one_run_is_followed_in_sixty_lines_and_twenty_classes_that_are_there():
    text = PAGES["one-run.md"]
    code = {path.as_posix(): path.read_text() for path in (ROOT / "pipeline").rglob("*.py")}
    classes = set(re.findall(r"`([A-Z]\w*[a-z]\w*)`", text))
    assert len(text.splitlines()) <= 60
    assert 10 <= len(classes) <= 20
    whole = "\n".join(code.values())
    assert [name for name in classes if not re.search(rf"^class {name}\b", whole, re.M)] == []
    files = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert [name for name in files if not any(path.endswith(f"/{name}") for path in code)] == []


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


def test_it_runs_from_any_folder_with_the_conf_and_the_functions_inside_the_wheel(installed, tmp_path):
    before = (installed / "pipeline/conf/model/cnn.yaml").read_text()
    shown = python(installed, tmp_path, "-m", "pipeline", "--info", "searchpath")
    assert f"file://{installed}/pipeline/conf" in shown
    assert str(ROOT) not in shown
    for typed, words in (
        ("mode=plan strategy=multi_worker hardware=2cpu model=resnet20", "resnet20 on mnist5k, multi_worker by shared"),
        ("prepare data=digits out=d processes=1", "train      1,438 examples, 1 shard"),
    ):
        assert words in python(installed, tmp_path, "-m", "pipeline", *typed.split())
    try:
        (installed / "pipeline/conf/model/cnn.yaml").write_text(before.replace("dense_units: 128", "dense_units: 129"))
        assert "dense_units: 129" in python(installed, tmp_path, "-m", "pipeline", "--cfg", "job")
    finally:
        (installed / "pipeline/conf/model/cnn.yaml").write_text(before)


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
