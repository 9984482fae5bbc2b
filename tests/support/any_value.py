"""Values of our records' types, whatever their fields can hold."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import hypothesis
from hypothesis import strategies as st

# Alike in every process that runs tests, and few: each field has other values in each.
few = hypothesis.settings(max_examples=5, database=None, deadline=None, derandomize=True)
TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    float: st.floats(allow_nan=False, allow_infinity=False),
    int: st.integers(-(2**53), 2**53),
}
PLAIN[object] = PLAIN[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), *PLAIN.values()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type: a dataclass, Struct or named tuple with all its fields, a collection, or a plain one."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, UnionType):
        return st.one_of(map(any_of, inner))
    if origin in (dict, Mapping):
        return st.dictionaries(*map(any_of, inner), max_size=2)
    if origin is tuple and inner[-1] is not ...:
        return st.tuples(*map(any_of, inner))
    if origin in (list, tuple):
        return st.lists(any_of(inner[0]), max_size=2).map(origin)
    if hints := get_type_hints(kind):
        return st.builds(kind, **{name: any_of(hint) for name, hint in hints.items()})
    return st.from_type(kind)
