"""A run's name, parameters and tags in MLflow, and where it is tracked."""

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
from pipeline.config import offered, parts, targets
from pipeline.config.parts import Part
from pipeline.config.schema import Config
from pipeline.config.schema import Store as Kind
from pipeline.driver.session import RunRequest
from pipeline.plan.backends import other
from pipeline.plan.plan import Plan
from pipeline.record.files import TrackingStore
from pipeline.record.results import Choices, Layout

PROGRAM = ("python", "-m", "pipeline")
# A value in JSON that is typed as it stands.
PLAIN = re.compile(r'"?[\w./-]+"?')
COMMIT = "mlflow.source.git.commit"


def parameters(planned: Plan, config: Config) -> dict[str, object]:
    """The choices and the resolved numbers, flat and short, as MLflow's parameters."""
    flat = parts.flat(planned, Part.PARAMETER) | {"processes": len(planned.processes), "collective": planned.collective}
    optimizer = config.train.optimizer
    flat["optimizer"] = optimizer.get(targets.KEY, "") if isinstance(optimizer, dict) else optimizer
    for group, build in (("model", planned.model.build), ("data", planned.data.build)):
        flat |= {f"{group}.{name}": value for name, value in build.items() if name != targets.KEY}
    return {name: value for name, value in flat.items() if value is not None}


def name_of(planned: Plan) -> str:
    """The run's name in MLflow, which is all that charts show of it."""
    hardware = planned.hardware
    doubts = comparable.doubts(Layout(rehearsal=hardware.rehearsal, oversubscribed=hardware.oversubscribed))
    marked = f" ({', '.join(doubts)})" if doubts else ""
    called = Choices(planned.strategy.name, backend=other(planned.backend)).called
    return f"{called}-{planned.workers}-{planned.model.name}-{planned.data.name}{marked}"


def store_of(config: Config) -> TrackingStore | None:
    """The store that tracks a run; None if none does."""
    tracking, output = config.tracking, Path(config.output_dir).resolve()
    if tracking.store is Kind.none:
        return None
    uri = tracking.uri or f"sqlite:///{output / 'mlflow.db'}"
    artifacts = (output / "mlartifacts").as_uri() if tracking.store is Kind.sqlite else None
    return TrackingStore(tracking.store.value, uri, tracking.experiment, artifacts, tracking.log_model)


def command_of(overrides: Sequence[str], options: Sequence[str] = ()) -> str:
    """The command that runs one run again, even one of a sweep.

    A ready sweep stays one whatever else is typed, so the keys of its file are typed in its place.

    >>> command_of(["experiment=strategies", "strategy=mirrored", "sweep.name=mine"])
    'python -m pipeline measure.baseline=fresh strategy=mirrored'
    """
    typed = {_key(override): override for override in overrides if not _key(override).startswith("sweep.")}
    ready, keys = typed.pop("experiment", None), dict[str, str]()
    if ready is not None:
        named = [
            option.partition("=")[2] for option in options if option.startswith(("--config-dir=", "--config-path="))
        ]
        files = [
            folder / f"experiment/{ready.partition('=')[2]}.yaml" for folder in (*map(Path, named), offered.folder())
        ]
        contents: object = None
        with suppress(OSError, YAMLError, OmegaConfBaseException, StopIteration):
            file = next(file for file in files if file.is_file())
            contents = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        values: dict[str, str] | None = None
        if isinstance(contents, dict) and "defaults" not in contents:
            of_runs = {key: value for key, value in contents.items() if key not in ("sweep", "hydra")}
            values = {key: json.dumps(value) for key, value in comparable.flat(of_runs)}
        if values is None or not all(map(PLAIN.fullmatch, values.values())):
            # Its keys cannot be typed.
            return shlex.join([*PROGRAM, *options, *typed.values(), ready, "hydra.mode=RUN", "sweep.name=null"])
        keys = {key: f"{key}={value.strip(chr(34))}" for key, value in values.items()}
    return shlex.join([*PROGRAM, *options, *(keys | typed).values()])


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def origin() -> dict[str, str]:
    """User, program and commit, as MLflow shows them, as far as they are known."""
    tags = {"mlflow.source.name": shlex.join(PROGRAM), "mlflow.source.type": "LOCAL"}
    # A user may have no name, as in a container.
    with suppress(OSError, KeyError):
        tags["mlflow.user"] = getpass.getuser()
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=True)
        tags[COMMIT] = shown.stdout.strip()
    return {name: value for name, value in tags.items() if value}


def tags_of(planned: Plan, request: RunRequest, options: Sequence[str] = ()) -> dict[str, str]:
    """A run's tags in MLflow. `options` are the command's that say where configs are."""
    tags, hardware = origin(), planned.hardware
    tags |= {
        "git_commit": tags.get(COMMIT, ""),
        "command": command_of(request.overrides, options),
        "host": os.uname().nodename,
        "device_kind": hardware.kind,
        "machine": hardware.machine,
        "sweep": request.sweep or "",
        "overrides": " ".join(request.overrides),
        "rehearsal": str(hardware.rehearsal).lower(),
        "oversubscribed": str(hardware.oversubscribed).lower(),
    }
    return {name: value for name, value in tags.items() if value}
