"""What README and docs promise, typed as it stands there; links that lead to headings, and classes that are there."""

import re
import shlex
import textwrap
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
COMMANDS = re.findall(r"`python -m pipeline ([^`]*=[^`]*)`", PAGES["commands.md"])
# What README and docs show as code: (page, what is typed after `python -m pipeline`).
DOCUMENTED = [
    (page, typed.partition(" #")[0].strip())
    for page, text in PAGES.items()
    if page not in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    for typed in re.findall(r"^ {4,}.*python -m pipeline (.*)$", text.replace("\\\n", " "), re.M)
]
OF_VERBS = [typed for _, typed in DOCUMENTED if typed.split()[0] in FOR_A_RUN]
OF_CONFIGS = [(page, typed) for page, typed in DOCUMENTED if typed.split()[0] not in FOR_A_RUN]
# What a plan would have to reach, or to find made; other tests run these for real.
NOT_PLANNED = re.compile(
    r"^(prepare|doctor)\b|data=(tfds|tfrecord)|cluster=(env|mpi)|collective=horovod|experiment=theirs"
)
PLANNED = [(page, typed) for page, typed in OF_CONFIGS if not NOT_PLANNED.search(typed)]


@pytest.mark.parametrize("command", [typed for typed in COMMANDS if "data.path=" not in typed])
def test_every_command_of_the_table_is_one_that_can_be_planned(asked, command):
    asked(*re.sub(r"^predict |mode=\w+", "", command).split(), "mode=plan").ok()


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


@pytest.mark.parametrize("typed", OF_VERBS)
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
@pytest.mark.parametrize(("page", "typed"), sampled(PLANNED, len(PLANNED) // 2))
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
