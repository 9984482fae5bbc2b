"""What a `_target_` names: checked without importing it, and called with what a config and the program give it.

The check reads source files, so that a wrong name or argument is refused in milliseconds, before TensorFlow or a
person's own code is imported.
"""

import ast
import builtins
import difflib
import importlib
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

KEY = "_target_"


class TargetError(ValueError):
    """A `_target_` that cannot be called: the message says what was expected, received, and what to type instead."""


def check(node: Any, key: str, given: Sequence[str] = (), search: Sequence[str] = ()) -> None:
    """Refuses a `_target_` in `node`, nested ones included, that does not exist or does not take its arguments.

    `key` is where the node stands in the config, `given` are the arguments that the program adds where the
    signature asks for them, `search` the folders to look for modules in. What cannot be told from source files is
    left to the call. Raises `TargetError`.
    """
    if isinstance(node, dict):
        if KEY in node:
            _check_one(node, key, given, tuple(search))
        for name, inner in node.items():
            check(inner, f"{key}.{name}", (), search)
    elif isinstance(node, list | tuple):
        for index, inner in enumerate(node):
            check(inner, f"{key}[{index}]", (), search)


def call(node: dict[str, Any], key: str, **given: Any) -> Any:
    """Calls what `node` names with its arguments, and with those of `given` that its signature asks for by name.

    >>> call({"_target_": "fractions.Fraction", "numerator": 3}, "example", denominator=4, colour="red")
    Fraction(3, 4)
    """
    function = _import(str(node.get(KEY)), key)
    arguments = {name: value(inner, f"{key}.{name}") for name, inner in node.items() if name != KEY}
    asked = _asked(function)
    return function(**{name: each for name, each in given.items() if name in asked}, **arguments)


def value(node: Any, key: str) -> Any:
    """A config value with every `_target_` in it called."""
    if isinstance(node, dict):
        return call(node, key) if KEY in node else {name: value(inner, f"{key}.{name}") for name, inner in node.items()}
    if isinstance(node, list | tuple):
        return [value(inner, f"{key}[{index}]") for index, inner in enumerate(node)]
    return node


def sources(node: Any, search: Sequence[str] = ()) -> set[Path]:
    """The Python files of the functions that `node` names, nested ones included, but for this program's and Keras's."""
    if isinstance(node, dict):
        target = str(node.get(KEY, ""))
        own = bool(target) and target.split(".")[0] not in ("pipeline", "keras", "tensorflow")
        path = _module(target, tuple(search))[0] if own else None
        mine = {path} if path is not None and path.suffix == ".py" else set()
        return mine.union(*(sources(inner, search) for inner in node.values()))
    if isinstance(node, list | tuple):
        return set[Path]().union(*(sources(inner, search) for inner in node))
    return set()


def asks_for(node: dict[str, Any], key: str, name: str) -> bool:
    """Does the signature of what `node` names have an argument `name`?"""
    return name in _asked(_import(str(node.get(KEY)), key))


def _asked(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:
        return set()


def _import(target: str, key: str) -> Callable[..., Any]:
    module, _, name = target.rpartition(".")
    parts = [name]
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            # A class's method: look for the module further up. A module missing inside theirs is their error.
            if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
                raise
            module, _, name = module.rpartition(".")
            parts.insert(0, name)
            if not module:
                raise TargetError(f"Expected {key}._target_ to name a function, received {target}.") from error
    for part in parts:
        if not hasattr(found, part):
            raise TargetError(f"Expected {key}._target_ to name a function, received {target}: no {part} there.")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"Expected {key}._target_ to name a function, received {target}, which cannot be called.")
    function: Callable[..., Any] = found
    return function


def _check_one(node: dict[str, Any], key: str, given: Sequence[str], search: tuple[str, ...]) -> None:
    target = node[KEY]
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or "." not in target:
        received = "none" if target is None else repr(target)
        raise TargetError(f"Expected {key}._target_ to be like package.function, received {received}.")
    if _of_python(target):
        raise TargetError(_not_callable_here(key, target))
    path, rest = _module(target, search)
    module = ".".join(target.split(".")[: -len(rest)]) if rest else target
    if path is None:
        raise TargetError(
            f"Expected {key}._target_ to name a function that exists, received {target}: there is no module "
            f"{module or target.split('.')[0]!r}. Run from the folder that holds it, or install it."
        )
    if not rest:
        raise TargetError(f"Expected {key}._target_ to name a function, received {target}, which is a module.")
    if path.suffix != ".py":
        return
    found = _definition(path, rest[0], search)
    if isinstance(found, list):
        near = difflib.get_close_matches(rest[0], found, 1)
        instead = f" Try {key}.{KEY}={'.'.join([module, near[0], *rest[1:]])}." if near else ""
        raise TargetError(
            f"Expected {key}._target_ to name a function that exists, received {target}: no {rest[0]} in {module}."
            + instead
        )
    if isinstance(found, ast.Import | ast.ImportFrom):
        raise TargetError(_not_callable_here(key, target))
    if isinstance(found, ast.FunctionDef) and len(rest) > 1:
        raise TargetError(f"Expected {key}._target_ to name a function, received {target}: {rest[0]} is one itself.")
    if isinstance(found, ast.FunctionDef) and not found.decorator_list:
        _check_arguments(found.args, 0, node, key, given)
    if isinstance(found, ast.ClassDef) and len(rest) == 1:
        methods = {each.name: each for each in found.body if isinstance(each, ast.FunctionDef)}
        makes = methods.get("__init__")
        if makes and "__new__" not in methods and not makes.decorator_list:
            _check_arguments(makes.args, 1, node, key, given)


