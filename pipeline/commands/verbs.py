"""Turns the first word of the command line into what it asks for: a verb's own command, or without one a training.

    python -m pipeline [VERB] ...

What a verb needs is imported once it is asked for.
"""

import difflib
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

# The verbs, and the modules whose `main` takes their arguments and returns the exit code.
COMMANDS = {
    "report": "pipeline.commands.report",
    "compare": "pipeline.commands.compare",
    "prepare": "pipeline.commands.prepare",
    "sync": "pipeline.commands.sync",
    "ui": "pipeline.commands.ui",
    "clean": "pipeline.commands.clean",
    "doctor": "pipeline.commands.doctor",
    "attach": "pipeline.commands.attach",
}
DOCTOR = "doctor"
# Those that train, or say what training would do, and what they are short for.
SETTINGS = {"predict": "mode=predict", "explain": "measure.explain=true"}
# What each does, in a few words for the page of `--help`.
DOES = {
    "report": "writes a sweep's report again: verdict, figures, page, table",
    "compare": "says which of several runs is faster, how sure that is, and what differs",
    "prepare": "turns images, tables or arrays into files that training reads fast",
    "sync": "sends to MLflow what a server that was down has missed",
    "ui": "opens MLflow at the runs by speedup",
    "clean": "removes old runs from disk and MLflow together, once it has said which",
    "doctor": "says what is wrong with this machine, or with each host of a cluster, and what to type",
    "attach": "takes the place of a run's command that is gone, and whose processes train on",
    "predict": "says how fast a training would be, from the runs that were logged",
    "explain": "trains, and says what the lost efficiency was made of",
}
# What is said of those that train.
HELP = {
    "predict": "python -m pipeline predict [-m] key=value ...\n\n"
    "Says how fast a training would be, from the runs that were logged; trains nothing.\n"
    "Keys are those of a training: python -m pipeline --help. Those of its own: python -m pipeline --help predict.",
    "explain": "python -m pipeline explain key=value ...\npython -m pipeline explain RUN [output_dir=outputs]\n\n"
    "Trains, and takes apart what efficiency was lost to; of a RUN that was explained, says it again.\n"
    "Keys are those of a training: python -m pipeline --help.",
}
VERBS = (*COMMANDS, *SETTINGS)
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


def main() -> int:
    """The command line; returns the exit code."""
    verb, *arguments = sys.argv[1:] or [""]
    if verb in ("-h", "--help") and arguments[:1] and arguments[0] in VERBS:
        verb, arguments = arguments[0], ["--help"]
    if verb == "--completion":
        return int(import_module("pipeline.commands.completion").main(arguments))
    if verb == DOCTOR:
        return _doctor(arguments)
    if verb in COMMANDS:
        return int(import_module(COMMANDS[verb]).main(arguments))
    if verb == "explain" and arguments and _is_word(arguments[0]):
        return int(import_module("pipeline.commands.explain").main(arguments))
    if verb in SETTINGS:
        if {"-h", "--help"} & set(arguments):
            print(HELP[verb])
            return 0
        return int(import_module("pipeline.commands.train").main([*arguments, SETTINGS[verb]]))
    if _is_word(verb):
        print(f"pipeline: {unknown(verb, arguments)}", file=sys.stderr)
        return 2
    return int(import_module("pipeline.commands.train").main(sys.argv[1:]))


def _doctor(arguments: Sequence[str]) -> int:
    """What the doctor finds, or that it lacks what it is made of, which is a finding too."""
    try:
        return int(import_module(COMMANDS[DOCTOR]).main(arguments))
    except ModuleNotFoundError as error:
        if str(error.name).startswith("pipeline"):
            raise
        print(
            f"pipeline: Expected Python's module {error.name} to be installed in {sys.prefix}, received none. "
            f"Try python -m pip install --require-hashes -r requirements.lock.",
            file=sys.stderr,
        )
        return 3


def unknown(word: str, arguments: Sequence[str] = ()) -> str:
    """Returns what is wrong with a word that is no verb.

    >>> unknown("reprot", ["mine"]).partition(" or ")[2]
    'key=value, received reprot. Try python -m pipeline report mine.'
    """
    instead = f"python -m pipeline {' '.join(_instead(word, list(arguments)))}".strip()
    if instead.endswith("--help"):
        instead = f"`{instead}`"
    return f"Expected a verb ({', '.join(VERBS)}) or key=value, received {word}. Try {instead}."


def _instead(word: str, arguments: list[str]) -> list[str]:
    """Returns what to type after `python -m pipeline` in place of a word and what follows it.

    >>> _instead("train", ["workers=2", "--fast"]), _instead("strategy", ["=", "miror", "-m"]), _instead("resume", [])
    (['workers=2'], ['strategy=mirrored', '-m'], ['resume=auto'])
    >>> _instead("python", ["-m", "pipeline", "train", "workers=2"]), _instead("list", ["models"])
    (['workers=2'], ['--help'])
    """
    # Only where something is wrong: what knows Hydra's errors takes a moment to import.
    from pipeline.config.instead import find, fitting, groups_of, meant, meant_by_key
    from pipeline.config.near import elsewhere
    from pipeline.config.shipped import choices

    if arguments and (word.startswith("python") or word in ("pipeline", "-m")):
        # The start of a command, typed once more.
        following, *rest = arguments
        return [following, *rest] if following in VERBS or "=" in following else _instead(following, rest)
    # Of what follows, what can be typed behind anything.
    settings = [shlex.quote(argument) for argument in arguments if "=" in argument.strip("=")]
    settings += [argument for argument in arguments if argument in ("-m", "--multirun")]
    key, _, value = word.partition(":")
    values = [*filter(None, [value]), *(argument for argument in arguments if _is_word(argument.strip("=")))]
    settable = key in choices() or (key not in groups_of() and not find(key)[3])
    if settable and (values or key == "resume"):
        return [fitting(f"{key}={(values or ['auto'])[0].strip('=')}"), *settings]
    if lines := elsewhere(key, (values or [""])[0].strip("=")):
        return [*map(fitting, lines[:1]), *settings]
    if word in ELSEWHERE:
        closest = ELSEWHERE[word]
    elif verb := difflib.get_close_matches(word, VERBS, 1):
        return [verb[0], *map(shlex.quote, arguments)]
    elif values and (lines := meant_by_key(key, value=values[0].strip("="))):
        return [lines[0], *settings]
    else:
        closest = meant(word) or "--help"
    return [closest] if closest == "--help" else [*filter(None, [closest]), *settings]


def _is_word(argument: str) -> bool:
    """Is this neither an option nor an override of Hydra's?"""
    return bool(argument) and "=" not in argument and not argument.startswith(("-", "+", "~"))
