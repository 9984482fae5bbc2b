"""Checks from its source, in milliseconds and without importing it, what a `_target_` names, and calls it."""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

from pipeline.config.offered import elsewhere, near
from pipeline.config.schema import Json
from pipeline.errors import UserError, as_typed

KEY = "_target_"
# What every list of allowed packages has besides: this program's choices, and Keras.
OURS = ("pipeline.strategies", "pipeline.models", "pipeline.data", "keras")
# Arguments with which Keras and NumPy load what may hold code, and the only value that a config may give them.
SAFE = {"safe_mode": True, "allow_pickle": False}
# Imports that are followed from the name that a config says to where it is defined.
HOPS = 8


def check(
    node: Json, key: str, added: Sequence[str] = (), search: Sequence[str] = (), allowed: Sequence[str] | None = None
) -> None:
    """Refuses a `_target_` in `node`, nested ones included, that does not exist or does not take its arguments.

    `key` is the node's place, `added` are the arguments that the program adds where the signature asks for them,
    `search` the folders of modules. Where `allowed` names packages, a function of another one is refused, save for ours
    and Keras's. What cannot be told from source files is left to the call. Raises `UserError`.
    """
    packages = None if allowed is None else (*OURS, *allowed)
    for place, called in _called(node, key):
        _check_one(called, place, added if place == key else (), tuple(search), packages)


def check_allowed(allowed: Sequence[str] | None) -> None:
    """Refuses a list of allowed packages in which something is none."""
    for name in allowed or ():
        if not isinstance(name, str) or not _is_dotted(name):
            expected = "allowed_targets to be a list of packages, yours or a library's"
            raise UserError(expected, f"{name!r} in it", "allowed_targets=[my_package], or null")


def call(node: Mapping[str, Json], key: str, **given: object) -> Any:
    """Calls what `node` names with its arguments, and with those of `given` that its signature asks for by name."""
    function = _import(str(node.get(KEY)), key)
    arguments = {name: value(inner, f"{key}.{name}") for name, inner in node.items() if name != KEY}
    return function(**{name: given[name] for name in _asked(function) if name in given}, **arguments)


def value(node: Json, key: str) -> Any:
    """A config value with every `_target_` in it called."""
    if isinstance(node, dict):
        return call(node, key) if KEY in node else {name: value(inner, f"{key}.{name}") for name, inner in node.items()}
    if isinstance(node, list | tuple):
        return [value(inner, f"{key}[{index}]") for index, inner in enumerate(node)]
    return node


def sources(node: Json, search: Sequence[str] = ()) -> set[Path]:
    """The Python files of the functions that `node` names, nested ones included, but for this program's and Keras's."""
    names = {str(called[KEY]) for _, called in _called(node, "")}
    own = {name for name in names if name.split(".")[0] not in ("pipeline", "keras", "tensorflow")}
    paths = (_module(name, tuple(search))[0] for name in own)
    return {path for path in paths if path is not None and path.suffix == ".py"}


def files(nodes: Iterable[Json], search: Sequence[str]) -> list[Path]:
    """The files of a person's own functions that config values name, and those beside them, which they may import."""
    folders = {source.parent for node in nodes for source in sources(node, search)}
    # An editor's lock is a link to nowhere.
    return sorted(path for folder in folders for path in folder.glob("*.py") if path.is_file())


def digest(nodes: Iterable[Json], search: Sequence[str]) -> str | None:
    """A hash of what those files hold; None where the values name no function of a person's own."""
    paths, hashed = files(nodes, search), hashlib.sha256()
    for path in paths:
        with suppress(OSError):
            hashed.update(os.fsencode(path) + path.read_bytes())
    return hashed.hexdigest() if paths else None


