"""Compares labels with the losses and outputs of a model, before either meets the other in a compiled step.

Cross-entropies over classes are looked at, of whose labels TensorFlow complains in the middle of a graph, or not at all
on a GPU; and the shapes under losses that compare element by element, which are broadcast over the batch by chance.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import keras
import numpy as np
from keras import losses

from pipeline.data.arrays import Nested
from pipeline.data.errors import DataError, refuse
from pipeline.private_keras import compute_output_spec

# Arrays or tensors with the examples along the first axis, as (x, y) or (x, y, weights).
Batch: TypeAlias = Nested[Any]
# What a loss takes: class numbers, a number for each class, or labels of the shape of the outputs.
Kind: TypeAlias = Literal["sparse", "one-hot", "elementwise"]

# The functions that Keras's losses compute, also where a loss is an object.
KINDS: dict[Kind, tuple[Callable[..., Any], ...]] = {
    "sparse": (losses.sparse_categorical_crossentropy,),
    "one-hot": (losses.categorical_crossentropy, losses.categorical_focal_crossentropy),
    "elementwise": (
        losses.mean_squared_error, losses.mean_absolute_error, losses.mean_absolute_percentage_error, losses.huber,
        losses.mean_squared_logarithmic_error, losses.log_cosh, losses.poisson, losses.binary_crossentropy,
        losses.binary_focal_crossentropy,
    ),
}  # fmt: skip

# Labels between which as many are never seen as this, and half as many as there are classes, are far from dense.
GAP = 5


@dataclass(frozen=True)
class Output:
    """One output of a model, of a `shape` that begins with the batch, under a loss of a `kind`.

    `key` is where its labels are in y, or None where y is the labels. `ignored` is the label that the loss leaves out.
    """

    name: str
    key: str | int | None
    kind: Kind
    shape: tuple[int | None, ...]
    ignored: int | None = None

    @property
    def classes(self) -> int:
        """The number of classes, under a loss over classes."""
        return self.shape[-1] or 0

    def labels(self, y: Batch) -> Any:
        """Its labels in y, or None where they are not at hand."""
        part = y if self.key is None else _at(y, self.key)
        return None if keras.tree.is_nested(part) else part


def check(model: keras.Model, batch: Batch) -> None:
    """Refuses, by shapes alone, a compiled model whose losses cannot be those of such a batch. Raises `DataError`."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    unlabelled = y is None and model._compile_loss is not None and not _has_own(model)
    instead = "(x, y), or a model that is compiled without a loss and has add_loss"
    refuse((unlabelled, "labels for the model's loss", "data of x alone", instead))
    for output in _known(model, batch):
        if (labels := output.labels(y)) is not None:
            _check_shape(output, tuple(labels.shape))


def outputs(model: keras.Model, batch: Batch) -> list[Output]:
    """The outputs of a compiled model that are under a loss over classes, as far as that can be told."""
    return [output for output in _known(model, batch) if output.kind != "elementwise"]


def _known(model: keras.Model, batch: Batch) -> list[Output]:
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    compiled = model._compile_loss
    is_known = compiled is not None and y is not None and not _has_own(model)
    if not is_known or not any(map(_kind, keras.tree.flatten(compiled._user_loss))):
        return []
    of_sequential = isinstance(model, keras.Sequential)
    names = [model.layers[-1].name] if of_sequential else getattr(model, "output_names", None)
    return list(_outputs(compiled._user_loss, y, predicted(model, x), names))


def classes(known: Sequence[Output], y: Batch) -> int | None:
    """The number of classes that labels may name where y is class numbers for a single output, else None."""
    if len(known) != 1 or known[0].key is not None or known[0].kind != "sparse" or known[0].ignored is not None:
        return None
    labels = known[0].labels(y)
    return known[0].classes if labels is not None and labels.shape.rank in (1, 2) else None


def check_values(outputs: Sequence[Output], y: Nested[np.ndarray], name: str) -> None:
    """Refuses labels at hand that name no output; `name` is the part of the data. Raises `DataError`."""
    for output in outputs:
        labels = output.labels(y) if output.kind == "sparse" else None
        if (values := np.asarray(labels)).dtype.kind not in "iuf":
            continue
        wrong = (values < 0) | (values >= output.classes)
        if output.ignored is not None:
            wrong &= values != output.ignored
        if not wrong.any():
            continue
        first, high = tuple(int(place) for place in np.argwhere(wrong)[0]), int(values.max())
        fits = f"a model of {high + 1} outputs, or " if high >= output.classes else ""
        low = "ignore_class=-1 in the loss if -1 stands for none, or " if values[first] == -1 else ""
        raise DataError(
            f"Expected labels from 0 to {output.classes - 1}, one for each output of {output.name}, received "
            f"{values[first]:g} for example {first[0]} of the {name} data, {int(wrong.sum()):,} of {wrong.size:,} "
            f"labels being others. Try {fits}{low}putting the labels right: numpy.unique(y, return_inverse=True)[1] "
            f"numbers them."
        )


def wrong_in_step(message: str) -> str | None:
    """Returns what TensorFlow's cross-entropy says of a wrong label, in our words; None where it says another thing."""
    match = re.search(r"label value of (\S+) which is outside the valid range of \[0, (\d+)\)", message)
    return match and (
        f"Expected labels from 0 to {int(match[2]) - 1}, one for each output, received {match[1]} in a batch. Try a "
        f"model of as many outputs as there are classes, or putting the labels right in dataset.map."
    )


