"""Turns the command line into composed configs, by Hydra: one of a run, or one of each run of a sweep, each once.

Hydra composes and does nothing else: no job, callback or launcher of its own runs. Wrong overrides are refused first.
"""

import argparse
import copy
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from pipeline.config import config as configs
from pipeline.config import offered
from pipeline.config.config import Typed
from pipeline.config.instead import LAYOUT, find, in_shell, usual
from pipeline.config.schema import NAMED, Config, HardwareConfig, Mode, PrepareConfig, check_password
from pipeline.errors import UserError

Schema = type[Config] | type[PrepareConfig]
Check = Callable[[Config], None]
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Composed:
    """A config as Hydra composed it, its folder, the folder of its sweep if it is of one, and what was typed."""

    config: DictConfig
    folder: Path
    sweep: Path | None
    overrides: list[str]
    checked: Config | None  # before it was written, if it is of no sweep


class _OwnChoices(SearchPathPlugin):
    folder: Path | None = None
    counts_first = True

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Adds the folder of --config-dir before this program's own, or behind."""
        if self.folder is not None:
            add = search_path.prepend if self.counts_first else search_path.append
            add("command-line", f"file://{self.folder}", SearchPathQuery("main"))


class Composer:
    """Hydra, on our choices and those of a person's own folder. All it does raises `UserError`."""

    def __init__(self, name: str, schema: Schema, own: str | None, ours: str | None = None) -> None:
        for option, place in (("--config-dir", own), ("--config-path", ours)):
            if place is not None and not Path(place).is_dir():
                raise UserError(f"{option} to be a folder", place, "its path from here, or an absolute one")
        # Where files of choices are, a person's own first.
        self._places = [Path(os.path.abspath(place)) for place in (own, ours or offered.folder()) if place is not None]
        if ours is not None and not any((place / f"{name}.yaml").is_file() for place in self._places):
            expected = f"--config-path to be a folder with {name}.yaml, in place of this program's own choices"
            instead = f"{in_shell(f'--config-dir={ours}')} for choices beside these"
            raise UserError(expected, f"{ours}, which has none", instead)
        _OwnChoices.folder = self._places[0] if own is not None else None
        _OwnChoices.counts_first = own is None or _counts_first(Path(own), self._places[-1], f"{name}.yaml")
        Plugins.instance().register(_OwnChoices)
        GlobalHydra.instance().clear()
        initialize_config_dir(str(self._places[-1]), job_name="pipeline", version_base="1.3")
        self._name, self._schema = name, schema
        self._loader: ConfigLoader = GlobalHydra.instance().config_loader()
        # What the runs of a sweep share: the config of the same choices without values, the keys of a choice's file.
        self._of_choices: dict[tuple[str, ...], DictConfig] = {}
        self._keys_of: dict[str, list[str]] = {}

    def show(self, typed: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
        """Prints what options of a parser ask to see instead of a run; False where they ask for nothing."""
        hydra, overrides = GlobalHydra.instance().hydra, typed.overrides
        assert hydra is not None
        with _refused(self._schema):
            if typed.hydra_help:
                hydra.hydra_help(None, parser, argparse.Namespace(overrides=[]))
            elif typed.cfg:
                print(self._text_of(typed), end="")
            elif typed.info:
                self._load(overrides)
                hydra.show_info(typed.info, self._name, overrides)
            elif typed.shell_completion:
                hydra.shell_completion(self._name, overrides)
            else:
                return False
        return True

    def _text_of(self, typed: argparse.Namespace) -> str:
        config = self._load(typed.overrides)
        HydraConfig.instance().set_config(config)
        OmegaConf.set_readonly(config.hydra, None)
        names = [str(name) for name in config if typed.cfg == "all" or (name == "hydra") == (typed.cfg == "hydra")]
        config = OmegaConf.masked_copy(config, names)
        if typed.resolve:
            OmegaConf.resolve(config)
        if typed.package in (None, "_global_"):
            return OmegaConf.to_yaml(config)
        if (part := OmegaConf.select(config, typed.package)) is None:
            raise UserError("--package with a part of the config", typed.package, f"--cfg {typed.cfg} --package train")
        return f"# @package {typed.package}\n{OmegaConf.to_yaml(part)}" if OmegaConf.is_config(part) else f"{part}\n"

    def composed(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
        """Returns one config, without Hydra's own part, and its choice of each group."""
        composed = self._load(overrides)
        chosen = {group: choice for group, choice in composed.hydra.runtime.choices.items() if choice is not None}
        with open_dict(composed):
            del composed["hydra"]
        return composed, chosen

    def choices(self) -> dict[str, list[str]]:
        """Returns the choices of each group: ours, a person's own, and those that installed packages offer."""
        for name in offered.LAYOUTS:
            self._lay_out(name)
        return {group: self._listed(group) for group in self._listed("", ObjectType.GROUP) if group != "hydra"}

    def _lay_out(self, name: str) -> bool:
        """Makes hardware known to Hydra by a layout's name, as 2x8gpu; False for others, and where a file has it."""
        match = LAYOUT.match(name)
        if match is None or name in self._listed("hardware"):
            return False
        node = dataclasses.asdict(HardwareConfig(name, int(match[1] or 1), int(match[2]))) | {"kind": match[3]}
        ConfigStore.instance().store(group="hardware", name=name, node=node)
        return True

    def _listed(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        sources = self._loader.get_sources()
        return sorted({name for source in sources if source.is_group(group) for name in source.list(group, kind)})

    def written(self, group: str | None = None, choice: str = "") -> str:
        """Returns the text of a choice's file, or of the config's, with comments; "" of a package's choice."""
        name = f"{self._name}.yaml" if group is None else f"{group}/{choice}.yaml"
        for place in self._places:
            if (place / name).is_file():
                with _refused(self._schema):
                    return (place / name).read_text(encoding="utf-8")
        if group != "hardware" or (layout := LAYOUT.match(choice)) is None:
            return ""
        hosts, devices, kind = layout.groups()
        where = f"on each of {hosts} hosts" if hosts else "on one host"
        return f"# {devices} {kind.upper()} device{'s' * (devices != '1')} {where}.\n"

    def points(self, overrides: Sequence[str], many: bool, check: Check = lambda config: None) -> Iterator[Composed]:
        """Yields the config of a run, held to `check`, or those of a sweep's runs; each is written into its folder.

        It is a sweep with `many`, or where the config itself says so. All are composed before anything is written.
        """
        swept = [override for override in _parsed(overrides) if override.is_sweep_override()]
        mode = RunMode.MULTIRUN if many or swept else RunMode.RUN
        whole = self._load([*overrides, *(["hydra.mode=MULTIRUN"] if many else [])], mode)
        if whole.hydra.mode is not RunMode.MULTIRUN:
            configs.check_not_swept(swept)
            whole.hydra.mode = RunMode.RUN
            _expect_name(whole)
            yield self._written(whole, None, check)
            return
        HydraConfig.instance().set_config(whole)
        of_hydra = _lines(whole.hydra.overrides.hydra)
        with _refused(self._schema):
            place = Path(str(whole.hydra.sweep.dir))
            points = [self._load([*of_hydra, *point], of_sweep=True) for point in self._expanded(whole)]
            for number, point in enumerate(points):
                # What a resolver gave once, as the time, holds for all.
                OmegaConf.copy_cache(whole, point)
                _expect_name(point)
                with open_dict(point):
                    point.hydra.job.id = point.hydra.job.num = number
            folders = [str(OmegaConf.select(point, "hydra.sweep.subdir")) for point in points]
        if len({*folders}) < len(folders):
            raise UserError("hydra.sweep.subdir to give each run a folder of its own", folders[0], "without it")
        place.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(whole, place / "multirun.yaml")
        for point in points:
            yield self._written(point, place, check)

    def _expanded(self, whole: DictConfig) -> Iterator[tuple[str, ...]]:
        lines = [f"{key}={value}" for key, value in (whole.hydra.sweeper.params or {}).items()]
        values: dict[str, list[str]] = {}
        for override in _parsed([*lines, *_lines(whole.hydra.overrides.task)], self._loader):
            key, group, line = override.get_key_element(), override.key_or_group, override.input_line
            if override.is_interval_sweep():
                instead = f"-m {key}=1,2 or {key}=range(1,3)"
                raise UserError(f"values of {key} that can be counted", line, instead)
            texts = [] if override.is_sweep_override() else [override.get_value_element_as_str()]
            # Not a range of steps of 0, which never ends, nor a glob of what is no group.
            with suppress(HydraException, ValueError):
                texts = texts or list(override.sweep_string_iterator())
            if not texts:
                usual_ones = self.choices().get(group, [])[:2] or usual(group, self._schema)[:1]
                instead = f"-m {in_shell(f'{key}=' + (','.join(usual_ones) or 'null'))}"
                raise UserError(f"at least one value of {key} for a sweep", f"{line}, which gives none", instead)
            values[key] = [f"{key}={text}" for text in texts]
        return itertools.product(*values.values())

    def _written(self, composed: DictConfig, sweep: Path | None, check: Check) -> Composed:
        HydraConfig.instance().set_config(composed)
        with _refused(self._schema):
            names = ("hydra.sweep.dir", "hydra.sweep.subdir") if sweep else ("hydra.run.dir",)
            folder = Path(*(str(OmegaConf.select(composed, name, throw_on_missing=True)) for name in names))
        # What refers to Hydra's own part is found in it.
        hydra = cast("DictConfig", HydraConfig.instance().cfg)
        with read_write(hydra.hydra):
            hydra.hydra.runtime.output_dir = os.path.abspath(folder)
        typed, inside, checked = _lines(composed.hydra.overrides.task), composed.hydra.output_subdir, None
        with open_dict(composed):
            del composed["hydra"]
        if sweep is None:
            check(checked := configs.typed_as(Config, composed, typed))
        folder.mkdir(parents=True, exist_ok=True)
        # Nothing stays of what starts nothing. A mode that refers to nothing is refused with its run.
        mode = OmegaConf.select(composed, "mode", throw_on_resolution_failure=False)
        if inside and mode not in (Mode.plan, Mode.predict):
            (folder / str(inside)).mkdir(parents=True, exist_ok=True)
            for name, node in (("config", composed), ("hydra", hydra), ("overrides", ListConfig(typed))):
                OmegaConf.save(node, folder / str(inside) / f"{name}.yaml")
        return Composed(composed, Path(hydra.hydra.runtime.output_dir), sweep, typed, checked)

    def _load(self, overrides: Sequence[str], mode: RunMode = RunMode.RUN, of_sweep: bool = False) -> DictConfig:
        """Returns the composed config, Hydra's own part included. Raises `UserError`.

        That `of_sweep` is put together from what it shares with others, where that can be.
        """
        typed = _parsed(overrides, schema=self._schema)
        if mode is RunMode.RUN:
            configs.check_not_swept(typed)
        for override in typed:
            configs.check_override(override, self._schema, self._chooses(override, overrides))
        with _refused(self._schema, typed):
            for override in typed:
                if override.key_or_group == "hardware":
                    self._lay_out(str(override.value()))
            composed = (self._shared(typed, overrides) if of_sweep else None) or self._by_hydra(overrides, mode)
            self._name_by_choice(composed)
        configs.check_hydra(composed.hydra)
        with suppress(OmegaConfBaseException):
            check_password(OmegaConf.select(composed, "tracking.uri"))
        for key in ("sweep.name", "strategy.name"):
            with suppress(OmegaConfBaseException):
                if (name := OmegaConf.select(composed, key)) is not None and not NAME.fullmatch(name := str(name)):
                    near = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("._-")[:99] or "mine"
                    expected = f"{key} to be a folder's name of letters, digits, '.', '_' and '-'"
                    raise UserError(expected, name.strip() or "nothing", f"{key}={near}")
        return composed

    def _by_hydra(self, overrides: Sequence[str], mode: RunMode) -> DictConfig:
        try:
            return self._loader.load_configuration(self._name, list(overrides), mode)
        except MissingConfigException as error:
            # One that an experiment names.
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
            if group != "hardware" or not self._lay_out(name):
                raise
            return self._loader.load_configuration(self._name, list(overrides), mode)

    def _shared(self, typed: Sequence[Override], overrides: Sequence[str]) -> DictConfig | None:
        """Returns what Hydra composes of overrides: the config of their choices, with their values put into it.

        None where it takes Hydra to say what is wrong with one, and where one deletes.
        """
        chosen = [override for override in typed if override.is_hydra_override() or self._chooses(override, overrides)]
        lines = tuple(str(override.input_line) for override in chosen)
        if lines not in self._of_choices:
            self._of_choices[lines] = self._by_hydra(lines, RunMode.RUN)
        composed = copy.deepcopy(self._of_choices[lines])
        for override in typed:
            key, value, adds = override.key_or_group, override.value(), override.is_add()
            if override in chosen:
                continue
            if key == "hydra" or override.package is not None or override.is_delete():
                return None
            try:
                if adds and not isinstance(value, dict | list) and OmegaConf.select(composed, key) is not None:
                    return None
                OmegaConf.update(composed, key, value, merge=True, force_add=adds or override.is_force_add())
            except OmegaConfBaseException:
                return None
        of_run = [override for override in typed if not override.is_hydra_override()]
        job, how = composed.hydra.job, composed.hydra.job.config.override_dirname
        named = sorted(str(each.input_line) for each in of_run if each.key_or_group not in how.exclude_keys)
        job.override_dirname = how.item_sep.join(named).replace("=", how.kv_sep)
        composed.hydra.overrides.task = [override.input_line for override in of_run]
        return composed

    def _chooses(self, override: Override, overrides: Sequence[str]) -> bool:
        """True for a choice of a group. Only what is no other key is looked for where a config says to."""
        key = override.key_or_group
        if isinstance(override.value(), dict) or any(source.is_group(key) for source in self._loader.get_sources()):
            return not isinstance(override.value(), dict)
        if "." in key or not find(key, self._schema)[3]:
            return False
        return bool(self._loader.get_group_options(key, config_name=self._name, overrides=list(overrides)))

    def _name_by_choice(self, composed: DictConfig) -> None:
        """Gives what was chosen without a name that of the choice; a name that its file leaves open stays so."""
        for group in NAMED:
            node, choice = composed.get(group), composed.hydra.runtime.choices.get(group)
            if not isinstance(node, DictConfig) or not choice or not OmegaConf.is_missing(node, "name"):
                continue
            file = f"{group}/{choice}"
            if file not in self._keys_of:
                sources = [source for source in self._loader.get_sources() if source.is_config(file)]
                content = sources[0].load_config(file).config if sources else None
                self._keys_of[file] = [str(key) for key in content] if isinstance(content, DictConfig) else []
            names = self._keys_of[file]
            # A file that says nothing is no choice that could be made, but for hardware.
            if (group == "hardware" or node.get("build") or names) and "name" not in names:
                node.name = str(choice).rpartition("/")[2]


def _expect_name(composed: DictConfig) -> None:
    """Refuses a strategy without a name, which a run's folder is called by."""
    if "strategy" in composed and OmegaConf.is_missing(composed.strategy, "name"):
        raise configs.missing_value("strategy.name")


def _counts_first(own: Path, ours: Path, file: str) -> bool:
    """True if a person's own files count before ours of the same name, as their own config.yaml must not."""
    theirs, usual = own / file, ours / file
    if not (theirs.is_file() and usual.is_file()) or theirs.read_bytes() == usual.read_bytes():
        return True
    if taken := sorted(path for path in ours.glob("*/*.yaml") if (own / path.relative_to(ours)).is_file()):
        raise UserError(
            f"--config-dir to have no {file}, or no choice by a name of this program's",
            f"{theirs} and {own / taken[0].relative_to(ours)}",
            f"{in_shell(f'--config-path={own}')} in place of all choices, or another name",
        )
    return False


def config_of(schema: type[Typed], overrides: Sequence[str], own: str | None = None) -> Typed:
    """Returns the config that overrides ask for, of our choices and those in a folder. Raises `UserError`."""
    if option := next((override for override in overrides if override.startswith("-")), None):
        raise UserError("options that exist", option, "--help")
    configs.register(schema=schema)
    composed, _ = Composer("config" if schema is Config else "prepare", schema, own).composed(overrides)
    return configs.typed_as(schema, composed, overrides)


def _lines(overrides: ListConfig) -> list[str]:
    return [str(line) for line in OmegaConf.to_container(overrides, resolve=False) or ()]


def _parsed(overrides: Sequence[str], loader: ConfigLoader | None = None, schema: Schema = Config) -> list[Override]:
    with _refused(schema):
        return [configs.parsed(line, loader) for line in overrides]


@contextmanager
def _refused(schema: type, typed: Sequence[Override] = ()) -> Iterator[None]:
    """Turns what Hydra, OmegaConf and YAML raise inside into a `UserError` in our words."""
    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise configs.refusal(error, schema, typed) from error
    except RecursionError:
        expected, received = "files of choices whose defaults name others", "one that leads back to itself"
        raise UserError(expected, received, "another name for a file that adds to one of its own name") from None
