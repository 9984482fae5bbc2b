"""Turns the schema, the choices and the comments beside them into the pages of `--help`, and a shell's completion.

source <(pipeline --completion bash)       # or zsh; fish: pipeline --completion fish | source
"""

import dataclasses
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import EnumType
from functools import partial
from itertools import takewhile

from omegaconf import OmegaConf

from pipeline.commands.verbs import VERBS
from pipeline.config import offered
from pipeline.config.composing import Composer
from pipeline.config.config import in_words
from pipeline.config.instead import find, keys, meant_by_key
from pipeline.config.offered import near
from pipeline.config.schema import Config
from pipeline.errors import UserError, as_typed

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


@dataclasses.dataclass(frozen=True)
class Book:
    """All that there is to say: choices of groups, defaults as composed, and meanings, by dotted key or group."""

    choices: Mapping[str, Sequence[str]]
    chosen: Mapping[str, str]
    opening: Mapping[str, Mapping[str, str]]
    defaults: Mapping[str, object]
    meanings: Mapping[str, str]


def text(composer: Composer, words: Sequence[str], columns: int) -> str:
    """Returns the page about `words`: topics, and overrides of choices. Raises `UserError` for an unknown topic."""
    overrides = [word for word in words if "=" in word]
    topics = [word for word in words if "=" not in word] + [word.partition("=")[0] for word in overrides]
    (composed, chosen), written = composer.composed(overrides), composer.written()
    # What a group is for is said by its place in the list of defaults, what a choice is by the opening of its file.
    defaults = filter(None, map(DEFAULT_LINE.match, written.splitlines()))
    groups = {line["group"]: line["said"].partition(": conf/")[0].partition(", or ")[0] for line in defaults}
    choices = composer.choices()
    choices = {group: choices[group] for group in sorted(choices, key=[*groups, *choices].index)}
    meanings, opening = meanings_of_keys(written), dict[str, dict[str, str]]()
    for group, options in choices.items():
        texts = {option: composer.written(group, option) for option in options}
        opening[group] = {option: " ".join(_opening(text)) for option, text in texts.items()}
        # The choice that is made says what its function's arguments mean; of other keys config.yaml knows better. A key
        # that all choices have may be explained by those alone that need it.
        for option in sorted(texts, key=lambda option: option != chosen.get(group)):
            for key, why in meanings_of_keys(texts[option], f"{group}.").items():
                if option == chosen.get(group) or key.count(".") == 1:
                    meanings.setdefault(key, why)
    book = Book(choices, chosen, opening, dict(_flat(OmegaConf.to_container(composed))), meanings | groups)
    width = max(NARROWEST, min(columns, WIDEST))
    pages = [_page(topic, book, width) for topic in topics] or [_first(book, width)]
    return "\n".join("\n".join(line.rstrip() for line in page) + "\n" for page in pages)


def _flat(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(node, dict) and node:
        for name, inner in node.items():
            yield from _flat(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def _first(book: Book, width: int) -> Iterator[str]:
    rows = []
    for key in FIRST:
        meaning = book.meanings.get(key, "")
        # Without what null comes to.
        in_short = meaning if VALUE.match(meaning) else meaning.partition(";")[0]
        rows.append((f"{key}={as_typed(book.defaults[key])}", in_short))
    tables: dict[str, Sequence[tuple[str, str]]] = {
        "": EXAMPLES,
        "Verbs: python -m pipeline VERB --help": [*VERBS.items()],
        "Choices: group=choice": [(group, ", ".join(_shortened(options))) for group, options in book.choices.items()],
        f"The {len(FIRST)} keys that matter most, of {len(keys())}: key=value": rows,
        "More: python -m pipeline ...": MORE,
    }
    does = "Trains a Keras model under a distribution strategy, measures what it brings, and logs it to MLflow."
    yield from _wrapped(does, width)
    for title, table in tables.items():
        yield from ("", *_wrapped(title, width), *_pairs(table, width))


def _page(topic: str, book: Book, width: int) -> Iterator[str]:
    # By its group, "" for none, the keys of each.
    groups: dict[str, list[str]] = {}
    for key in book.defaults:
        groups.setdefault(key.partition(".")[0] if "." in key else "", []).append(key)
    if topic == ALL:
        for group, inside in groups.items():
            yield from _group(group, inside, book, width)
            yield ""
    elif topic in book.choices or (topic and topic in groups):
        yield from _group(topic, groups.get(topic, []), book, width)
    elif matching := [
        key for key in book.defaults if topic in (key, key.rpartition(".")[2]) or key.startswith(f"{topic}.")
    ]:
        for key in matching:
            yield from _entry(key, book, width)
    else:
        closest = near(topic, dict.fromkeys([*VERBS, *book.choices, ALL, *filter(None, groups)]))
        closest = closest or meant_by_key(topic) or [ALL]
        raise UserError(f"--help with a group, a key, group=choice, a verb or {ALL}", topic, f"--help {closest[0]}")


def _group(group: str, inside: Sequence[str], book: Book, width: int) -> Iterator[str]:
    """A group: what it is for, its choices, and its keys; with "" the keys of no group."""
    meaning = book.meanings.get(group)
    yield from _wrapped(f"{group}: {meaning}" if meaning else group or "Keys of the whole", width)
    if options := book.choices.get(group):
        yield ""
        yield from _pairs([(f"{group}={option}", book.opening[group][option]) for option in options], width)
        yield ""
        if chosen := book.chosen.get(group):
            yield f"Its keys, under {group}={chosen}:"
        elif not inside:
            yield f"Another one is a file of {group}/ in the folder that --config-dir names."
    yield ""
    for key in inside:
        yield from _entry(key, book, width)


def _entry(key: str, book: Book, width: int) -> Iterator[str]:
    _, kind, _, rest = find(key, Config)
    typed = "" if rest else f"({in_words(kind)})"
    line = f"  {key}={as_typed(book.defaults[key])}"
    if len(line) + len(typed) + 2 <= width:
        line, typed = f"{line}  {typed}".rstrip(), ""
    yield line
    function = "the function that makes it; the keys beside it are its arguments" * key.endswith("._target_")
    for words in (typed, book.meanings.get(key, function)):
        yield from (" " * 6 + part for part in _wrapped(words, width - 6))


def _pairs(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    widest = max(len(name) for name, _ in rows)
    beside = widest + INDENT <= width // 2 + 4
    left = widest + 4 if beside else INDENT + 2
    for name, meaning in rows:
        wrapped = _wrapped(meaning, width - left)
        yield f"  {name:<{widest}}  {''.join(wrapped[:1])}" if beside else f"  {name}"
        yield from (" " * left + line for line in (wrapped[1:] if beside else wrapped))


def _shortened(options: Sequence[str]) -> Sequence[str]:
    layouts = [option for option in options if option[0].isdigit()]
    return [option for option in options if option not in layouts] + ["4cpu", "8gpu, 2x8gpu ..."] * bool(layouts[3:])


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
