"""Prints lines and errors on a console, broken to its width."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from pipeline.views.terminal.words import fitted, lines_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

# Wider than any line, so that a path on a pipe stays in one piece.
NO_WIDTH = 10_000
# What a line is about, before what it says, as `plan       cnn on mnist5k`.
LABEL = re.compile(r"\w[\w ]{0,9}?\s{2,}(?=\S)")
# How a line begins that is to be typed.
COMMAND = "python -m pipeline "


def console_on(stream: TextIO) -> Console:
    """A console that wraps to a terminal's width, and on a pipe or in a file never wraps and moves no cursor.

    Characters that the stream's encoding lacks become "?", so that no message ends in an encoding error.
    """
    from rich.console import Console

    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    on_terminal = stream.isatty()
    return Console(
        file=stream,
        markup=False,
        highlight=False,
        emoji=False,
        width=None if on_terminal else NO_WIDTH,
        # FORCE_COLOR makes Rich take a pipe for a terminal: colours may stay, a moving cursor may not.
        force_interactive=None if on_terminal else False,
    )


def say(console: Console, text: str) -> None:
    """Prints a line; on a narrow terminal in several, broken between words and indented under what its label says.

    A command is left whole, to be copied.
    """
    from rich.text import Text

    label = LABEL.match(text)
    indent = len(label[0]) if label else len(text) - len(text.lstrip()) + 4 * (len(text) > console.width)
    lines = [text] if text.startswith(COMMAND) else fitted(text, console.width, indent)
    console.print(Text("\n".join(lines)), soft_wrap=True)


def texts(line: str, width: int, style: str = "", indent: int | None = None) -> Iterator[Text]:
    """Yields a line in parts of at most `width`, broken between words and indented as it, or by so much."""
    from rich.text import Text

    indent = len(line) - len(line.lstrip()) if indent is None else indent
    for part in fitted(line, width, indent):
        yield Text(part, style=style, no_wrap=True, overflow="ignore")


class Fitted:
    """Something that Rich prints: the texts that fit into a console's width, which `make` returns."""

    def __init__(self, make: Callable[[int], Iterable[Text]]) -> None:
        self._make = make

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields what Rich prints."""
        yield from self._make(options.max_width)


class Lines(Fitted):
    """Lines that are broken between words, under a bold `header`."""

    def __init__(self, lines: Sequence[str], header: str = "") -> None:
        styled = [*[(header, "bold")] * bool(header), *((line, "") for line in lines)]
        super().__init__(lambda width: (text for line, style in styled for text in texts(line, width, style)))


def say_error(message: str) -> None:
    """Prints an error as one message to stderr."""
    console = console_on(sys.stderr)
    for line in error_text(message).splitlines():
        say(console, line)


def error_text(message: str) -> str:
    """An error as one message for stderr; lines after the first are indented.

    >>> error_text("Expected workers to be 1 or more, received 0. Try workers=1.")
    'pipeline: Expected workers to be 1 or more, received 0. Try workers=1.'
    """
    first, *rest = lines_of(message) or ["stopped, and no reason was given"]
    return "\n".join([f"pipeline: {first}", *(f"    {line}" for line in rest)])