def _called(node: Json, key: str) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Yields the place of each `_target_` in a config value and what it stands in, nested ones last."""
    if isinstance(node, Mapping):
        if KEY in node:
            yield key, node
        for name, inner in node.items():
            yield from _called(inner, f"{key}.{name}")
    elif isinstance(node, list | tuple):
        for index, inner in enumerate(node):
            yield from _called(inner, f"{key}[{index}]")


def asks_for(node: Mapping[str, Json], key: str, name: str) -> bool:
    """True if what `node` names has an argument `name`."""
    return name in _asked(_import(str(node.get(KEY)), key))


def _asked(function: Callable[..., object]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:
        return set()


def _import(target: str, key: str) -> Callable[..., object]:
    parts = target.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:count])
        try:
            value: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # A class's method: look for the module further up. A module missing inside theirs is their error.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            continue
        for part in parts[count:]:
            if not hasattr(value, part):
                raise _no_function(key, f"{target}: no {part} there")
            value = getattr(value, part)
        if not callable(value):
            raise _no_function(key, f"{target}, which cannot be called")
        return cast("Callable[..., object]", value)
    raise _no_function(key, f"{target}: no module {parts[0]} there")


def _no_function(key: str, received: str) -> UserError:
    return UserError(f"{key}._target_ to name a function", received, _as_typed(key, "my_package.my_function"))


def _check_one(
    node: Mapping[str, Json], key: str, added: Sequence[str], search: tuple[str, ...], allowed: Sequence[str] | None
) -> None:
    real = target = _check_safe(node, key)
    for _ in range(HOPS):
        _check_place(real, target, key, allowed)
        path, rest = _module(real, search)
        if path is not None and not rest:
            raise _no_function(key, f"{target}, which is a module")
        module = ".".join(real.split(".")[: -len(rest)])
        definition = _definition(path, rest[0], module)
        if real == target and (path is None or isinstance(definition, list)):
            received = f"there is no module {target.split('.')[0]!r}"
            instead = "running from the folder that holds it, or installing it"
            if isinstance(definition, list):
                closest = (near(rest[0], definition) or ["my_function"])[0]
                received = f"no {rest[0]} in {module}"
                instead = _as_typed(key, ".".join([module, closest, *rest[1:]]))
            raise UserError(f"{key}._target_ to name a function that exists", f"{target}: {received}", instead)
        if not isinstance(definition, str):
            break
        # An import: what it stands for counts.
        real = ".".join([definition, *rest[1:]])
    if real == target and path is not None and path.suffix != ".py":
        return
    function, bound, more = definition, 0, list[str]()
    if isinstance(definition, ast.ClassDef):
        methods = _methods(definition)
        function, bound = methods.get("__init__") if len(rest) == 1 and "__new__" not in methods else None, 1
        if real.startswith("keras.src.optimizers."):
            # Each passes others on to the base of all, which refuses what is none.
            base, _ = _module("keras.src.optimizers.base_optimizer.BaseOptimizer", search)
            init = _methods(_definition(base, "BaseOptimizer", "")).get("__init__")
            more = [argument.arg for argument in init.args.args[1:]] if init else []
    elif isinstance(definition, ast.FunctionDef) and len(rest) > 1:
        raise _no_function(key, f"{target}: {rest[0]} is one itself")
    elif allowed is not None and len(rest) > 1:
        # What is behind a name that only an import can tell may be another package.
        expected = f"{key}._target_ to name a function of a module directly, since allowed_targets is set"
        received = f"{target}: what {module}.{rest[0]} is cannot be told from its source"
        raise UserError(expected, received, "the module that defines it")
    if isinstance(function, ast.FunctionDef) and not function.decorator_list:
        _check_arguments(function.args, bound, node, key, added, more)


def _methods(definition: ast.AST | str | list[str] | None) -> dict[str, ast.FunctionDef]:
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    return {method.name: method for method in body if isinstance(method, ast.FunctionDef)}


def _as_typed(key: str, target: str) -> str:
    name, in_list, _ = key.partition("[")
    if not key.startswith("train."):
        return f"{key}.{KEY}={target}"
    form = f"{{{KEY}: {target}}}"
    return f"{form} there" if key.count(".") > 1 else f"'{name}={f'[{form}]' if in_list else form}'"


def _check_safe(node: Mapping[str, Json], key: str) -> str:
    """Returns what `node` names. Refuses what is no name, and arguments with which Keras would run code of a file."""
    target, instead = node[KEY], _as_typed(key, "my_package.my_function")
    if not isinstance(target, str) or not _is_dotted(target) or "." not in target:
        received = "none" if target is None else repr(target)
        raise UserError(f"{key}._target_ to be like package.function", received, instead)
    for name, safe in SAFE.items():
        if node.get(name, safe) is not safe:
            expected = f"{key}.{name} to be {as_typed(safe)}, since a file may hold code that runs when it is loaded"
            raise UserError(expected, node[name], f"{key}.{name}={as_typed(safe)}")
    return target


def _check_place(place: str, target: str, key: str, allowed: Sequence[str] | None) -> None:
    """Refuses a function at `place`, which is what `target` stands for, that is in no allowed package."""
    if allowed is None or any(f"{place}.".startswith(f"{package}.") for package in allowed):
        return
    theirs, package = [package for package in allowed if package not in OURS], place.split(".")[0]
    stands = "" if place == target else f", which stands for {place}"
    expected = f"an allowed package ({', '.join([*theirs, 'keras'])}, or this program's strategies, models and data)"
    trusting = f", or allowed_targets=[{','.join([*theirs, package])}] if you trust {package}"
    instead = f"a function of theirs{trusting * (package != 'pipeline')}"
    raise UserError(f"{key}._target_ to be in {expected}", f"{target}{stands}", instead)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() and not part.startswith("__") for part in name.split("."))


def _check_arguments(
    signature: ast.arguments, bound: int, node: Mapping[str, Json], key: str, added: Sequence[str], more: Sequence[str]
) -> None:
    """Refuses what a function would not take behind its first `bound` arguments, or beside `more` if that names any."""
    placed = [argument.arg for argument in (*signature.posonlyargs, *signature.args)]
    named = {one.arg: default for one, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True)}
    names = list(dict.fromkeys([*placed[bound:], *named, *more]))
    required = [*placed[bound : len(placed) - len(signature.defaults)], *(name for name in named if not named[name])]
    for name in node:
        if name != KEY and name not in names and (more or signature.kwarg is None):
            meant = [line.partition("=")[0].rpartition(".")[2] for line in elsewhere(name, "")]
            closest = [one for one in meant if one in names] or near(name, names)
            expected = f"an argument of {node[KEY]} ({', '.join(names) or 'it takes none'})"
            raise UserError(expected, f"{key}.{name}", f"{key}.{closest[0]}" if closest else "without it")
    if missing := [name for name in required if name not in node and name not in added]:
        expected = f"every argument of {node[KEY]} that has no default"
        raise UserError(expected, f"none for {', '.join(missing)}", f"+{key}.{missing[0]}=..")
    for name in node:
        if name != KEY and name in added:
            raise UserError(f"{key}.{name} to be left to the program, which gives it", "a value", "without it")


def _module(target: str, search: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """(file of the longest leading part of `target` that is a module, the names after it), without importing."""
    parts, folders, file = target.split("."), list(search), None
    if parts[0] in sys.builtin_module_names:
        # Part of the interpreter: there is no source to read.
        return Path(parts[0]), parts[1:]
    for index, part in enumerate(parts):
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None or (spec.origin is None and not spec.submodule_search_locations):
            return file, parts[index:]
        if index == len(parts) - 1 and file is not None and file.suffix == ".py":
            # What a package's source defines hides a module of that name; what its __getattr__ might give does not.
            hidden = _definition(file, part, ".".join(parts[:index]), lazy=False)
            if not isinstance(hidden, list):
                return file, parts[index:]
        folders = list(spec.submodule_search_locations or [])
        file = Path(spec.origin or folders[0])
        if not folders:
            return file, parts[index + 1 :]
    return file, []


def _definition(path: Path | None, name: str, module: str, lazy: bool = True) -> ast.AST | str | list[str] | None:
    """Returns what `name` is in the source of `module`: None if that cannot be told, or the names it has instead.

    Text is what an import stands for, dotted. `lazy`: a `__getattr__` might give any name.
    """
    if path is None or path.suffix != ".py":
        return None
    package, names = module if path.name == "__init__.py" else module.rpartition(".")[0], list[str]()
    for statement in _statements(path):
        bound: dict[str, ast.AST | str | None] = {}
        match statement:
            case ast.FunctionDef(name=defined) | ast.ClassDef(name=defined):
                bound = {defined: statement}
            case ast.ImportFrom(names=aliases, module=source, level=level):
                start = "." * level + (f"{source}." if source else "")
                bound = {alias.asname or alias.name: f"{start}{alias.name}" for alias in aliases}
            case ast.Import(names=aliases):
                bound = {alias.asname: alias.name for alias in aliases if alias.asname}
                bound |= {(first := alias.name.split(".")[0]): first for alias in aliases if not alias.asname}
            case ast.If(test=test) if ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING":
                continue  # Nothing of it is there when the program runs.
            case ast.Assign() | ast.AnnAssign():
                bound = {inner.id: None for inner in ast.walk(statement) if isinstance(inner, ast.Name)}
            case statement if not isinstance(statement, ast.Expr):
                bound = {"*": None}  # Conditions and the like may make any name.
        if name in bound or "*" in bound:
            value = bound.get(name)
            return importlib.util.resolve_name(value, package) if isinstance(value, str) else value
        # A module or a value is not offered in place of a function.
        offers = not isinstance(statement, ast.Import | ast.Assign | ast.AnnAssign)
        names += bound if offers else {"__getattr__"} & bound.keys()
    return None if lazy and "__getattr__" in names else names


@cache
def _statements(path: Path) -> list[ast.stmt]:
    try:
        return ast.parse(path.read_text()).body
    except SyntaxError as error:
        place = f"line {error.lineno}"
        raise UserError(f"Python in {path}", f"a syntax error in {place}: {error.msg}", f"mending {place}") from error
    except (OSError, UnicodeDecodeError):
        return [ast.ImportFrom(module=None, names=[ast.alias("*")], level=0)]
