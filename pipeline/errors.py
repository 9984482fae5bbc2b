"""The one error of a user's making, its one form, and values as texts."""

from collections.abc import Mapping, Sequence


class UserError(ValueError):
    """What a user can put right: what was expected, what was received, and what to type instead; or a whole sentence.

    >>> print(UserError("workers of at least 1", 0, "workers=2"))
    Expected workers of at least 1, received 0. Try workers=2.
    """

    def __init__(self, expected: str, received: object = None, try_this: str = "") -> None:
        text = f"Expected {expected}, received {received}. Try {try_this}." if try_this else expected
        super().__init__(text)
        self.expected, self.received, self.try_this = expected, received, try_this

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.expected, self.received, self.try_this)


def unwritten(error: OSError) -> UserError:
    """Returns what is wrong with output that nothing holds any more, as on a full disk."""
    return UserError("to be able to write all output", error.strerror, "another place for it")


def refuse(*rules: tuple[object, str, object, str], error: type[UserError] = UserError) -> None:
    """Raises the first error of a table whose rows are (is it wrong?, expected, received, try this).

    >>> refuse((False, "a number", "x", "1"), (True, "workers of at least 1", 0, "workers=2"))
    Traceback (most recent call last):
    pipeline.errors.UserError: Expected workers of at least 1, received 0. Try workers=2.
    """
    for wrong, expected, received, try_this in rules:
        if wrong:
            raise error(expected, received, try_this)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error that says something, or the name of its class.

    >>> first_line(ValueError("\\n no such thing\\nsee there")), first_line(KeyError())
    ('no such thing', 'KeyError')
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def as_typed(value: object) -> str:
    """A value as a person types it.

    >>> as_typed(None), as_typed(True), as_typed([1, None]), as_typed({"a": 0.5, "b": {}})
    ('null', 'true', '[1,null]', '{a: 0.5, b: {}}')
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {as_typed(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def first_of(names: Sequence[str], limit: int = 5, between: str = "; ", last: str = "; and") -> str:
    """The first of many names, with `between` between them, and how many more there are, with `last` before that.

    >>> first_of(["a", "b"]), first_of(["a", "b", "c"], limit=1), first_of(["a", "b", "c"], 2, ", ", " and")
    ('a; b', 'a; and 2 more', 'a, b and 1 more')
    """
    more = f"{last} {len(names) - limit} more" if len(names) > limit else ""
    return between.join(names[:limit]) + more


def amount(count: float) -> str:
    """Bytes in the unit that a person would use.

    >>> [amount(count) for count in (0, 812, 4_799_528, 1_234_567_890, 96 * 2**30)]
    ['0 B', '812 B', '4.6 MiB', '1.1 GiB', '96 GiB']
    """
    power = sum(count / 1024**smaller >= 999.5 for smaller in range(3))
    scaled = count / 1024**power
    return f"{scaled:,.{1 if scaled < 9.95 and power else 0}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
