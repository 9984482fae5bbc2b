"""The size of a built model: its variables, what its optimizer keeps for each, and what a step keeps of an example.

Those of the built-in models come with the package, made by `tests/support/shipped_sizes.py`; others a process tells
that has built the model, and they are kept under the fingerprint of what they depend on.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from pipeline.config.parts import Part, flat, typed
from pipeline.config.schema import Object
from pipeline.plan.plan import Plan

SHIPPED = Path(__file__).with_name("sizes.json")
# Arguments of the built-in data that choose examples, and leave an example's shape as it is.
OF_EXAMPLES = (
    "train_examples", "validation_examples", "validation_fraction", "split_seed", "seed", "noise", "signal",
)  # fmt: skip
ONLY_TABLES = "only embeddings can be sharded"
# Bytes of a fixed size, and bytes for each example of a replica.
Moment: TypeAlias = tuple[int, int]


class Variable(Struct, frozen=True, array_like=True):
    """One variable of a model, and what the optimizer keeps beside it.

    `rows_per_example` are the rows that an example looks up in an embedding's table, None for other variables; `whole`
    says why it cannot be sharded over servers. JAX cuts it over the devices of a replica, where these are in `cut`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    slot_bytes: int
    rows_per_example: int | None = None
    whole: str | None = ONLY_TABLES
    cut: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of one copy of it."""
        return math.prod(self.shape) * bytes_each(self.dtype)

    @property
    def is_table(self) -> bool:
        """True for an embedding's, of which a step reads and changes only some rows."""
        return self.rows_per_example is not None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * bytes_each(self.dtype)


class Layer(Struct, frozen=True, array_like=True):
    """A layer that is placed as a whole: bytes of variables, gradients and slots, multiplications of one example.

    A part of the model may begin where it `begins`: not between a kernel and what TensorFlow would fuse with it.
    """

    name: str
    bytes: int
    work: int
    begins: bool
    variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Size:
    """A model's variables; bytes of the optimizer that belong to none of them; and what a step holds beside these.

    `step` are moments, one of which is the fullest at any batch, None for the reason in `unknown`; `forgetful_step`
    those with `train.remat=true`. `operations` are those of the compiled step. `example_bytes` are those of one example
    that every process holds, None for data that is read as it trains; `batch_bytes` those in a batch, if they differ.
    `normalizations` are the layers that normalize by the batch; `layers` are all, in the order of their calls.
    """

    variables: tuple[Variable, ...]
    optimizer_bytes: int
    step: tuple[Moment, ...] | None
    example_bytes: int | None
    unknown: str | None = None
    normalizations: int = 0
    operations: int = 0
    forgetful_step: tuple[Moment, ...] | None = None
    layers: tuple[Layer, ...] = field(default=(), compare=False)
    batch_bytes: int | None = None

    @property
    def parameters(self) -> int:
        """The count of its variables' numbers, as Keras has it, which leaves out the state of random numbers."""
        return sum(math.prod(one.shape) for one in self.variables if not one.dtype.startswith(("int", "uint")))


def places_layers(plan: Plan) -> bool:
    """True if whole layers are laid over the devices of a replica; a size has them then."""
    return plan.strategy.devices_per_replica > 1 and plan.backend == "tensorflow"


def facts(plan: Plan) -> dict[str, object]:
    """Returns what a model's size depends on, as far as a plan says."""
    decides = flat(plan, Part.SIZE) | {"data_build": of_shape(plan.data.build)}
    if plan.backend == "jax":
        # What a device holds is what XLA has made of a step on the devices of a replica.
        layout = plan.strategy.build.get("layout")
        decides |= {"backend": "jax", "devices_per_replica": plan.strategy.devices_per_replica, "layout": layout}
    return decides


def shipped(plan: Plan) -> Size | None:
    """The size that the package has of the plan's model, one of its own on data of its own, but none of layers."""
    shipped = () if places_layers(plan) else _shipped()
    return next((typed(known["size"], Size) for known in shipped if facts(plan) in known["of"]), None)


def fingerprint(plan: Plan, sources: str, versions: dict[str, str]) -> str:
    """Names what a size depends on; `sources` stands for the Python files that a person's own functions are in."""
    text = json.dumps([facts(plan), sources, versions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bytes_each(dtype: str) -> int:
    """Bytes of one number: 4 for "float32", 2 for "bfloat16", 1 for "bool"."""
    bits = re.search(r"\d+$", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def of_shape(data_build: Object) -> Object:
    """Returns what makes data, without what only chooses its examples."""
    ours = str(data_build.get("_target_")).startswith("pipeline.data.")
    return {name: value for name, value in data_build.items() if not (ours and name in OF_EXAMPLES)}


@cache
def _shipped() -> list[dict[str, Any]]:
    return json.loads(SHIPPED.read_text()) if SHIPPED.exists() else []
