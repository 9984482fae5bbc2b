"""Reads what keys and choices mean from the comments that stand beside them in YAML files.

    key: value # what it means
    #            and more of that

A block that is a comment itself, as of keys that all choices have, is read as if it were none.
"""

import re
from collections.abc import Iterator

KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][\w.]*):(?P<value>(?: .*?)??)(?:\s# (?P<said>.*))?$")
# A line of a list of defaults, as `- strategy: mirrored # how ...`.
DEFAULT = re.compile(r"  - (?P<group>\w+): \S+ # (?P<said>.*)$")
MORE = re.compile(r"\s*#\s{2,}(?P<said>\S.*)$")
BLOCK = re.compile(r"# [a-z_]+:(?: #.*)?$")


def of_keys(text: str, prefix: str = "") -> dict[str, str]:
    r"""What each key of a YAML file means, by its dotted name.

    >>> of_keys("a: # of all\n  b: 1 # how many\n  #      at most\n# c:\n#   d: null # why\n")
    {'a': 'of all', 'a.b': 'how many at most', 'c.d': 'why'}
    """
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    last = ""
    for line in _uncommented(text):
        if match := KEY.match(line):
            indent, said = len(match["indent"]), match["said"]
            above = [(place, name) for place, name in above if place < indent]
            last = ".".join([*(name for _, name in above), match["key"]])
            above.append((indent, match["key"]))
            if said:
                found[prefix + last] = said.strip()
        elif (match := MORE.match(line)) and prefix + last in found:
            found[prefix + last] += f" {match['said'].strip()}"
        else:
            last = ""
    return found


def of_groups(text: str) -> dict[str, str]:
    r"""What each group of choices is for, as its place in a list of defaults says.

    >>> of_groups("defaults:\n  - model: cnn # what is trained: conf/model/\n")
    {'model': 'what is trained'}
    """
    matches = (DEFAULT.match(line) for line in text.splitlines())
    return {match["group"]: match["said"].partition(": conf/")[0].partition(", or ")[0] for match in matches if match}


def of_choice(text: str) -> str:
    r"""What a choice is, as its file opens.

    >>> of_choice("# Dense layers only.\n# Pick it first.\nname: mlp\n")
    'Dense layers only. Pick it first.'
    """
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):  # which says something to Hydra
            lines.append(line.lstrip("# "))
    return " ".join(lines)


def _uncommented(text: str) -> Iterator[str]:
    """The lines of a text; those of a block that is a comment as if they were none."""
    inside = False
    for line in text.splitlines():
        if BLOCK.match(line):
            inside = True
        elif not line.startswith("#   "):
            inside = False
        yield line.removeprefix("# ") if inside else line
