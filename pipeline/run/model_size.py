"""Finds out how large a plan's model is: the package has it, an earlier command kept it, or it is built once."""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.config import targets
from pipeline.launch import Cluster
from pipeline.plan import planning
from pipeline.plan import size as sizes
from pipeline.plan.backends import COMPUTING
from pipeline.plan.plan import Plan
from pipeline.plan.size import Size
from pipeline.record.log import write_whole


def known(plan: Plan, kept: Path) -> Size | None:
    """The size where it comes with the package, or is in the file `kept`."""
    size = sizes.shipped(plan)
    if size is None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            size = sizes.from_plain(json.loads(kept.read_text()))
    return size


def learn(plan: Plan, cluster: Cluster) -> Size:
    """What a process says that builds the model and ends; raises `RunFailed`, in words for a person."""
    # Only where a model is to be built: what conducts processes takes a moment to import.
    from pipeline.run.timing import learn_size

    builder = planning.builder_of(plan, cluster.inventory())
    with tempfile.TemporaryDirectory(prefix="pipeline-size-") as folder:
        return learn_size(cluster, builder, Path(folder))


def keep(size: Size, kept: Path) -> Size:
    """The size, written to the file `kept` for later commands."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_whole(kept, json.dumps(sizes.to_plain(size)))
    return size


def file(plan: Plan, output: Path, search: Sequence[str]) -> Path:
    """Where the size of the plan's model is kept, under all that it depends on."""
    from importlib import metadata

    versions = {name: metadata.version(name) for name in (*COMPUTING.get(plan.backend, ()), "keras")}
    return output / "sizes" / f"{sizes.fingerprint(plan, _sources(plan, search), versions)}.json"


def _sources(plan: Plan, search: Sequence[str]) -> str:
    """A hash of the files that a person's own functions are in, and of those beside them, which they may import."""
    named = (plan.model.build, plan.data.build, plan.training.optimizer, plan.training.loss)
    found = {path for node in named for path in targets.sources(node, search)}
    digest = hashlib.sha256()
    for path in sorted({beside for source in found for beside in source.parent.glob("*.py")}):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()
