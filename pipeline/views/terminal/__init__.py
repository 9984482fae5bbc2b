"""Turns a plan, a run's events and its result into what a person reads on the terminal.

It records nothing and reads no clock. Rich is imported when something is drawn: importing this costs next to nothing.
"""

from pipeline.views.terminal.words import console_on, error_text, say, say_error

__all__ = ["console_on", "error_text", "say", "say_error"]
