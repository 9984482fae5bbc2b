"""Turns the command line into composed configs, by Hydra: one of a run, or one of each point of a sweep, each once.

What is wrong is refused before Hydra acts on it: it would call functions that a config names, and write the config.
"""

import argparse
import dataclasses
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from functools import partial
from pathlib import Path

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import run_job
from hydra.errors import HydraException, MissingConfigException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from pipeline.config.config import NAMED
from pipeline.config.hydra_node import check_alone, check_hydra
from pipeline.config.instead import LAYOUT, find, fitting, in_shell, meant_by_key, usual
from pipeline.config.messages import explain, missing_value
from pipeline.config.overrides import check_not_swept, check_overrides
from pipeline.config.schema import (
    WITH_PASSWORD,
    Config,
    HardwareConfig,
    Mode,
    PrepareConfig,
    holds_password,
    wrong_name,
)
from pipeline.config.shipped import LAYOUTS, folder
from pipeline.errors import UserError

# Its options that have a value, with one.
WITH_VALUE = {
    "--config-path": "--config-dir=FOLDER", "--config-dir": "--config-dir=FOLDER",
    "--config-name": "--config-name=config", "--cfg": "--cfg job", "--info": "--info searchpath",
    "--package": "--cfg job --package train",
}  # fmt: skip
# Hydra's options of which one alone says what is to be done.
COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")

Schema = type[Config] | type[PrepareConfig]


@dataclasses.dataclass(frozen=True)
class Composed:
    """One config as Hydra composed it, its folder, that of the sweep that it is of, if it is, and what was typed."""

    config: DictConfig
    folder: Path
    sweep: Path | None
    overrides: list[str]


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Hydra's options and the overrides of a command line, in any order. Raises `UserError`.

    >>> options(["workers=2", "--config-dir", "mine", "model=own", "-m"]).overrides
    ['workers=2', 'model=own']
    >>> options(["--workers", "2"])
    Traceback (most recent call last):
    pipeline.errors.UserError: Expected options that exist, with their values, received: unrecognized \
