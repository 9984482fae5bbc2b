"""What a name in a config stands for: one of ours, or what an installed package offers as an entry point."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.config.near import near
from pipeline.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def find(kind: str, name: str, key: str, ours: Mapping[str, str], instead: str) -> Any:
    """What `name` stands for: of `ours` (names to "module:attribute"), or an entry point of the group `pipeline.KIND`.

    `key` is where a person types the name, `instead` what they may type in its place. Raises `UserError`.
    """
    offered = check(kind, name, key, ours, instead)
    if name in ours:
        module, _, attribute = ours[name].partition(":")
        return getattr(import_module(module), attribute)
    try:
        return offered[name].load()
    except Exception as error:
        raise UserError(
            f"{offered[name].value}, which a package offers as {key}={name}, to be there",
            f"{type(error).__name__}: {error}",
            f"{instead}, or install that package again",
        ) from error


def check(kind: str, name: str, key: str, ours: Mapping[str, str], instead: str) -> "dict[str, EntryPoint]":
    """What packages offer of a kind, by name, where `name` is not of `ours`. Raises `UserError` where nothing is.

    Imports nothing of theirs.
    """
    if name in ours:
        return {}
    # Reads a file of each package that is installed.
    from importlib import metadata

    offered = {point.name: point for point in metadata.entry_points(group=f"pipeline.{kind}")}
    if name not in offered:
        names = ", ".join(sorted({*ours, *offered})) or "none is installed"
        closest = near(name, [*ours, *offered])
        instead = f"{key}={closest[0]}" if closest else instead
        raise UserError(f"{key} to be one that is there ({names})", name, f"{instead}")
    return offered
