"""Turns the arguments of a verb into words and the values of its keys: `RUN RUN output_dir=there`.

A training and `prepare` compose a config of what was typed; every other verb is asked for something in this one way.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.near import near
from pipeline.errors import UserError


@dataclass(frozen=True)
class Key:
    """A key of a verb: its default, None where it has none, and what it means."""

    name: str
    default: str | None
    said: str


# Where the runs are that a verb looks at.
OUTPUT_DIR = Key("output_dir", "outputs", "the folder of runs and sweeps")


@dataclass(frozen=True)
class Verb:
    """How a verb is typed: its name, its words, what it does, and its keys."""

    name: str
    words: str
    does: str
    keys: tuple[Key, ...] = (OUTPUT_DIR,)

    @property
    def usage(self) -> str:
        """Its form, in a line."""
        keys = [f"[{key.name}={'...' if key.default is None else key.default}]" for key in self.keys]
        return " ".join(["python -m pipeline", self.name, *([self.words] if self.words else []), *keys])

    def help(self) -> str:
        """The page of its `--help`."""
        widest = max(len(key.name) for key in self.keys)
        keys = [f"  {key.name:<{widest}}  {key.said}" for key in self.keys]
        return "\n".join([self.usage, "", self.does, "", *keys])

    def asked(self, arguments: Sequence[str]) -> "Asked":
        """What was typed. Raises `UserError`."""
        words: list[str] = []
        values = {key.name: key.default for key in self.keys}
        for place, argument in enumerate(arguments):
            name, equals, value = argument.partition("=")
            if argument.startswith("-"):
                raise UserError(self._option(name, value if equals else "".join(arguments[place + 1 : place + 2])))
            # What is there by that name is a word, whatever is in it.
            if not equals or (name not in values and "/" in name):
                words.append(argument)
            elif name in values:
                values[name] = value
            else:
                closest = near(name, values) or [self.keys[0].name]
                raise UserError(f"a key of {self.name} ({', '.join(values)})", name, f"{closest[0]}={value}")
        return Asked(tuple(words), values)

    def _option(self, option: str, value: str) -> str:
        """What is wrong with an option: keys are typed as elsewhere."""
        name = option.lstrip("-").replace("-", "_")
        closest = near(name, [key.name for key in self.keys])
        instead = f"{closest[0]}={shlex.quote(value) or '...'}" if closest else f"`{self.usage}`"
        return f"Expected key=value, received {option}. Try {instead}."


@dataclass(frozen=True)
class Asked:
    """The words of a verb and the values of its keys."""

    words: tuple[str, ...]
    values: dict[str, str | None]

    def __getitem__(self, name: str) -> str:
        return self.values[name] or ""


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Is the page of `--help` wanted?"""
    return bool({"-h", "--help"} & set(arguments))
