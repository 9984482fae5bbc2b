"""Errors of a model or a training, and what an error of a user's own code says in one line."""

import itertools
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Sequence

from pipeline.errors import UserError

# Where functions are that are not a user's own.
NOT_ONES_OWN = (
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)
# Of a reason; a longer one is in the log.
MOST_LETTERS = 400
STYLES = re.compile(r"\x1b\[\d*m")
# What Keras writes above a reason that it passes on.
ABOVE = re.compile(
    r"Exception encountered when calling [^\n]*\n+|"
    r"(?s:.)*?Error encountered:\s*|(?s:.)*?Exception encountered:\s*(?P<quotes>'*)"
)
# What Keras and TensorFlow write below it: arguments, the traceback of a Python function, nodes, and further errors.
BELOW = re.compile(
    r"(?:^|\n+)\s*(?:(?:Call a|A)rguments received by |Traceback \(most recent|Stack trace for op|\[\[|\(1\) [A-Z_]+:)"
)
# What TensorFlow writes of a function that it traces above what that raised, and above the reason of a graph's error.
TRACED = re.compile(
    r"(?s:.*?\n|)in user code:\n\n(?P<frames>(?:    .*\n|\n)+?)    (?P<kind>[\w.]+): (?P<reason>(?s:.*))"
)
IN_GRAPH = re.compile(r"Graph execution error|Detected at node|<stack traces|\s*File |\d+ root error|\s*\[\[")
# What it writes around a reason: a number and kind of error, functions, operations and nodes.
AROUND = re.compile(r"^\(\d+\) [A-Z_]+: *|\{\{function_node [^}]*\}\} *|\s*\[Op:\w+\].*$| for '\{\{node [^']*'")
KIND = re.compile(r"([A-Za-z_]+(?:Error|Exception)): (.*)", re.S)
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
# Where an error says it came up, and so many letters of its reason as are looked for in a log.
PLACE, START = re.compile(r" \([^()]+:\d+\)"), 60
# A frame of a traceback in a log, and what Python writes between two that belong together.
LOGGED = re.compile(r'^  File "(?P<file>.+)", line \d+, in .+\n(?:    .+\n)*', re.M)
CHAINED = ("direct cause of the following exception:", "another exception occurred:")
# What JAX chains to an error, which tells of JAX alone.
OF_JAX = ("JaxStackTraceBeforeTransformation", "UnfilteredStackTrace", "SimplifiedTraceback")


class ModelError(UserError):
    """A model that cannot be trained here: the message says what was expected and received."""


class TrainingError(UserError):
    """Training that cannot go on: the message says why and what to try."""


def told(error: BaseException) -> str:
    """Returns an error in one line for a user: our own messages as they stand, others as their reason."""
    error = _raised(error)
    if "Could not start gRPC server" in str(error):
        return "Expected a free port, received one that another program listens on. Try cluster.base_port=null."
    first = next((line.strip() for line in _text(error).splitlines() if line.strip()), "")
    return first if isinstance(error, UserError) or first.startswith("Expected ") else reason(error)


def reason(error: BaseException) -> str:
    """Returns what an error says in one line, the reason first, then where in a user's own files it came up."""
    error = _raised(error)
    kind, text, place = type(error).__name__, _text(error), _place(error)
    while match := TRACED.match(text) or ABOVE.match(text):
        if match.re is TRACED:
            kind, text = match["kind"].rpartition(".")[2], match["reason"]
            place = _own(FRAME.findall(match["frames"])) or place
        else:
            text = text[match.end() :].strip()
            text = text[: len(text) - len(match["quotes"] or "")]
    # Without the lines that say where in a graph it came up.
    rest = "\n".join(itertools.dropwhile(lambda line: IN_GRAPH.match(line) or not line.strip(), text.splitlines()))
    lines = [line for line in BELOW.split(rest, maxsplit=1)[0].splitlines() if line.strip()]
    text_of_error = " ".join(AROUND.sub("", line.strip()) for line in lines)
    if match := KIND.fullmatch(text_of_error):
        # What a function of Python raised within a graph.
        kind, text_of_error = match.groups()
        if kind == TrainingError.__name__:
            return text_of_error
    if not text_of_error and place is not None:
        text_of_error = linecache.getline(*place).strip()
    if len(text_of_error) > MOST_LETTERS:
        text_of_error = f"{text_of_error[:MOST_LETTERS].rpartition(' ')[0]} ..."
    where = ""
    if place is not None:
        file, line = place
        where = f" ({os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file}:{line})"
    cause = error.__cause__
    if cause is not None and type(cause).__name__ not in OF_JAX and _text(cause) and _text(cause) not in str(error):
        return f"{kind}: {text_of_error}{where}, from {reason(cause)}"
    return (f"{kind}: {text_of_error}" if text_of_error else kind) + where


def _raised(error: BaseException) -> BaseException:
    """The error that another one stands for: TensorFlow wraps that of a step that a coordinator handed out."""
    # Keras makes errors anew with words of its own, which those of JAX about a traced value do not take.
    if isinstance(error, AttributeError) and "_error_repr" in str(error) and error.__context__ is not None:
        return _raised(error.__context__)
    return getattr(error, "original_exception", error)


def _text(error: BaseException) -> str:
    return STYLES.sub("", str(getattr(error, "message", None) or error)).strip()


def _place(error: BaseException) -> tuple[str, int] | None:
    """The file and line of a user's own code that an error came through last, or those that it came of."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    before = error.__cause__ or error.__context__
    # The text of a graph's error knows where the operation was made, the traceback where the graph was run.
    return _own(FRAME.findall(str(error))) or _own(frames) or (None if before is None else _place(before))


def _own(frames: Sequence[tuple[str, str | int]]) -> tuple[str, int] | None:
    # XLA leaves out the first slash.
    absolute = [(file if file.startswith(("/", "<")) else f"/{file}", int(line)) for file, line in frames]
    return next((one for one in reversed(absolute) if is_own(one[0]) and os.path.exists(one[0])), None)


def is_own(file: str) -> bool:
    """True for a file that is neither Python's, nor an installed package's, nor this program's."""
    return not file.startswith(("<", *NOT_ONES_OWN)) and "__autograph_generated" not in file


def own_frames(log: str, error: str) -> list[str] | None:
    r"""The lines of a log's last traceback that are of a person's own functions; None if it is not that of `error`.

    >>> frame = '  File "/home/me/mine.py", line 3, in model\n    raise ValueError("no")\n'
    >>> own_frames(f"Traceback (most recent call last):\n{frame}ValueError: no\n", "ValueError: no")
    ['File "/home/me/mine.py", line 3, in model', '  raise ValueError("no")']
    """
    _, *tracebacks = re.split(r"^Traceback \(most recent call last\):\n", log, flags=re.M)
    # In one line, without what Keras and TensorFlow write around it, and with the place behind.
    start = " ".join(PLACE.split(error.partition(": ")[2] or error)[0].split())[:START]
    if not tracebacks or start not in " ".join(tracebacks[-1].split()):
        return None
    chain = [tracebacks.pop()]
    while tracebacks and tracebacks[-1].rstrip().endswith(CHAINED):
        chain.insert(0, tracebacks.pop())
    frames = (frame[0].splitlines() for frame in LOGGED.finditer("".join(chain)) if is_own(frame["file"]))
    return [line[2:] for lines in frames for line in lines if line.strip(" ^~")]