def _of_python(target: str) -> bool:
    top = target.split(".")[0]
    return top in sys.stdlib_module_names or hasattr(builtins, top)


def _not_callable_here(key: str, target: str) -> str:
    return (
        f"Expected {key}._target_ to name a function of yours or of a library, received {target} of Python "
        f"itself, which a config may not call."
    )


def _check_arguments(
    signature: ast.arguments, bound: int, node: dict[str, Any], key: str, given: Sequence[str]
) -> None:
    """Refuses what a function would not take; its first `bound` arguments are not for the caller to give."""
    placed = [each.arg for each in (*signature.posonlyargs, *signature.args)]
    names = [*placed[bound:], *(each.arg for each in signature.kwonlyargs)]
    required = placed[bound : len(placed) - len(signature.defaults)] + [
        each.arg for each, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True) if default is None
    ]
    for name in node:
        if name != KEY and name not in names and signature.kwarg is None:
            near = difflib.get_close_matches(name, names, 1)
            raise TargetError(
                f"Expected an argument of {node[KEY]} ({', '.join(names) or 'it takes none'}), received {key}.{name}."
                + (f" Try {key}.{near[0]}." if near else "")
            )
    missing = [name for name in required if name not in node and name not in given]
    if missing:
        raise TargetError(
            f"Expected every argument of {node[KEY]} that has no default, received none for {', '.join(missing)}. "
            f"Try +{key}.{missing[0]}=..."
        )
    for name in node:
        if name != KEY and name in given:
            raise TargetError(f"Expected {key}.{name} to be left to the program, which gives it, received a value.")


def _module(target: str, search: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """(file of the longest leading part of `target` that is a module, the names after it), without importing.

    A name that a package's own source defines hides a module of that name, as Python's import does.
    """
    parts, folders, found = target.split("."), list(search), None
    for index, part in enumerate(parts):
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None or (spec.origin is None and not spec.submodule_search_locations):
            return found, parts[index:]
        if index == len(parts) - 1 and found is not None and _defines(found, part):
            return found, parts[index:]
        found = Path(spec.origin) if spec.origin else Path(next(iter(spec.submodule_search_locations or [])))
        folders = list(spec.submodule_search_locations or [])
        if not folders:
            return found, parts[index + 1 :]
    return found, []


def _defines(path: Path, name: str) -> bool:
    # A module that exists comes before what a package's __getattr__ might give.
    return path.suffix == ".py" and not isinstance(_definition(path, name, (), lazy=False), list)


def _definition(
    path: Path, name: str, search: tuple[str, ...], depth: int = 5, lazy: bool = True
) -> ast.AST | list[str] | None:
    """What `name` is in a module's source: None if that cannot be told, or the names it has instead.

    An import stands for something of Python's own library. `lazy`: a `__getattr__` might give any name.
    """
    names: list[str] = []
    for statement in _statements(path):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            if statement.name == name:
                return statement
            names.append(statement.name)
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if alias.name == "*":
                    return None
                if (alias.asname or alias.name) == name:
                    python = not statement.level and _of_python(statement.module or "")
                    return statement if python else _imported(path, statement, alias.name, search, depth)
                names.append(alias.asname or alias.name)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                if (alias.asname or alias.name.split(".")[0]) == name:
                    return statement if _of_python(alias.name) else None
        elif not isinstance(statement, ast.Expr) and not _is_for_type_checkers(statement):
            # Assignments, conditions and the like may make any name.
            bound = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
            if name in bound or not isinstance(statement, ast.Assign | ast.AnnAssign):
                return None
    return None if lazy and "__getattr__" in names else names


def _is_for_type_checkers(statement: ast.stmt) -> bool:
    """Is it `if TYPE_CHECKING:`, of which nothing is there when the program runs?"""
    return isinstance(statement, ast.If) and ast.unparse(statement.test).rpartition(".")[2] == "TYPE_CHECKING"


def _imported(path: Path, statement: ast.ImportFrom, name: str, search: tuple[str, ...], depth: int) -> ast.AST | None:
    if depth == 0 or statement.module is None:
        return None
    folders = (str(path.parents[statement.level - 1]),) if statement.level else search
    module, rest = _module(f"{statement.module}.{name}", folders)
    if module is None or module.suffix != ".py" or rest != [name]:
        return None
    found = _definition(module, name, search, depth - 1)
    return None if isinstance(found, list) else found


@cache
def _statements(path: Path) -> list[ast.stmt]:
    try:
        return ast.parse(path.read_text()).body
    except SyntaxError as error:
        raise TargetError(
            f"Expected Python in {path}, received a syntax error in line {error.lineno}: {error.msg}."
        ) from error
    except (OSError, UnicodeDecodeError):
        return [ast.ImportFrom(module=None, names=[ast.alias("*")], level=0)]