arguments: --workers. Try workers=2.
    """
    said = io.StringIO()
    with redirect_stderr(said), suppress(SystemExit):
        given = get_args_parser().parse_intermixed_args(arguments)
        if sum(getattr(given, name) not in (False, None) for name in COMMANDS) > 1:
            raise UserError(f"one of --{', --'.join(COMMANDS)}", "several", "one of them")
        if given.resolve and not given.cfg:
            raise UserError("--resolve beside --cfg", "it alone", "--cfg job --resolve")
        if given.experimental_rerun is not None:
            raise UserError("overrides", "a config in --experimental-rerun", "typing it")
        return given
    problem = said.getvalue().rpartition("error: ")[2].strip()
    raise UserError(
        f"Expected options that exist, with their values, received: {problem}. Try {_instead_of(arguments, problem)}."
    )


def _instead_of(arguments: Sequence[str], problem: str) -> str:
    """What to type in place of an option that argparse has a problem with: `key=value` where it was one with dashes.

    >>> _instead_of(["--batch-size", "8"], "unrecognized arguments: --batch-size"), _instead_of(["--x"], "--x")
    ('train.global_batch=8', '`python -m pipeline --help`')
    """
    for option, text in WITH_VALUE.items():
        if option in problem:
            return text
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not option.startswith("-") or option not in problem:
            continue
        following = "".join(arguments[place + 1 : place + 2])
        if not equals and not following.startswith("-") and "=" not in following:
            value = following
        key = option.strip("-").replace("-", "_")
        if not find(key)[3]:
            return fitting(f"{key}={value or (usual(key) or ('null',))[0]}")
        if closest := meant_by_key(key, value=value):
            return " or ".join(closest)
    return "`python -m pipeline --help`"


def where_configs_are(given: argparse.Namespace) -> tuple[str, ...]:
    """The options that say so, to be typed again.

    >>> where_configs_are(options(["--config-dir", "mine", "model=own", "-m"]))
    ('--config-dir=mine',)
    """
    named = {
        f"--{name.replace('_', '-')}": getattr(given, name) for name in ("config_path", "config_name", "config_dir")
    }
    return tuple(f"{name}={value}" for name, value in named.items() if value)


class Composer:
    """Hydra, on our choices and those of a person's own folder. All it does raises `UserError`."""

    def __init__(self, name: str, schema: Schema, own: str | None, ours: str | None = None) -> None:
        for option, place in (("--config-dir", own), ("--config-path", ours)):
            if place is not None and not Path(place).is_dir():
                raise UserError(f"{option} to be a folder", place, "its path from here, or an absolute one")
        if ours is not None and not any((Path(place) / f"{name}.yaml").is_file() for place in (own, ours) if place):
            raise UserError(
                f"--config-path to be a folder with {name}.yaml, in place of this program's own choices",
                f"{ours}, which has none",
                f"{in_shell(f'--config-dir={ours}')} for choices beside these",
            )
        version.setbase("1.3")
        # Where files of choices are, a person's own first.
        self._places = [Path(os.path.abspath(place)) for place in (own, ours or folder()) if place is not None]
        search = create_config_search_path(str(self._places[-1]))
        if own is not None:
            search.prepend("command-line", f"file://{self._places[0]}", anchor=SearchPathQuery(provider="schema"))
        self._name, self._schema = name, schema
        self._loader = _Loader(search, schema)
        self._hydra = Hydra(task_name="pipeline", config_loader=self._loader)

    def show(self, given: argparse.Namespace) -> bool:
        """Prints what `options` ask to see instead of a run; False where they ask for nothing."""
        hydra, name, overrides = self._hydra, self._name, given.overrides
        with _refused(self._schema):
            if given.hydra_help:
                hydra.hydra_help(config_name=name, args_parser=get_args_parser(), args=given)
            elif given.cfg:
                hydra.show_cfg(name, overrides, cfg_type=given.cfg, package=given.package, resolve=given.resolve)
            elif given.info:
                hydra.show_info(given.info, config_name=name, overrides=overrides)
            elif given.shell_completion:
                hydra.shell_completion(config_name=name, overrides=overrides)
            else:
                return False
        return True

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """One config, without Hydra's own part."""
        return self.composed(overrides)[0]

    def composed(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
        """One config, without Hydra's own part, and the choice that it has of each group."""
        composed = self._loader.load_configuration(self._name, list(overrides), RunMode.RUN)
        chosen = {group: choice for group, choice in composed.hydra.runtime.choices.items() if choice is not None}
        with open_dict(composed):
            del composed["hydra"]
        return composed, chosen

    def choices(self) -> dict[str, list[str]]:
        """The choices of each group: ours, a person's own, and those that installed packages offer."""
        for name in LAYOUTS:
            _lay_out(name)
        groups = sorted(group for group in self._loader.list_groups("") if group != "hydra")
        return {group: sorted(self._loader.get_group_options(group)) for group in groups}

    def written(self, group: str | None = None, choice: str = "") -> str:
        """The text of a choice's file, with its comments, or of the config itself; "" of one that a package offers.

        That of a layout, which has no file, says what it is.
        """
        name = f"{self._name}.yaml" if group is None else f"{group}/{choice}.yaml"
        found = next((place / name for place in self._places if (place / name).is_file()), None)
        layout = LAYOUT.match(choice) if group == "hardware" else None
        if found is None and layout is not None:
            hosts, devices, kind = layout.groups()
            where = f"on each of {hosts} hosts" if hosts else "on one host"
            return f"# {devices} {kind.upper()} device{'s' * (devices != '1')} {where}.\n"
        return "" if found is None else found.read_text(encoding="utf-8")

    def points(self, overrides: Sequence[str], many: bool) -> Iterator[Composed]:
        """The config of a run, or those of a sweep's points; each is written into the folder that Hydra has for it.

        It is a sweep with `many`, or where the config itself says so. All are composed before anything is written.
        """
        swept = [override for override in _parsed(overrides) if override.is_sweep_override()]
        mode = RunMode.MULTIRUN if many or swept else RunMode.RUN
        asked = [*overrides, *(["hydra.mode=MULTIRUN"] if many else [])]
        whole = self._loader.load_configuration(self._name, asked, mode)
        if whole.hydra.mode is not RunMode.MULTIRUN:
            check_not_swept(swept)
            whole.hydra.mode = RunMode.RUN
            yield self._written(whole, None)
            return
        HydraConfig.instance().set_config(whole)
        with _refused(self._schema):
            place = Path(str(whole.hydra.sweep.dir))
        points = [self._loader.load_sweep_config(whole, list(point)) for point in self._expanded(whole)]
        place.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(whole, place / "multirun.yaml")
        for number, point in enumerate(points):
            with open_dict(point):
                point.hydra.job.id = point.hydra.job.num = number
            yield self._written(point, place)

    def _expanded(self, whole: DictConfig) -> Iterator[tuple[str, ...]]:
        """The overrides of each point of a sweep: every combination of what was typed and what its config sweeps."""
        lines = [f"{key}={value}" for key, value in (whole.hydra.sweeper.params or {}).items()]
        values: dict[str, list[str]] = {}
        for override in _parsed([*lines, *_task(whole)], self._loader):
            key = override.get_key_element()
            if override.is_interval_sweep():
                raise UserError(
                    f"values of {key} that can be counted", override.input_line, f"-m {key}=1,2 or {key}=range(1,3)"
                )
            swept = override.is_sweep_override()
            texts = self._swept(override) if swept else [override.get_value_element_as_str()]
            values[key] = [f"{key}={text}" for text in texts]
        return itertools.product(*values.values())

    def _swept(self, override: Override) -> list[str]:
        """Returns the values that a sweep has of a key. Raises `UserError` where there are none."""
        key = override.get_key_element()
        try:
            texts = list(override.sweep_string_iterator())
        except (HydraException, ValueError):
            # A range of steps of 0, which never ends, or a glob of what is no group.
            texts = []
        if not texts:
            choices = self.choices().get(override.key_or_group)
            values = choices[:2] if choices else usual(override.key_or_group, self._schema)[:1]
            raise UserError(
                f"at least one value of {key} for a sweep",
                f"{override.input_line}, which gives none",
                f"-m {in_shell(f'{key}=' + (','.join(values) or 'null'))}",
            )
        return texts

    def _written(self, composed: DictConfig, sweep: Path | None) -> Composed:
        """Writes a config into its folder, from then on `hydra.runtime.output_dir`."""
        if "strategy" in composed and OmegaConf.is_missing(composed.strategy, "name"):
            raise UserError(missing_value("strategy.name"))  # which its folder is called by
        if OmegaConf.select(composed, "mode") in (Mode.plan, Mode.predict):
            # Of what starts nothing nothing stays.
            composed.hydra.output_subdir = None
        place, below = ("hydra.sweep.dir", "hydra.sweep.subdir") if sweep else ("hydra.run.dir", None)
        with _refused(self._schema):
            context = HydraContext(config_loader=self._loader, callbacks=Callbacks(composed))
            job = run_job(lambda config: None, composed, place, below, hydra_context=context)
        assert job.cfg is not None and job.hydra_cfg is not None  # noqa: PT018 - both or none
        # What refers to Hydra's own part is found in it.
        HydraConfig.instance().set_config(job.hydra_cfg)
        return Composed(job.cfg, Path(job.hydra_cfg.hydra.runtime.output_dir), sweep, _task(composed))


class _Loader(ConfigLoaderImpl):
    """Hydra's, which refuses wrong overrides before it composes, and a wrong config before Hydra acts on it."""

    def __init__(self, search: ConfigSearchPath, schema: Schema) -> None:
        super().__init__(search)
        self._schema = schema

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """The composed config, Hydra's own part included. Raises `UserError`."""
        typed = _parsed(overrides, schema=self._schema)
        if run_mode is RunMode.RUN:
            check_not_swept(typed)
        check_overrides(typed, self._schema, partial(self._is_group, config_name, overrides))
        with _refused(self._schema, typed):
            for override in typed:
                if override.key_or_group == "hardware":
                    _lay_out(str(override.value()))
            try:
                composed = super().load_configuration(config_name, overrides, run_mode, from_shell)
            except MissingConfigException as error:
                # One that an experiment names.
                group, _, name = (error.missing_cfg_file or "").rpartition("/")
                if group != "hardware" or not _lay_out(name):
                    raise
                composed = super().load_configuration(config_name, overrides, run_mode, from_shell)
            self._name_by_choice(composed)
        plain = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(plain, dict)
        check_hydra(plain["hydra"], "hydra")
        check_alone(plain["hydra"], plain["hydra"]["runtime"]["choices"])
        tracking = plain.get("tracking")
        if holds_password(tracking.get("uri") if isinstance(tracking, dict) else None):
            raise UserError(WITH_PASSWORD)
        for key in ("sweep.name", "strategy.name"):
            with suppress(OmegaConfBaseException):
                name = OmegaConf.select(composed, key)
                if name is not None and (wrong := wrong_name(key, str(name))):
                    raise UserError(wrong)
        return composed

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """The choices of a group, without a copy of all that is known, which Hydra makes for each group it lists."""
        if config_name is None and not overrides:
            return list(self.repository.get_group_options(group_name, results_filter))
        return super().get_group_options(group_name, results_filter, config_name, overrides)

    def _is_group(self, config_name: str | None, overrides: list[str], key: str) -> bool:
        """Are there choices of `key`? Only what is no other key either is looked for where a config says to."""
        if self.repository.group_exists(key) or "." in key or not find(key, self._schema)[3]:
            return self.repository.group_exists(key)
        return bool(self.get_group_options(key, config_name=config_name, overrides=overrides))

    def _name_by_choice(self, composed: DictConfig) -> None:
        """Gives what was chosen without a name that of the choice; a name that its file leaves open stays so."""
        for group in NAMED:
            node, choice = composed.get(group), composed.hydra.runtime.choices.get(group)
            if not isinstance(node, DictConfig) or not choice:
                continue
            found = self.repository.load_config(f"{group}/{choice}")
            said = list(found.config.keys()) if found is not None and isinstance(found.config, DictConfig) else []
            # A file that says nothing is no choice that could be made, but for hardware.
            made = group == "hardware" or node.get("build") or said
            if made and "name" not in said and OmegaConf.is_missing(node, "name"):
                node.name = str(choice).rpartition("/")[2]


def _task(composed: DictConfig) -> list[str]:
    """What was typed for a config, as it was typed: what it refers to may not exist."""
    return [str(line) for line in OmegaConf.to_container(composed.hydra.overrides.task, resolve=False) or ()]


def _parsed(
    overrides: Sequence[str], loader: ConfigLoaderImpl | None = None, schema: Schema = Config
) -> list[Override]:
    with _refused(schema):
        return OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))


@contextmanager
def _refused(schema: type, typed: Sequence[Override] = ()) -> Iterator[None]:
    """Inside, what Hydra, OmegaConf and YAML raise is a `UserError` in our words."""
    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(explain(error, schema, typed)) from error


def _lay_out(name: str) -> bool:
    """Makes hardware of a layout's name, such as 2x8gpu, known to Hydra, where a file comes first; false for others."""
    found = LAYOUT.match(name)
    if found is not None:
        hosts, devices, kind = found.groups()
        node = dataclasses.asdict(HardwareConfig(name, int(hosts or 1), int(devices))) | {"kind": kind}
        ConfigStore.instance().store(group="hardware", name=name, node=node)
    return found is not None
