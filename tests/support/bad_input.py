"""Bad input made from the schema: for every key what cannot be its value, as a person would type it.

    python bad_input.py ARGUMENT ...     runs a case, and ends where a config is taken

A new key of the schema is covered as it is. What a number may be is decided here by what it means, so a key whose
smallest value is another than 1, or a text that may be empty, stands in a table below.
"""

import dataclasses
import enum
import itertools
import os
import re
import shlex
import sys
import types
import typing
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pipeline.commands.train import options
from pipeline.commands.verbs import VERBS
from pipeline.config import offered
from pipeline.config.config import check_override
from pipeline.config.instead import LAYOUT, find
from pipeline.config.parts import places
from pipeline.config.schema import Config
from pipeline.errors import UserError

Case = tuple[str, ...]

# What is 0 and means something: nothing of it, or the first. For every other number 0 is refused.
ZERO_IS_FINE = {
    "train.sample_tokens", "train.sample_temperature",
    "train.seed", "data.validation_examples", "measure.warmup_steps", "measure.steps", "launch.max_restarts",
    "tracking.system_metrics_seconds", "tracking.drain_timeout", "data.prefetch", "measure.patience",
}  # fmt: skip
# A part of a command, and what stands in one for what only its person knows.
TYPED = re.compile(r"-{1,2}[a-z]|[~+]*[\w./@]+=|python$|pipeline$|job$|searchpath$")
PLACEHOLDERS = ("..", "...", "VALUE", "NAME", "FOLDER", "RUN")
CHOICES = {group: {*of, *(each.stem for each in (Path(__file__).parent / "conf" / group).glob("*.yaml"))}
           for group, of in offered.choices().items()}  # fmt: skip
# By the type of a list's items.
WRONG_ITEMS = {
    int: ["[a]", "[1.5]", "[0]", "[-1]", "[[1]]", "[null]", f"[1{'0' * 30}]"],
    str: ["['']", "[3]", "['a b']", "[[a]]", "[null]", "[{a: 1}]"],
}
STARTED = 70
SYNTAX = (
    "workers", "=", "=2", "workers==2", "workers=[", "workers={", "workers=}", "workers=(", "workers='", 'workers="',
    "workers=${", "workers=${nothing}", "workers=${oc.env:NOTHING_THERE}", "workers=${nowhere:x}", "workers=1,2",
    "workers=range(1,3)", "workers=glob(*)", "workers=int(x)", "workers=choice(1,2)", "~", "+", "++", "~workers=9",
    "~nothing", "+mode=run", "workers =2", "wor kers=2", "wörkers=2", "workers=2;ls", "a.b.c.d=1",
    ".workers=2", "workers.=2", "workers..x=2", "workers[0]=2", "train=", "train.epochs.x=3", "--nothing-like-it",
    "--config-dir=/nowhere/at/all", "--config-name=nothing", "--cfg=nothing", "hydra=nothing",
    "hydra/launcher=nothing", "hydra.nothing=1", "hydra.run.dir=null",
)  # fmt: skip


def cases() -> list[Case]:
    of_keys = [case for key, kind in keys() for case in of_key(key, kind)]
    of_choices = [
        (each,)
        for group, (first, *_) in offered.choices().items()
        for each in _some(
            (f"{group}={first}x", f"{group}={{a: 1}}", f"+{group}={first}", f"~{group}", f"{group}=''",
             f"{group}={first},{first}", f"{group}@nowhere={first}"), group, 2,
        )
    ]  # fmt: skip
    return list(dict.fromkeys([*of_keys, *of_choices, *((text,) for text in SYNTAX)]))


def keys() -> list[tuple[str, Any]]:
    """(dotted name, type) of every key and group of the schema."""
    return [(key, field.type) for key, field in places(Config).items()]


def of_key(key: str, kind: Any) -> list[Case]:
    if dataclasses.is_dataclass(kind):
        values = ("nothing_like_it", "null", "3") if (offered.folder() / key).is_dir() else ("3", "null", "[a]")
        below = (f"{key}.nothing_like_it=3", f"+{key}.nothing_like_it=3", f"+{key}.nothing.like.it={{a: 1}}")
        return [(f"{key}={_some(values, key, 1)[0]}",), *((each,) for each in _some(below, key, 1))]
    kinds = set(typing.get_args(kind)) if isinstance(kind, types.UnionType) else {kind}
    null = [] if type(None) in kinds or kind is Any else ["null"]
    (kind,) = kinds - {type(None)}
    unknown = [(f"{key}x=3",)] if sum(key.encode()) % 3 == 0 else []
    return [*((f"{key}={value}",) for value in [*_wrong(key, kind), *null]), *unknown]


