"""Writes the script with which a shell completes the command: verbs, choices of groups, keys and their values.

source <(pipeline --completion bash)       # or zsh; fish: pipeline --completion fish | source
"""

import difflib
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum

from pipeline.commands.verbs import VERBS
from pipeline.config import shipped
from pipeline.config.schema import Config

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
    """Prints the script for a shell; returns the exit code."""
    shell = arguments[0] if arguments else ""
    if shell not in SHELLS:
        near = difflib.get_close_matches(shell, SHELLS, 1) or ["bash"]
        print(
            f"pipeline: Expected --completion with one of {', '.join(SHELLS)}, received {shell or 'none'}. "
            f"Try pipeline --completion {near[0]}.",
            file=sys.stderr,
        )
        return 2
    script = {"bash": BASH, "zsh": ZSH + BASH, "fish": FISH}[shell]
    print(script.replace("__WORDS__", " ".join(words())), end="")
    return 0


def words() -> Iterator[str]:
    """All that can be typed: verbs, options, `group=choice` of the configs that are shipped, and `key=value`."""
    yield from (*VERBS, *OPTIONS)
    yield from (f"{group}={choice}" for group, choices in shipped.choices().items() for choice in choices)
    yield from _keys(Config, "")


def _keys(kind: type, prefix: str) -> Iterator[str]:
    """`key=` of each field of a schema, with each of its values where there are a few."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        hint: object = hints[field.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _keys(hint, f"{prefix}{field.name}.")
            continue
        yield f"{prefix}{field.name}="
        for option in (hint, *typing.get_args(hint)):
            if option is bool:
                yield from (f"{prefix}{field.name}={value}" for value in ("false", "true"))
            elif isinstance(option, type) and issubclass(option, Enum):
                yield from (f"{prefix}{field.name}={value.value}" for value in option)
