"""Finds what there is to choose: the configs that this program brings along, and what installed packages offer."""

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.near import near
from pipeline.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# Hardware without a file of its own, as it is completed and offered: any number of hosts and devices is as good.
LAYOUTS = ("1cpu", "2cpu", "4cpu", "8cpu", "1gpu", "2gpu", "4gpu", "8gpu", "2x1cpu", "2x4gpu")


def folder() -> Path:
    """Returns the folder of the choices: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def defaults() -> dict[str, str]:
    """Returns the choice of each group that has one by default."""
    lines = re.findall(r"^  - (\w+): (\S+)", (folder() / "config.yaml").read_text(), re.M)
    return {group: choice for group, choice in lines if choice != "null"}


def is_checkout_here() -> bool:
    """True in the folder of a checkout, which has a Makefile."""
    return folder().parent == Path.cwd() and Path("Makefile").is_file()


def choices() -> dict[str, list[str]]:
    """Returns the shipped choices of each group, by the names of their files, and layouts of hardware."""
    groups = sorted(path for path in folder().iterdir() if path.is_dir())
    names = {group.name: sorted(path.stem for path in group.glob("[!_]*.yaml")) for group in groups}
    return names | {"hardware": [*names["hardware"], *LAYOUTS]}


def load_offer(kind: str, name: str, key: str, ours: Mapping[str, str], instead: str) -> Any:
    """Returns what `name` stands for: one of `ours` ("module:attribute"), or an entry point of the group pipeline.KIND.

    `key` is where a person types the name, `instead` what they may type in its place. Raises `UserError`.
    """
    offered = check_offer(kind, name, key, ours, instead)
    if name in ours:
        module, _, attribute = ours[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    try:
        return offered[name].load()
    except Exception as error:
        raise UserError(
            f"{offered[name].value}, which a package offers as {key}={name}, to be there",
            f"{type(error).__name__}: {error}",
            f"{instead}, or install that package again",
        ) from error


def check_offer(kind: str, name: str, key: str, ours: Mapping[str, str], instead: str) -> dict[str, "EntryPoint"]:
    """Returns what packages offer of a kind, by name, where `name` is not of `ours`. Raises `UserError` for no name.

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