def _wrong(key: str, kind: Any) -> list[str]:
    """Texts that are no value of `key`."""
    text, empty, several, mapping = "text", "''", "[1]", "{a: 1}"
    if kind is Any:  # a Keras name, or a function
        return ["3", "[]", "{}", "nan", "''", "{_target_: null}", "{_target_: nowhere.f}"]
    if typing.get_origin(kind) is dict:
        return [*_some(("3", text, several), key, 1), "{_target_: nothing.there}", "{_target_: {a: 1}}"]
    if typing.get_origin(kind) is list:
        others = ["[3]", "['']", "[[]]", "[{a: 1}]", "[{_target_: nowhere.f}]"]
        return [*_some(("3", text, mapping, "true"), key, 1), *WRONG_ITEMS.get(typing.get_args(kind)[0], others)]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ["nothing_like_it", *_some((empty, "3", several, mapping, "1.5"), key, 1)]
    if kind is bool:
        return ["maybe", *_some((empty, "2.5", several, mapping), key, 1)]
    if kind is str:
        return _some((several, empty, mapping, "'  '"), key, 2)
    wrong = [*_some((text, empty, several, mapping, "true"), key, 1), *_some(("-1", f"-1{'0' * 30}"), key, 1)]
    wrong += _some(("1.5", "1e3", "nan", "'1 2'") if kind is int else ("nan", "inf", "-inf"), key, 1)
    return [*wrong, f"1{'0' * 30}", *([] if key in ZERO_IS_FINE else ["0"])]


def _some(values: tuple[str, ...], key: str, count: int) -> list[str]:
    """`count` of `values`, other ones for other keys, so that all come up."""
    start = sum(key.encode()) % len(values)
    return list((values * 2)[start : start + count])


def fault(ran: Any) -> str | None:
    """What is wrong with how a command was refused; None where it was refused as it should be."""
    started = [path for name in ("events.jsonl", "plan.json", "*.log") for path in ran.folder.rglob(name)]
    if ran.code != 2 or ran.out or started:
        return f"exit code {ran.code}, started {started}, printed {ran.out!r}"
    if len(ran.err.splitlines()) != 1 or not re.match(r"pipeline: Expected .*, received:? .*\. Try ", ran.err):
        return "not one message of what was expected and received, and what to type instead"
    return f"{untypeable(ran.err)} cannot be typed" if untypeable(ran.err) else None


def untypeable(message: str) -> list[str]:
    """What a refusal says to try that a command does not take; nothing where all of it can be typed."""
    said = message.strip().rpartition("Try ")[2].removesuffix(".")
    return [one for one in re.split(r",? or (?=[-`'\"+~\w.]+)", said) if not _is_taken(one)]


def _is_taken(said: str) -> bool:
    """True for a part of a command whose options, keys, values and choices are there, and for what is none."""
    typed = list(itertools.takewhile(TYPED.match, shlex.split(said.strip("`").partition("` ")[0])))
    typed = typed[3:] if typed[:3] == ["python", "-m", "pipeline"] else typed
    if (typed and typed[0] in VERBS) or "".join(typed[:1]).partition("=")[0].isupper():
        return True
    try:
        given = options(typed).overrides
        whole = [one for one in given if one.partition("=")[2].strip("'") not in PLACEHOLDERS]
        for one in OverridesParser.create().parse_overrides(whole):
            group, swept = one.key_or_group, one.is_sweep_override()
            if not swept:
                check_override(one, Config, group in CHOICES and not isinstance(one.value(), dict))
            chosen = [*one.sweep_string_iterator()] if swept else [str(one.value())]
            if group in CHOICES and not all(
                text.strip("'") in CHOICES[group] or LAYOUT.match(text.strip("'")) for text in chosen
            ):
                return False
    except (UserError, HydraException):
        return False
    keys = [one.partition("=")[0] for one in given]
    return all(
        key in CHOICES or not find(key.lstrip("+"))[3] or ".build." in one or "options" in one
        for key, one in zip(keys, given, strict=True)
    )


if __name__ == "__main__":
    from pipeline.commands import train
    from pipeline.launch.local import LocalCluster

    # What comes next for a config that is taken is TensorFlow's import: it is not worth waiting for.
    LocalCluster.warm_up = lambda cluster: os._exit(STARTED)  # type: ignore[method-assign]
    sys.exit(train.main(sys.argv[1:]))
