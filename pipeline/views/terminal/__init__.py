"""Turns a plan, a run's events and its result into what a person reads on the terminal.

It records nothing, decides nothing and reads no clock: time comes in with each event. Rich is imported when
something is drawn, so that importing this package costs next to nothing.
"""

from pipeline.views.terminal.live import Board, Progress, Terminal
from pipeline.views.terminal.result import result_table, tracked
from pipeline.views.terminal.sweep_table import sweep_table
from pipeline.views.terminal.verdict_text import compared_lines
from pipeline.views.terminal.words import console_on, error_text, say, say_error

__all__ = [
    "Board",
    "Progress",
    "Terminal",
    "compared_lines",
    "console_on",
    "error_text",
    "result_table",
    "say",
    "say_error",
    "sweep_table",
    "tracked",
]
