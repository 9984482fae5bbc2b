"""Turns the first word of the command line into a verb's own command, or without a verb into a training."""

import difflib
import errno
import gc
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import cast

from pipeline.config.offered import choices, elsewhere, near
from pipeline.errors import UserError, unwritten

# The verbs and what each does. One that is no setting is a function of its name, from its arguments to the exit code.
VERBS = {
    "report": "writes a sweep's report: verdict, figures, page, table",
    "compare": "compares runs: what differs, which is faster, and how sure that is",
    "prepare": "converts images, tables or arrays into files that training reads fast",
    "sync": "uploads to MLflow what it missed, such as while a server was down",
    "ui": "opens MLflow's page of the runs, by speedup",
    "clean": "lists old runs, and with dry=false removes them from disk and MLflow",
    "doctor": "finds faults of this machine, or of each host of a cluster, and says what to type",
    "attach": "takes over a run whose command is gone while its processes train on",
    "predict": "predicts how fast a run would be, from logged runs",
    "explain": "trains, and explains the lost efficiency",
}
# The module and the function of what has none of its own name; without a verb it trains.
MODULES = {
    **{verb: ("results", verb) for verb in ("report", "compare", "explain", "clean")},
    **{verb: ("mlflow_store", verb) for verb in ("sync", "ui")},
    "attach": ("running", "attach"),
    "--completion": ("train", "complete"),
    "": ("train", "main"),
}
# Verbs that train, or say what training would do, and the setting that each is short for.
SETTINGS = {"predict": "mode=predict", "explain": "measure.explain=true"}
PREDICT = """python -m pipeline predict [-m] key=value ...

Predicts how fast a run would be, from logged runs; trains nothing.
It takes the keys of a run (python -m pipeline --help) and its own (python -m pipeline --help predict)."""
# What other programs call what is typed here; "" is a training, which has no verb.
ELSEWHERE = {
    **dict.fromkeys(("train", "run", "fit", "start", "launch", "main", "exec"), ""),
    **dict.fromkeys(("help", "list", "ls", "choices", "options", "usage", "show", "info", "config"), "--help"),
    **dict.fromkeys(("plan", "dry-run", "dry_run", "dryrun", "preview", "simulate"), "mode=plan"),
    **dict.fromkeys(("sweep", "multirun", "tune", "search", "benchmark", "bench"), "-m experiment=strategies"),
    **dict.fromkeys(("status", "logs", "log", "mlflow", "dashboard", "tensorboard", "runs", "results"), "ui"),
    **dict.fromkeys(("delete", "rm", "remove", "prune", "gc"), "clean"),
    **dict.fromkeys(("check", "test", "validate", "diagnose", "env"), "doctor"),
    **dict.fromkeys(("convert", "preprocess"), "prepare"),
    "version": "--version",
}

# The highest of the numbers of the standard streams.
STDERR = 2
# New objects between two looks for garbage; Python has 700.
OBJECTS = 100_000


# What the key means that most verbs have.
OUTPUT_DIR = "the folder of runs and sweeps"