def far_from_dense(labels: np.ndarray) -> str | None:
    """Returns a warning of class numbers with a gap that chance does not make; None where there is none."""
    values = np.asarray(labels)
    present = np.unique(values)
    # Of the labels before each that are never seen; 0 is the first that can be.
    gaps = np.diff(present, prepend=-1) - 1
    place = int(np.argmax(gaps)) if len(present) else 0
    if not len(present) or gaps[place] < max(GAP, len(present) / 2):
        return None
    top, after = int(present[-1]) + 1, values >= present[place]
    below, fewer = "labels ", "labels that begin with 0"
    if place:
        below = f"labels up to {present[place - 1]} ({_examples(int((~after).sum()))}), then "
        fewer = f"data.num_classes={present[place - 1] + 1}, which finds those as wrong labels"
    return (
        f"The labels were counted as {top:,} classes, {top - len(present):,} of which have no training example: {below}"
        f"from {present[place]} on ({_examples(int(after.sum()))}, the first is example {int(np.argmax(after))}). "
        f"Try {fewer}, or data.num_classes={top} data.on_error=skip if there are so many."
    )


def _examples(count: int) -> str:
    return f"{count:,} example{'' if count == 1 else 's'}"


def _check_shape(output: Output, shape: Sequence[int | None]) -> None:
    rank = len(output.shape)
    last, name, kind, classes = shape[-1] if len(shape) else None, output.name, output.kind, output.classes
    numbers = len(shape) == rank - 1 or (len(shape) == rank and last == 1)
    one_hot = len(shape) == rank and last == classes
    refuse(
        (kind == "elementwise" and not _are_compared(shape, output.shape),
         f"labels of the shape of {name}, whose loss compares them element by element",
         f"{_of_an_example(shape)} for outputs of {_of_an_example(output.shape)}",
         "an output of that shape, or for class numbers the loss sparse_categorical_crossentropy"),
        (kind == "sparse" and one_hot and not numbers,
         f"class numbers as the labels of {name}, whose loss is sparse categorical cross-entropy",
         f"labels of {classes} numbers each, as one-hot ones are",
         "the loss categorical_crossentropy, or y.argmax(-1)"),
        (kind == "one-hot" and numbers and classes > 1,
         f"one-hot labels of {name}, whose loss is categorical cross-entropy over {classes} outputs",
         "a number each, as class numbers are",
         f"the loss sparse_categorical_crossentropy, or keras.utils.to_categorical(y, {classes})"),
    )  # fmt: skip


def _are_compared(labels: Sequence[int | None], outputs: Sequence[int | None]) -> bool:
    """True if Keras compares these shapes example by example: it drops a last axis of 1, and broadcasts the rest."""
    shorter, longer = sorted((tuple(labels), tuple(outputs)), key=len)
    longer = longer[:-1] if len(longer) == len(shorter) + 1 and longer[-1] == 1 else longer
    pairs = zip(shorter[1:], longer[1:], strict=False)
    alike = all(one == other or 1 in (one, other) or None in (one, other) for one, other in pairs)
    return alike and len(shorter) == len(longer)


def _of_an_example(shape: Sequence[int | None]) -> str:
    return "x".join("?" if size is None else str(size) for size in shape[1:]) or "one number"


def _outputs(loss: Any, y: Batch, predicted: Any, names: Sequence[str] | None) -> Iterator[Output]:
    # (name, key of its labels, loss, symbol) of each output that has one of each.
    each = list[tuple[str, Any, Any, Any]]()
    if not keras.tree.is_nested(predicted):
        (name,) = names if names is not None and len(names) == 1 else ("the model",)
        # y may be nested where its only output is named.
        key = next(iter(y)) if isinstance(y, Mapping) else 0 if keras.tree.is_nested(y) else None
        flat = keras.tree.flatten(loss)
        each = [(name, key, flat[0], predicted)] if len(flat) == 1 else []
    else:
        keys = predicted if isinstance(predicted, Mapping) else range(len(predicted))
        for place, key in enumerate(keys):
            name = names[place] if names is not None and len(names) == len(keys) else str(key)
            its_loss = _at(loss, key, name, place) if keras.tree.is_nested(loss) else loss
            its_key = next((candidate for candidate in (key, name, place) if _at(y, candidate) is not None), None)
            if its_key is not None and not any(map(keras.tree.is_nested, (its_loss, predicted[key]))):
                each.append((name, its_key, its_loss, predicted[key]))
    for name, key, its_loss, symbol in each:
        along_last = getattr(its_loss, "_fn_kwargs", {}).get("axis", -1) == -1
        if (kind := _kind(its_loss)) and along_last and symbol.shape and symbol.shape[-1] is not None:
            yield Output(name, key, kind, tuple(symbol.shape), getattr(its_loss, "ignore_class", None))


def _kind(loss: Any) -> Kind | None:
    """Returns what a loss takes; None for one that is not known."""
    if isinstance(loss, str | type):
        with contextlib.suppress(ValueError, TypeError):
            loss = losses.get(loss)
    function = getattr(loss, "fn", loss)
    return next((kind for kind, functions in KINDS.items() if any(function is one for one in functions)), None)


def predicted(model: keras.Model, x: Batch) -> Nested[keras.KerasTensor]:
    """The outputs in shape and type."""
    if isinstance(model, keras.Sequential) and model.built:
        return model.outputs[0]
    if hasattr(model, "output_names"):
        return model.output
    symbols = keras.tree.map_structure(
        lambda leaf: keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype)), x
    )
    return compute_output_spec(model, symbols, training=False)


def _has_own(model: keras.Model) -> bool:
    names = ("compute_loss", "train_step", "test_step")
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names)


def _at(structure: Any, *keys: str | int) -> Any:
    for key in keys:
        if isinstance(structure, Mapping) and key in structure:
            return structure[key]
        if isinstance(structure, list | tuple) and isinstance(key, int) and key < len(structure):
            return structure[key]
    return None
