"""Replaces attributes for a while: of Keras's and TensorFlow's own classes, modules and objects, or of a thread."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

_ABSENT = object()
Value = TypeVar("Value")


@contextlib.contextmanager
def patched(owner: object, attributes: Mapping[str, object]) -> Iterator[None]:
    """Inside, attributes of a class, module, object or `threading.local` have these values, past any setter of Keras's.

    >>> with patched(contextlib, {"suppress": None}):
    ...     contextlib.suppress
    >>> contextlib.suppress
    <class 'contextlib.suppress'>
    """
    before = {name: vars(owner).get(name, _ABSENT) for name in attributes}
    _set(owner, attributes)
    try:
        yield
    finally:
        _set(owner, before)


@contextlib.contextmanager
def all_patched(changes: Iterable[tuple[object, Mapping[str, object]]]) -> Iterator[None]:
    """Inside, all of these (owner, attributes) are `patched`."""
    with contextlib.ExitStack() as stack:
        for owner, attributes in changes:
            stack.enter_context(patched(owner, attributes))
        yield


class OfThread(threading.local, Generic[Value]):
    """A value that begins as this one in each thread. Each replica is traced in a thread of its own."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def held(self, value: Value) -> contextlib.AbstractContextManager[None]:
        """Inside, this thread has that value."""
        return patched(self, {"value": value})


def _set(owner: object, attributes: Mapping[str, object]) -> None:
    for name, value in attributes.items():
        if not isinstance(owner, type):
            vars(owner).pop(name, None) if value is _ABSENT else vars(owner).update({name: value})
        elif value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
