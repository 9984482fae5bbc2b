"""Turns a config, and what this package requires, into what each host is asked and expected to have."""

import ipaddress
import platform
import tempfile
from collections.abc import Sequence
from importlib import metadata

from packaging.requirements import Requirement

from pipeline.config.schema import Config, Kind
from pipeline.doctor.backends import BACKENDS, known
from pipeline.doctor.facts import Look
from pipeline.doctor.judge import Expected
from pipeline.doctor.look import installed

PACKAGE = "distributed-keras-pipeline"
LOOPBACK = "localhost"


# What is looked at of a host that conducts and trains nothing.
OF_CONDUCTOR = ("python", "packages", "files", "disk", "names")


def look_of(config: Config, checks: Sequence[str], addresses: Sequence[str], others: Sequence[str], here: bool) -> Look:
    """What a host is asked: `addresses` are to be free on it, and `others` found; `here` is the one that conducts."""
    wanted = frozenset(checks)
    folders = [config.output_dir] if here else []
    if config.checkpoint.folder and "://" not in config.checkpoint.folder:
        folders.append(config.checkpoint.folder)
    folders.append(tempfile.gettempdir())
    return Look(
        checks=tuple(checks),
        backend=known(config.backend),
        packages=tuple(requirements(known(config.backend))) if "packages" in wanted else (),
        folders=tuple(dict.fromkeys(folders)) if "disk" in wanted else (),
        addresses=tuple(addresses) if "ports" in wanted else (),
        names=tuple(dict.fromkeys((LOOPBACK, *filter(_is_name, others)))) if "names" in wanted else (),
    )


def expected_of(config: Config, conductor: str, others: Sequence[str]) -> Expected:
    """What each host is to have; `conductor` is what this one is called, whose versions are those of all."""
    hardware, backend = config.hardware, known(config.backend)
    packages = requirements(backend)
    devices = hardware.devices_per_host or 1
    on_cpu = hardware.kind is Kind.cpu
    return Expected(
        python=_python(),
        packages=packages,
        versions={name: installed(name) for name in packages},
        python_version=platform.python_version(),
        conductor=conductor,
        backend=backend,
        gpus=devices if hardware.kind is Kind.gpu and not hardware.rehearse else 0,
        cores=devices * (hardware.threads_per_device or 1) if on_cpu else 1,
        on_cpu=on_cpu or hardware.rehearse,
        others=tuple(others),
    )


def requirements(backend: str) -> dict[str, str]:
    """The packages that this one requires under a backend, with the versions that it takes; where it is not installed,
    a few.
    """
    chosen = BACKENDS[backend]
    try:
        required = [Requirement(line) for line in metadata.requires(PACKAGE) or ()]
    except metadata.PackageNotFoundError:
        return dict.fromkeys(chosen.alike, "")
    return {
        one.name: _in_order(str(one.specifier))
        for one in required
        if one.name not in chosen.spared
        and (one.marker is None or one.marker.evaluate() or one.marker.evaluate({"extra": chosen.extra}))
    }


def _python() -> str:
    try:
        return _in_order(metadata.metadata(PACKAGE)["Requires-Python"])
    except (metadata.PackageNotFoundError, KeyError):
        return ""


def _is_name(host: str) -> bool:
    """Is this a name, whose address is to be found?"""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    return False


def _in_order(specifier: str) -> str:
    """The least version first.

    >>> _in_order("<3.16,>=3.15")
    '>=3.15,<3.16'
    """
    return ",".join(sorted(specifier.split(","), reverse=True))
