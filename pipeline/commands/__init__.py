"""One short module a verb, each of which is imported once it is typed."""

from importlib import import_module
from typing import Any


def module(name: str) -> Any:
    """Returns the module of a verb, or of what else is typed: `train`, `help`."""
    return import_module(f"pipeline.commands.{name}")
