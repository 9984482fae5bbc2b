"""Replaces attributes for a while: of Keras's and TensorFlow's own classes, modules and objects, or of a thread."""

import contextlib
from collections.abc import Iterator, Mapping

_ABSENT = object()


@contextlib.contextmanager
def patched(owner: object, attributes: Mapping[str, object]) -> Iterator[None]:
    """Inside, attributes of a class, a module or an object have these values; afterwards they are what they were.

    An object's are set past a setter of its class, such as Keras's, which would track them. Those of a
    `threading.local` are this thread's.

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


def _set(owner: object, attributes: Mapping[str, object]) -> None:
    for name, value in attributes.items():
        if not isinstance(owner, type):
            vars(owner).pop(name, None) if value is _ABSENT else vars(owner).update({name: value})
        elif value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
