"""Finds the configs that this program brings along, and the choices among them."""

import re
from pathlib import Path

# Hardware without a file of its own, as it is completed and offered: any number of hosts and devices is as good.
LAYOUTS = ("1cpu", "2cpu", "4cpu", "8cpu", "1gpu", "2gpu", "4gpu", "8gpu", "2x1cpu", "2x4gpu")


def folder() -> Path:
    """Where the choices are: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parents[1]
    inside = here / "conf"
    return inside if inside.is_dir() else here.parent / "conf"


def defaults() -> dict[str, str]:
    """The choice of each group that has one where none is typed."""
    lines = re.findall(r"^  - (\w+): (\S+)", (folder() / "config.yaml").read_text(), re.M)
    return {group: choice for group, choice in lines if choice != "null"}


def is_checkout_here() -> bool:
    """Is this the folder of a checkout, whose `make` has what is to be typed?"""
    return folder().parent == Path.cwd() and Path("Makefile").is_file()


def choices() -> dict[str, list[str]]:
    """The choices of each group that are shipped, by the names of their files, and layouts of hardware."""
    groups = sorted(path for path in folder().iterdir() if path.is_dir())
    found = {group.name: sorted(path.stem for path in group.glob("[!_]*.yaml")) for group in groups}
    return found | {"hardware": [*found["hardware"], *LAYOUTS]}
