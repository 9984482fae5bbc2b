"""Finds out how large a plan's model is: the package has it, an earlier command kept it, or it is built once."""

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import targets
from pipeline.launch import Cluster
from pipeline.plan import planning
from pipeline.plan import size as sizes
from pipeline.plan.backends import COMPUTING
from pipeline.plan.plan import Plan
from pipeline.plan.size import Size
from pipeline.record.log import read_json, write_json
from pipeline.run.session import RunRequest, Session
from pipeline.run.watch import RunFailed


def known(plan: Plan, path: Path) -> Size | None:
    """The size that comes with the package, or that is in the file `path`; None if neither."""
    size = sizes.shipped(plan)
    if size is None:
        size = read_json(Size, path)
    return size


def learned(plan: Plan, request: RunRequest, session: Session) -> Size | str:
    """The size, of a model that is built once if it is not known; why it could not be built, if so."""
    if size := sizes.shipped(plan):
        return size
    path = file(plan, request.output, session.search)
    size = known(plan, path)
    if size is None and path not in session.unbuilt:
        session.screen.say(
            f"\nBuilding the model once to know its size, which takes some seconds. {path} will keep it."
        )
        try:
            size = keep(learn(plan, session.here(request.config)), path)
        except RunFailed as failure:
            session.unbuilt[path] = str(failure)
    return session.unbuilt[path] if size is None else size


def learn(plan: Plan, cluster: Cluster) -> Size:
    """The size from a process that builds the model and ends. Raises `RunFailed`, in words for a person."""
    # What drives processes takes a moment to import.
    from pipeline.run.timing import learn_size

    builder = planning.builder_of(plan, cluster.inventory())
    with tempfile.TemporaryDirectory(prefix="pipeline-size-") as folder:
        return learn_size(cluster, builder, Path(folder))


def keep(size: Size, path: Path) -> Size:
    """The size, written to a file for later commands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, size)
    return size


def file(plan: Plan, output: Path, search: Sequence[str]) -> Path:
    """The file for the size of a plan's model, named by all that it depends on."""
    from importlib import metadata

    versions = {name: metadata.version(name) for name in (*COMPUTING.get(plan.backend, ()), "keras")}
    return output / "sizes" / f"{sizes.fingerprint(plan, _sources(plan, search), versions)}.json"


def _sources(plan: Plan, search: Sequence[str]) -> str:
    """A hash of the files of a person's own functions, and of those beside them, which they may import."""
    builds = (plan.model.build, plan.data.build, plan.training.optimizer, plan.training.loss)
    sources = {path for node in builds for path in targets.sources(node, search)}
    digest = hashlib.sha256()
    for path in sorted({beside for source in sources for beside in source.parent.glob("*.py")}):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()
