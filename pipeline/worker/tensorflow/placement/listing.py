"""Asks variables and the compiled graph where they are, refuses what is not as planned, and lists what is where."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import keras
import tensorflow as tf

from pipeline.worker.model_error import TrainingError
from pipeline.worker.tensorflow.placement import Placement
from pipeline.worker.tensorflow.size import BACKWARD, body_of
from pipeline.worker.tensorflow.step import optimizers
from pipeline.worker.variables import bytes_of, slots_of

# In a run's folder.
FILE = "placement.txt"


@dataclass(frozen=True)
class Row:
    """A variable of a layer: where each replica has it, its slots there, and its layer's operations in a step there."""

    devices: tuple[str, ...]
    bytes: int
    slot_bytes: int
    forward: int
    backward: int
    layer: str
    variable: str
    slots: tuple[str, ...]


def checked(model: keras.Model, placement: Placement, graph: tf.Graph, folder: Path) -> str:
    """Writes what is where into a run's folder, and says it in short. Raises `TrainingError` if not as planned."""
    rows = listed(model, placement, graph)
    write(rows, folder)
    held = [f"{size:,}" for size in held_bytes(rows, placement)]
    return (
        f"Each copy of the model is laid over {len(held)} devices, which hold {', '.join(held[:-1])} and {held[-1]} "
        f"bytes of weights and of the optimizer's state ({FILE})."
    )


def listed(model: keras.Model, placement: Placement, graph: tf.Graph) -> list[Row]:
    """Lists what is where, from variables and the graph of the compiled loop. Raises `TrainingError`."""
    # Each variable, slot and operation, of the forward and the backward pass, has to be where its layer is planned.
    at = placement.of_variables(model)
    slots, layers = slots_of(optimizers(model)), {id(one): unit for unit in placement.units for one in unit.variables}
    counted = _counted(placement, body_of(graph))
    rows = []
    for variable in model.variables:
        own = slots.get(id(variable), [])
        planned = [_name(device) for device in placement.on(at[id(variable)])]
        for one in (variable, *own):
            _expect(f"variable {one.path}", planned, _places(one))
        layer = layers[id(variable)].layer.name if id(variable) in layers else ""
        sizes, calls = (bytes_of(variable), sum(map(bytes_of, own))), (counted[layer, False], counted[layer, True])
        rows.append(Row(tuple(planned), *sizes, *calls, layer, variable.path, tuple(slot.path for slot in own)))
    return rows


def held_bytes(rows: Sequence[Row], placement: Placement) -> list[int]:
    """Bytes of weights and slots on each device of the first replica."""
    held = dict.fromkeys(map(_name, placement.devices[0]), 0)
    for row in rows:
        held[row.devices[0]] += row.bytes + row.slot_bytes
    return list(held.values())


def write(rows: Sequence[Row], folder: Path) -> None:
    """Writes the listing into a run's folder, a line for each variable."""
    head = [field.name.replace("_", " ") for field in fields(Row)]
    cells = [head, *(list(map(_cell, astuple(row))) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text("\n".join(lines) + "\n")


def _cell(value: object) -> str:
    return (" ".join(value) if isinstance(value, tuple) else str(value)) or "-"


def _counted(placement: Placement, body: tf.Graph) -> Counter[tuple[str, bool]]:
    """Operations of each layer, of all replicas: (layer, of its backward pass?)."""
    counts = Counter[tuple[str, bool]]()
    for operation in body.get_operations():
        # What comes from outside is no operation.
        if operation.type == "Placeholder" or (call := placement.call_of(operation.name)) is None:
            continue
        unit, backward = call[0], BACKWARD in operation.name
        what = f"operation {operation.name}" + " of the backward pass" * backward
        # What replicas give each other is made in the scope of the first.
        planned = [_name(device) for device in placement.on(placement.parts[unit])]
        found_on = _name(placement.placed(operation))
        _expect(what, [found_on] if found_on in planned else planned, [found_on])
        counts[placement.units[unit].layer.name, backward] += 1
    return counts


def _expect(what: str, planned: list[str], places: list[str]) -> None:
    if planned != places:
        actual = " and ".join(device or "no device" for device in places)
        expected = f"{what} on {' and '.join(planned)}, where its layer is planned"
        raise TrainingError(expected, f"it on {actual}", "strategy.build.layout, or strategy=mirrored")


def _places(variable: keras.Variable) -> list[str]:
    return [_name(one.device) for one in getattr(variable.value, "values", (variable.value,))]


def _name(device: str) -> str:
    """CPU:1 of /job:localhost/replica:0/task:0/device:CPU:1."""
    return device.rpartition("device:")[2]