@dataclass(frozen=True)
class Verb:
    """A command made of a function, whose name, words, keys and help are its name, parameters and docstring."""

    do: FunctionType
    words: str
    means: Mapping[str, str]

    @property
    def keys(self) -> dict[str, str]:
        """Its keys, each with its default, "" where it has none."""
        return dict(self.do.__kwdefaults__ or {})

    @property
    def usage(self) -> str:
        """Its form, in a line."""
        keys = [f"[{name}={default or '...'}]" for name, default in self.keys.items()]
        return " ".join(filter(None, ["python -m pipeline", self.do.__name__, self.words, *keys]))

    def __call__(self, arguments: Sequence[str]) -> int:
        """Runs the verb; returns the exit code, 2 for what is refused."""
        from pipeline.views.terminal import say_error

        if {"-h", "--help"} & set(arguments):
            keys = [f"  {name:<{max(map(len, self.keys))}}  {self.means.get(name, OUTPUT_DIR)}" for name in self.keys]
            print("\n".join([self.usage, "", (inspect.getdoc(self.do) or "").replace("\n\n", "\n"), "", *keys]))
            return 0
        try:
            words, values = self.typed(arguments)
            return int(self.do(*words, **values))
        except UserError as error:
            say_error(str(error))
        except OSError as error:
            if error.filename is None:
                raise
            say_error(str(UserError(f"to be able to use {error.filename}", error.strerror, self.usage)))
        return 2

    def typed(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """(Words, values of keys) that were typed. Raises `UserError`."""
        words, values, verb = list[str](), self.keys, self.do.__name__
        for place, argument in enumerate(arguments):
            name, equals, value = argument.partition("=")
            closest = near(name.lstrip("-").replace("-", "_"), values)
            if argument.startswith("-"):
                value = value if equals else "".join(arguments[place + 1 : place + 2])
                instead = f"{closest[0]}={shlex.quote(value) if value else '..'}" if closest else f"`{self.usage}`"
                raise UserError("key=value", name, instead)
            if equals and name in values:
                values[name] = value
            elif equals and "/" not in name:
                raise UserError(f"a key of {verb} ({', '.join(values)})", name, f"{(closest or [*values])[0]}={value}")
            else:
                words.append(argument)  # which may be a path with "=" in it
        try:
            inspect.signature(self.do).bind(*words, **values)
        except TypeError:
            raise UserError(f"{self.words or 'no words'} after {verb}", " ".join(words) or "none", self.usage) from None
        return words, values


def verb(words: str = "", **means: str) -> Callable[[Callable[..., int]], Verb]:
    """Makes a function a command: `words` is the form of what is typed after it, and `means` tells of its keys."""
    return lambda do: Verb(cast("FunctionType", do), words, means)


def is_true(name: str, value: str) -> bool:
    """Returns the value of a key that is true or false. Raises `UserError`."""
    if value not in ("true", "false"):
        raise UserError(f"{name} to be true or false", value or "nothing", f"{name}=true")
    return value == "true"


def main() -> int:
    """Runs the command line; returns the exit code."""
    # To look for garbage among what is imported, on the way and again at the end, takes a third of the time of --help.
    gc.set_threshold(OBJECTS)
    # Streams that are closed, as a daemon's may be, lead nowhere; else files that are opened took their place.
    while (opened := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(opened, True)
    os.close(opened)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        setattr(sys, name, getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    try:
        os.getcwd()
    except OSError as error:
        print(f"pipeline: {UserError('a working folder', error.strerror, 'cd to one that is there')}", file=sys.stderr)
        return 2
    code = None
    try:
        code = _run()
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        if not code and error.errno != errno.EPIPE:
            print(f"pipeline: {unwritten(error)}", file=sys.stderr)
        # Else Python writes what is left once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        gc.freeze()
    # One that its output has ended has not done what was asked.
    return 1 if code is None else code


def _run() -> int:
    verb, *arguments = sys.argv[1:] or [""]
    if verb in ("-h", "--help") and arguments[:1] and arguments[0] in VERBS:
        verb, arguments = arguments[0], ["--help"]
    helps = {"-h", "--help"} & set(arguments)
    if verb == "predict" and helps:
        print(PREDICT)
        return 0
    if verb in SETTINGS and not (verb == "explain" and (helps or _is_word("".join(arguments[:1])))):
        verb, arguments = "", [*arguments, SETTINGS[verb]]
    elif verb not in VERBS and verb != "--completion":
        if _is_word(verb):
            print(f"pipeline: {unknown(verb, arguments)}", file=sys.stderr)
            return 2
        verb, arguments = "", sys.argv[1:]
    module, does = MODULES.get(verb, (verb, verb))
    try:
        return int(getattr(import_module(f"pipeline.commands.{module}"), does)(arguments))
    except ModuleNotFoundError as error:
        if verb != "doctor" or str(error.name).startswith("pipeline"):
            raise
        # What the doctor lacks is a finding too.
        expected = f"Python's module {error.name} to be installed in {sys.prefix}"
        instead = "python -m pip install --require-hashes -r requirements.lock"
        print(f"pipeline: {UserError(expected, 'none', instead)}", file=sys.stderr)
        return 3


def unknown(word: str, arguments: Sequence[str] = ()) -> UserError:
    """Returns what is wrong with a word that is no verb.

    >>> unknown("reprot", ["mine"]).try_this
    'python -m pipeline report mine'
    """
    instead = f"python -m pipeline {' '.join(_instead(word, list(arguments)))}".strip()
    instead = f"`{instead}`" if instead.endswith("--help") else instead
    return UserError(f"a verb ({', '.join(VERBS)}) or key=value", word, instead)


def _instead(word: str, arguments: list[str]) -> list[str]:
    """Returns what to type after `python -m pipeline` in place of a word and what follows it.

    >>> _instead("train", ["workers=2", "--fast"]), _instead("strategy", ["=", "miror", "-m"]), _instead("resume", [])
    (['workers=2'], ['strategy=mirrored', '-m'], ['resume=auto'])
    >>> _instead("python", ["-m", "pipeline", "train", "workers=2"]), _instead("list", ["models"])
    (['workers=2'], ['--help'])
    """
    # Only where something is wrong: what knows Hydra's errors takes a moment to import.
    from pipeline.config.instead import find, fitting, keys, meant, meant_by_key

    if arguments and (word.startswith("python") or word in ("pipeline", "-m")):
        # The start of a command, typed once more.
        following, *rest = arguments
        return [following, *rest] if following in VERBS or "=" in following else _instead(following, rest)
    # Of what follows, what can be typed behind anything.
    settings = [shlex.quote(argument) for argument in arguments if "=" in argument.strip("=")]
    settings += [argument for argument in arguments if argument in ("-m", "--multirun")]
    key, _, value = word.partition(":")
    # The first word that follows.
    value = next((argument for argument in (value, *arguments) if _is_word(argument.strip("="))), "").strip("=")
    settable = key in choices() or (key not in keys(groups=True) and not find(key)[3])
    if settable and (value or key == "resume"):
        return [fitting(f"{key}={value or 'auto'}"), *settings]
    if lines := elsewhere(key, value):
        return [*map(fitting, lines[:1]), *settings]
    if word not in ELSEWHERE and (verb := difflib.get_close_matches(word, VERBS, 1)):
        return [verb[0], *map(shlex.quote, arguments)]
    if word not in ELSEWHERE and value and (lines := meant_by_key(key, value=value)):
        return [lines[0], *settings]
    closest = ELSEWHERE[word] if word in ELSEWHERE else meant(word) or "--help"
    return [closest] if closest == "--help" else [*filter(None, [closest]), *settings]


def _is_word(argument: str) -> bool:
    return bool(argument) and "=" not in argument and not argument.startswith(("-", "+", "~"))
