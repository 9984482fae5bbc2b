"""Refuses what a config would have Hydra itself do beyond writing its files: other programs, other classes."""

from collections.abc import Mapping

from pipeline.config.json import Json
from pipeline.errors import UserError

# What Hydra may make by itself: its own parts, and what its logging is made of.
HYDRA_S_OWN = ("hydra.", "hydra_plugins.")


LOGGING = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "colorlog.ColoredFormatter")


# Of Hydra's parts, those that only its basic one may be, and why.
ALONE = {
    "launcher": "points that run side by side spoil each other's timing",
    "sweeper": "all points are known before the first one runs",
}


def check_hydra(node: Json, key: str) -> None:
    """Refuses functions that are not Hydra's in Hydra's own part of a config, and environment variables.

    >>> check_hydra({"_target_": "os.system"}, "hydra.callbacks.x")
    Traceback (most recent call last):
    pipeline.errors.UserError: Expected hydra.callbacks.x._target_ to be one of Hydra's own, received \
os.system. Try without it.
    """
    if isinstance(node, list):
        for index, item in enumerate(node):
            check_hydra(item, f"{key}[{index}]")
    if not isinstance(node, dict):
        return
    for name, inner in node.items():
        own = str(inner).startswith(HYDRA_S_OWN) if name == "_target_" else inner in LOGGING
        if (name in ("_target_", "()") or (name == "class" and "logging" in key)) and not own:
            raise UserError(f"{key}.{name} to be one of Hydra's own", inner, "without it")
        if name == "env_set" and inner:
            raise UserError(
                "environment variables to be set in the shell",
                f"{key}.env_set with {', '.join(map(str, inner))}",
                "NAME=value before the command",
            )
        check_hydra(inner, f"{key}.{name}")


def check_alone(hydra: Mapping[str, Json], choices: Mapping[str, str | None]) -> None:
    """Refuses what would run the points of a sweep in another way than one after the other."""
    for name in ALONE:
        node = hydra.get(name)
        target = node.get("_target_") if isinstance(node, dict) else node
        if target != f"hydra._internal.core_plugins.basic_{name}.Basic{name.capitalize()}":
            choice = choices.get(f"hydra/{name}")
            raise UserError(not_alone(name, target if choice in (None, "basic") else choice))


def not_alone(name: str, received: object) -> str:
    """What is wrong with a launcher or sweeper of Hydra's that is not its basic one.

    >>> not_alone("sweeper", "optuna")
    'Expected hydra/sweeper=basic, since all points are known before the first one runs, received optuna. \
Try without it.'
    """
    named = "null" if received is None else received
    return f"Expected hydra/{name}=basic, since {ALONE[name]}, received {named}. Try without it."
