"""The verbs, in modules that are imported once they are needed."""

from importlib import import_module
from typing import Any


def module(name: str) -> Any:
    """Returns the module of a verb, or of what else is typed: `train`, `help`."""
    return import_module(f"pipeline.commands.{name}")
