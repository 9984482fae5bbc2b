"""What a run is called in MLflow, where it is tracked, and with which parameters and tags."""

import getpass
import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from pipeline.analyze import comparable
from pipeline.config import parts, shipped, targets
from pipeline.config.parts import Part
from pipeline.config.schema import Config
from pipeline.config.schema import Store as Kind
from pipeline.plan.backends import other
from pipeline.plan.plan import Plan
from pipeline.record.results import Choices, Layout
from pipeline.record.tracking import Store
from pipeline.run.session import RunRequest

PROGRAM = ("python", "-m", "pipeline")
# The group of ready sweeps, and what makes one run of one.
EXPERIMENT, AS_ONE_RUN = "experiment", ("hydra.mode=RUN", "sweep.name=null")
# A value in JSON that is typed as it stands.
PLAIN = re.compile(r'"?[\w./-]+"?')
# As MLflow calls them.
USER, SOURCE, SOURCE_KIND, COMMIT = (
    "mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit",
)  # fmt: skip


def parameters(planned: Plan, config: Config) -> dict[str, object]:
    """The choices and the resolved numbers, flat and short, as MLflow's parameters."""
    flat = parts.flat(planned, Part.PARAMETER) | {"processes": len(planned.processes), "collective": planned.collective}
    optimizer = config.train.optimizer
    flat["optimizer"] = optimizer.get(targets.KEY, "") if isinstance(optimizer, dict) else optimizer
    for group, build in (("model", planned.model.build), ("data", planned.data.build)):
        flat |= {f"{group}.{name}": value for name, value in build.items() if name != targets.KEY}
    return {name: value for name, value in flat.items() if value is not None}


def name_of(planned: Plan) -> str:
    """What the run is called in MLflow, where charts show nothing else of it."""
    hardware = planned.hardware
    doubts = comparable.doubts(Layout(rehearsal=hardware.rehearsal, oversubscribed=hardware.oversubscribed))
    marked = f" ({', '.join(doubts)})" if doubts else ""
    called = Choices(planned.strategy.name, backend=other(planned.backend)).called
    return f"{called}-{planned.workers}-{planned.model.name}-{planned.data.name}{marked}"


def store_of(config: Config) -> Store | None:
    """Where a run is tracked; None for nowhere."""
    tracking, output = config.tracking, Path(config.output_dir).resolve()
    if tracking.store is Kind.none:
        return None
    local = tracking.store is Kind.sqlite
    return Store(
        store=tracking.store.value,
        uri=tracking.uri or f"sqlite:///{output / 'mlflow.db'}",
        experiment=tracking.experiment,
        artifacts=(output / "mlartifacts").as_uri() if local else None,
        log_model=tracking.log_model,
    )


def command_of(overrides: Sequence[str], options: Sequence[str] = ()) -> str:
    """What to type to run one point again, be it of a sweep.

    A ready sweep stays one whatever else is typed, so what its file says of a run is typed in its place.

    >>> command_of(["experiment=strategies", "strategy=mirrored", "sweep.name=mine"])
    'python -m pipeline measure.baseline=fresh strategy=mirrored'
    """
    asked = {_key(override): override for override in overrides if not _key(override).startswith("sweep.")}
    ready = asked.pop(EXPERIMENT, None)
    if ready is not None:
        said = _said_of_runs(ready.partition("=")[2], options)
        asked = ({_key(override): override for override in said} | asked) if said is not None else asked
        return shlex.join([*PROGRAM, *options, *asked.values(), *([ready, *AS_ONE_RUN] if said is None else [])])
    return shlex.join([*PROGRAM, *options, *asked.values()])


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _said_of_runs(name: str, options: Sequence[str]) -> list[str] | None:
    """What the file of a ready sweep says beside the sweep; None where that cannot be typed."""
    own = [option.partition("=")[2] for option in options if option.startswith(("--config-dir=", "--config-path="))]
    places = [*map(Path, own), shipped.folder()]
    files = [place / EXPERIMENT / f"{name}.yaml" for place in places]
    said: object = None
    with suppress(OSError, YAMLError, OmegaConfBaseException, StopIteration):
        said = OmegaConf.to_container(OmegaConf.load(next(file for file in files if file.is_file())), resolve=False)
    if not isinstance(said, dict) or "defaults" in said:
        return None
    of_runs = {key: value for key, value in said.items() if key not in ("sweep", "hydra")}
    values = {key: json.dumps(value) for key, value in comparable.flat(of_runs)}
    plain = all(map(PLAIN.fullmatch, values.values()))
    return [f"{key}={value.strip(chr(34))}" for key, value in values.items()] if plain else None


def origin() -> dict[str, str]:
    """Who runs what, of which commit, as MLflow shows it; what is not known is left out."""
    tags = {USER: None, SOURCE: shlex.join(PROGRAM), SOURCE_KIND: "LOCAL", COMMIT: None}
    # Of a number that has no name, as in a container.
    with suppress(OSError, KeyError):
        tags[USER] = getpass.getuser()
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=True)
        tags[COMMIT] = said.stdout.strip()
    return {name: value for name, value in tags.items() if value}


def tags_of(planned: Plan, request: RunRequest, options: Sequence[str] = ()) -> dict[str, str]:
    """A run's tags in MLflow, those that there are. `options` are those that say where configs are."""
    known = origin()
    tags = known | {
        "git_commit": known.get(COMMIT),
        "command": command_of(request.overrides, options),
        "host": os.uname().nodename,
        "device_kind": planned.hardware.kind,
        "machine": planned.hardware.machine,
        "sweep": request.sweep,
        "overrides": " ".join(request.overrides) or None,
        "rehearsal": str(planned.hardware.rehearsal).lower(),
        "oversubscribed": str(planned.hardware.oversubscribed).lower(),
    }
    return {name: value for name, value in tags.items() if value}
