"""Turns options and overrides into composed configs, and runs them: `python -m pipeline [-m] key=value ...`.

Prints the pages of `--help`, from the schema, the choices and the comments beside them, and a shell's completion.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from enum import EnumType
from functools import partial
from importlib import import_module
from itertools import chain, takewhile

from omegaconf import OmegaConf

from pipeline.commands.verbs import VERBS
from pipeline.config import config as configs
from pipeline.config import offered
from pipeline.config.composing import Composer
from pipeline.config.instead import find, keys, meant_by_key, meant_by_option
from pipeline.config.offered import near
from pipeline.config.schema import Config
from pipeline.errors import UserError, as_typed, unwritten
from pipeline.plan.checks import check_ranges

# Options of which only one can be obeyed.
COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
NARROWEST, WIDEST, INDENT = 40, 100, 4
ALL = "all"
# So begins a meaning that says what each value does.
VALUE = re.compile(r"\w+: ")
# Keys that matter most, in the order in which a person comes to them.
FIRST = (
    "workers", "mode", "train.epochs", "train.replica_batch", "train.optimizer", "train.precision", "measure.explain",
    "sweep.name", "resume", "output_dir",
)  # fmt: skip
EXAMPLES = (
    ("python -m pipeline strategy=mirrored workers=2", "trains, and says what the second worker gained"),
    ("python -m pipeline -m strategy=one_device,mirrored workers=1,2", "a sweep: each combination is a point"),
    ("python -m pipeline mode=plan strategy=multi_worker hardware=2x4gpu", "prints what it would start and need"),
)
MORE = (
    ("--help all", "every key, with its meaning, type and default"),
    ("--help strategy", "a group: its choices and keys; likewise model, data, train, measure, checkpoint, launch ..."),
    ("--help train.epochs", "a key"),
    ("--help model=mlp", "a choice, with the arguments of its function"),
    ("--config-dir FOLDER", "your own choices: model/mine.yaml in it is model=mine"),
    ("--cfg job", "print the composed config instead of running it"),
    ("--completion bash", "shell completion, to be sourced; also zsh, fish"),
    ("--hydra-help", "Hydra's own options"),
)
# The lines of a YAML file: a key with what it means; more of a meaning; the start of a block that is a comment.
KEY_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][\w.]*):(?P<value>(?: .*?)??)(?:\s# (?P<said>.*))?$")
# A line of a list of defaults, as `- strategy: mirrored # how ...`.
DEFAULT_LINE = re.compile(r"  - (?P<group>\w+): \S+ # (?P<said>.*)$")
MORE_LINE = re.compile(r"\s*#\s{2,}(?P<said>\S.*)$")
BLOCK_LINE = re.compile(r"# [a-z_]+:(?: #.*)?$")
# Lines no longer than a width, unless a word is.
_wrapped = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
SHELLS = ("bash", "fish", "zsh")
OPTIONS = ("--help", "--version", "--completion", "--cfg", "--config-dir", "--multirun", "-m")
# The word under the cursor, which bash cuts at "=" and ":", is completed as it was typed, and answered without what is
# before the cut.
BASH = """_pipeline() {
    local word="${COMP_LINE:0:COMP_POINT}" words
    word="${word##*[[:space:]]}"
    words="__WORDS__"
    [[ "$word" == *=*,* ]] && words="${words// ${word%%=*}=/ ${word%,*},}"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" != *= ]] || compopt -o nospace 2>/dev/null
    local cut="${word%"${word##*[=:]}"}" index
    for index in "${!COMPREPLY[@]}"; do COMPREPLY[index]="${COMPREPLY[index]#"$cut"}"; done
    [[ ${#COMPREPLY[@]} == 0 ]] && COMPREPLY=($(compgen -f -- "${word##*[=:]}"))
}
complete -F _pipeline pipeline
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
FISH = "complete -c pipeline -f -a '__WORDS__'\n"


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    if "--version" in arguments:
        from importlib import metadata

        installed = [*metadata.distributions(name="distributed-keras-pipeline")]
        print(f"pipeline {installed[0].version if installed else '(not installed)'}")
        return 0
    # Imported only for a config that asks for it.
    configs.register(lambda: int(import_module("pipeline.driver.requests").devices(os.environ)))
    try:
        typed = options(arguments)
        composer = Composer(typed.config_name or "config", Config, typed.config_dir, typed.config_path)
        if _shown(composer, typed):
            return 0
        points = composer.points(typed.overrides, typed.multirun, check_ranges)
        # A sweep takes longer: it is composed where signals are heeded.
        first = [] if typed.multirun else [next(points)]
    except (UserError, OSError) as error:
        return refused(error)
    # Imported now, so that what is wrong with a config is said at once.
    from pipeline.commands.running import run_all

    named = {name: getattr(typed, f"config_{name}") for name in ("path", "name", "dir")}
    return run_all(chain(first, points), tuple(f"--config-{name}={value}" for name, value in named.items() if value))


def refused(error: UserError | OSError) -> int:
    """Says what is wrong with what was typed; returns the exit code."""
    from pipeline.views.terminal import say_error

    if isinstance(error, OSError):
        place = error.filename or "the output folder"
        error = UserError(f"to be able to write {place}", error.strerror or error, "output_dir=..")
    say_error(str(error))
    return 2


def _shown(composer: Composer, typed: argparse.Namespace) -> bool:
    """Prints what was typed in place of a run, if anything was, and returns whether; ends where nobody reads on."""
    handler = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        if typed.help:
            print(_text(composer, typed.overrides, shutil.get_terminal_size().columns), end="")
        shown = typed.help or composer.show(typed, _Parser())
        sys.stdout.flush()
        return bool(shown)
    except OSError as error:
        raise unwritten(error) from error
    finally:
        signal.signal(signal.SIGPIPE, handler)


class _Parser(argparse.ArgumentParser):
    """Hydra's options and overrides, in any order; it raises where others end the program."""

    def __init__(self) -> None:
        super().__init__(prog="python -m pipeline", add_help=False)
        self.add_argument("overrides", nargs="*", help="key=value and group=choice")
        for long, short, does in (
            ("--help", "-h", "This program's help"),
            ("--hydra-help", "", "This page"),
            ("--run", "-r", "One run"),
            ("--multirun", "-m", "A sweep: a run of each combination of values"),
            ("--resolve", "", "With --cfg: values in place of what refers to them"),
            ("--shell-completion", "-sc", "Hydra's own completion; see also --completion"),
        ):
            self.add_argument(*filter(None, (long, short)), action="store_true", help=does)
        self.add_argument("--cfg", "-c", choices=["job", "hydra", "all"], help="Prints the config in place of a run")
        self.add_argument("--package", "-p", help="With --cfg: the part of the config that is printed")
        self.add_argument("--config-path", "-cp", help="Folder of choices in place of this program's own")
        self.add_argument("--config-name", "-cn", help="Config to begin with, config.yaml by default")
        self.add_argument("--config-dir", "-cd", help="Folder of more choices")
        self.add_argument("--info", "-i", const="all", nargs="?", choices=INFO, help="What Hydra knows")

    def error(self, message: str) -> typing.NoReturn:
        raise argparse.ArgumentError(None, message)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options and overrides of a command line. Raises `UserError`.

    >>> options(["--workers", "2"])
    Traceback (most recent call last):
    pipeline.errors.UserError: Expected options that exist, with their values, received unrecognized \
arguments: --workers. Try workers=2.
    """
    try:
        typed: argparse.Namespace = _Parser().parse_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        problem = error.message
        raise UserError("options that exist, with their values", problem, meant_by_option(arguments, problem)) from None
    if sum(getattr(typed, name) not in (False, None) for name in COMMANDS) > 1:
        raise UserError(f"one of --{', --'.join(COMMANDS)}", "several", "one of them")
    if typed.resolve and not typed.cfg:
        raise UserError("--resolve beside --cfg", "it alone", "--cfg job --resolve")
    return typed


def _text(composer: Composer, words: Sequence[str], columns: int) -> str:
    """Returns the page about `words`: topics, and overrides of choices. Raises `UserError` for an unknown topic."""
    overrides = [word for word in words if "=" in word]
    topics = [word for word in words if "=" not in word] + [word.partition("=")[0] for word in overrides]
    book = _Book(composer, overrides, max(NARROWEST, min(columns, WIDEST)))
    pages = [book.page(topic) for topic in topics] or [book.first()]
    return "\n".join("\n".join(line.rstrip() for line in page) + "\n" for page in pages)


class _Book:
    """All that there is to say: choices of groups, defaults as composed, and meanings, by dotted key or group."""

    def __init__(self, composer: Composer, overrides: Sequence[str], width: int) -> None:
        self._width = width
        (composed, self._chosen), written = composer.composed(overrides), composer.written()
        self._defaults = dict(_flat(OmegaConf.to_container(composed)))
        # What a group is for is said by its place in the list of defaults, what a choice is by the opening of its file.
        defaults = filter(None, map(DEFAULT_LINE.match, written.splitlines()))
        groups = {line["group"]: line["said"].partition(": conf/")[0].partition(", or ")[0] for line in defaults}
        choices, self._opening = composer.choices(), dict[str, dict[str, str]]()
        meanings = meanings_of_keys(written)
        for group in sorted(choices, key=[*groups, *choices].index):
            texts = {option: composer.written(group, option) for option in choices[group]}
            chosen = self._chosen.get(group, "")
            self._opening[group] = {option: " ".join(_opening(text)) for option, text in texts.items()}
            # The choice that is made says what its function's arguments mean; of other keys config.yaml knows better. A
            # key that all choices have may be explained by those alone that need it.
            for option in (*[chosen] * (chosen in texts), *texts):
                for key, why in meanings_of_keys(texts[option], f"{group}.").items():
                    if option == chosen or key.count(".") == 1:
                        meanings.setdefault(key, why)
        self._meanings = meanings | groups

    def first(self) -> Iterator[str]:
        rows = []
        for key in FIRST:
            meaning = self._meanings.get(key, "")
            # Without what null comes to.
            in_short = meaning if VALUE.match(meaning) else meaning.partition(";")[0]
            rows.append((f"{key}={as_typed(self._defaults[key])}", in_short))
        tables: dict[str, Sequence[tuple[str, str]]] = {
            "": EXAMPLES,
            "Verbs: python -m pipeline VERB --help": [*VERBS.items()],
            "Choices: group=choice": [(group, _shortened([*options])) for group, options in self._opening.items()],
            f"The {len(FIRST)} keys that matter most, of {len(keys())}: key=value": rows,
            "More: python -m pipeline ...": MORE,
        }
        does = "Trains a Keras model under a distribution strategy, measures what it brings, and logs it to MLflow."
        yield from _wrapped(does, self._width)
        for title, table in tables.items():
            yield from ("", *_wrapped(title, self._width), *self._pairs(table))

    def page(self, topic: str) -> Iterator[str]:
        # By its group, "" for none, the keys of each.
        groups: dict[str, list[str]] = {}
        for key in self._defaults:
            groups.setdefault(key.partition(".")[0] if "." in key else "", []).append(key)
        if topic == ALL:
            for group, inside in groups.items():
                yield from (*self._group(group, inside), "")
        elif topic in self._opening or (topic and topic in groups):
            yield from self._group(topic, groups.get(topic, []))
        elif matching := [
            key for key in self._defaults if topic in (key, key.rpartition(".")[2]) or key.startswith(f"{topic}.")
        ]:
            yield from chain.from_iterable(map(self._entry, matching))
        else:
            closest = near(topic, dict.fromkeys([*VERBS, *self._opening, ALL, *filter(None, groups)]))
            closest = closest or meant_by_key(topic) or [ALL]
            raise UserError(f"--help with a group, a key, group=choice, a verb or {ALL}", topic, f"--help {closest[0]}")

    def _group(self, group: str, inside: Sequence[str]) -> Iterator[str]:
        """A group: what it is for, its choices, and its keys; with "" the keys of no group."""
        meaning = self._meanings.get(group)
        yield from _wrapped(f"{group}: {meaning}" if meaning else group or "Keys of the whole", self._width)
        if options := self._opening.get(group):
            yield from ("", *self._pairs([(f"{group}={option}", opening) for option, opening in options.items()]), "")
            if chosen := self._chosen.get(group):
                yield f"Its keys, under {group}={chosen}:"
            elif not inside:
                yield f"Another one is a file of {group}/ in the folder that --config-dir names."
        yield from ("", *chain.from_iterable(map(self._entry, inside)))

    def _entry(self, key: str) -> Iterator[str]:
        _, kind, _, rest = find(key, Config)
        typed = "" if rest else f"({configs.in_words(kind)})"
        line = f"  {key}={as_typed(self._defaults[key])}"
        if len(line) + len(typed) + 2 <= self._width:
            line, typed = f"{line}  {typed}".rstrip(), ""
        yield line
        function = "the function that makes it; the keys beside it are its arguments" * key.endswith("._target_")
        for words in (typed, self._meanings.get(key, function)):
            yield from (" " * 6 + part for part in _wrapped(words, self._width - 6))

    def _pairs(self, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
        widest = max(len(name) for name, _ in rows)
        beside = widest + INDENT <= self._width // 2 + 4
        left = widest + 4 if beside else INDENT + 2
        for name, meaning in rows:
            wrapped = _wrapped(meaning, self._width - left)
            yield f"  {name:<{widest}}  {''.join(wrapped[:1])}" if beside else f"  {name}"
            yield from (" " * left + line for line in (wrapped[1:] if beside else wrapped))


def _flat(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(node, dict) and node:
        for name, inner in node.items():
            yield from _flat(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def _shortened(options: Sequence[str]) -> str:
    layouts = [option for option in options if option[0].isdigit()]
    return ", ".join([one for one in options if one not in layouts] + ["4cpu", "8gpu, 2x8gpu ..."] * bool(layouts[3:]))


def _opening(text: str) -> Iterator[str]:
    for line in takewhile(lambda line: line.startswith("#"), text.splitlines()):
        if not line.startswith("# @"):  # which says something to Hydra
            yield line.lstrip("# ")


def meanings_of_keys(text: str, prefix: str = "") -> dict[str, str]:
    r"""Returns what each key of a YAML file means, by its dotted name.

    >>> meanings_of_keys("a: # of all\n  b: 1 # how many\n  #      at most\n# c:\n#   d: null # why\n")
    {'a': 'of all', 'a.b': 'how many at most', 'c.d': 'why'}
    """
    meanings: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    last, commented = "", False
    for line in text.splitlines():
        # The lines of a block that is a comment are read as if they were none.
        commented = bool(BLOCK_LINE.match(line) or (commented and line.startswith("#   ")))
        line = line.removeprefix("# ") if commented else line
        if match := KEY_LINE.match(line):
            indent, meaning = len(match["indent"]), match["said"]
            above = [(place, name) for place, name in above if place < indent]
            above.append((indent, match["key"]))
            last = prefix + ".".join(name for _, name in above)
            if meaning:
                meanings[last] = meaning.strip()
        elif (match := MORE_LINE.match(line)) and last in meanings:
            meanings[last] += f" {match['said'].strip()}"
        else:
            last = ""
    return meanings


def complete(arguments: Sequence[str]) -> int:
    """Prints the script for a shell; returns the exit code."""
    shell = arguments[0] if arguments else ""
    if shell not in SHELLS:
        closest = near(shell, SHELLS) or ["bash"]
        expected, instead = f"--completion with one of {', '.join(SHELLS)}", f"pipeline --completion {closest[0]}"
        print(f"pipeline: {UserError(expected, shell or 'none', instead)}", file=sys.stderr)
        return 2
    script = {"bash": BASH, "zsh": ZSH + BASH, "fish": FISH}[shell]
    print(script.replace("__WORDS__", " ".join(words())), end="")
    return 0


def words() -> Iterator[str]:
    """All that can be typed: verbs, options, `group=choice` of the configs that are shipped, and `key=value`."""
    yield from (*VERBS, *OPTIONS)
    yield from (f"{group}={choice}" for group, choices in offered.choices().items() for choice in choices)
    for key in keys(Config):
        kind = find(key)[1]
        yield f"{key}="
        for option in (kind, *typing.get_args(kind)):
            if option is bool:
                yield from (f"{key}=false", f"{key}=true")
            elif isinstance(option, EnumType):
                yield from (f"{key}={name}" for name in option.__members__)
