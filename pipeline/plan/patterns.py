"""Which pattern of a written layout each name matches: of layers under TensorFlow, of variables under JAX."""

import difflib
import re
from collections.abc import Iterable, Sequence

from pipeline.errors import UserError

# How many names an error says.
NAMED = 12


def matched(patterns: Iterable[str], names: Sequence[str], whole: str) -> dict[str, str]:
    """The pattern that matches each name whole, without those that none matches; `whole` says what a name is.

    Refused are patterns that match nothing, and two that match one name. Raises `UserError`.

    >>> matched(["a_.", "b"], ["a_0", "b", "c"], "a layer's whole name")
    {'a_0': 'a_.', 'b': 'b'}
    """
    by: dict[str, str] = {}
    for pattern in patterns:
        found = [name for name in names if re.fullmatch(pattern, name)]
        if not found:
            raise UserError(
                f"each pattern of strategy.build.layout to match {whole}",
                f"{pattern}, which matches none of {_some(names)}",
                f"{_near(pattern, names)}, or strategy.build.layout=null",
            )
        for name in found:
            if name in by:
                raise UserError(
                    f"one pattern of strategy.build.layout to match {whole}",
                    f"{by[name]} and {pattern}, which both match {name}",
                    "a narrower pattern",
                )
            by[name] = pattern
    return by


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _near(pattern: str, names: Sequence[str]) -> str:
    """A pattern that matches: what was meant may stand for a part of a name, or be mistyped."""
    wider = f".*{pattern}.*"
    if any(re.fullmatch(wider, name) for name in names):
        return wider
    return re.escape(difflib.get_close_matches(pattern, names, 1, 0)[0])
