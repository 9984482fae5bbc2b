"""Draws cases, the simplest first, so that Hypothesis finds the smallest of those that differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from differing.case import Case, Input, Layer, Output
from hypothesis import strategies as st

Shape: TypeAlias = tuple[int, ...]
# What draws a layer of a value of a shape: its words and the shape that it gives, without the batch.
Drawn: TypeAlias = tuple[str, Shape]

# More layers are seldom drawn, and take long to trace.
MOST_LAYERS = 7
MOST_NUMBERS = 150
# Of a single number these leave its sign alone, so that all before them learns from last digits.
OF_ONE = ("LayerNormalization", "RMSNormalization", "UnitNormalization")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cases that Keras trains on one device."""
    inputs = [draw(_inputs()) for _ in range(1 + _seldom(draw, 6))]
    shapes = [one.shape for one in inputs]
    layers = []
    for number, one in enumerate(inputs):
        if one.kind == "words":
            masked = ", mask_zero=True" if draw(st.booleans()) else ""
            width = draw(st.integers(1, 4))
            layers.append(Layer(f"keras.layers.Embedding(7, {width}{masked})", (number,)))
            shapes.append((*one.shape, width))
        elif one.kind == "padded":
            layers.append(Layer("keras.layers.Masking()", (number,)))
            shapes.append(one.shape)
    # Words are for embeddings alone.
    usable = [place for place, shape in enumerate(shapes) if place >= len(inputs) or inputs[place].kind == "numbers"]
    while len(layers) < MOST_LAYERS and draw(st.integers(0, 5)):
        layer, shape = _layer(draw, usable, shapes)
        layers.append(layer)
        usable.append(len(shapes))
        shapes.append(shape)
    unused = [place for place in usable if not any(place in layer.of for layer in layers)]
    outputs = [_output(draw, shapes, place) for place in _ends(draw, unused, len(inputs))]
    steps, rest = draw(st.integers(1, 4)), draw(st.integers(0, 7))
    batch = 2 * draw(st.integers(1, 6))
    optimizer, fixed_rate = _optimizer(draw)
    validation = draw(st.integers(0, 13))
    return Case(
        tuple(inputs), tuple(layers), tuple(outputs), optimizer, _callbacks(draw, bool(validation), fixed_rate), batch,
        steps * batch + rest % batch, validation, 1 + _seldom(draw, 3) + _seldom(draw, 3), draw(st.integers(1, 4)),
        draw(st.sampled_from([None, None, "drawn", "many zero"])), draw(st.sampled_from(["arrays", "dataset"])),
        draw(st.integers(0, 99)),
    )  # fmt: skip


def _ends(draw: st.DrawFn, unused: Sequence[int], inputs: int) -> list[int]:
    """Values that outputs are made of: all that no layer takes, so that every input counts, and perhaps one twice."""
    return [*unused, unused[-1]] if _seldom(draw, 6) else list(unused)


def _seldom(draw: st.DrawFn, of: int) -> int:
    return int(draw(st.integers(0, of - 1)) == of - 1)


def _inputs() -> st.SearchStrategy[Input]:
    few = st.integers(1, 4)
    return st.one_of(
        st.builds(lambda size: Input("numbers", (size,)), few),
        st.builds(lambda steps, size: Input("numbers", (steps + 1, size)), few, few),
        st.builds(lambda height, width, channels: Input("numbers", (height + 2, width + 2, channels)), few, few, few),
        st.builds(lambda steps: Input("words", (steps + 1,)), few),
        st.builds(lambda steps, size: Input("padded", (steps + 1, size)), few, few),
    )


def _layer(draw: st.DrawFn, usable: Sequence[int], shapes: Sequence[Shape]) -> tuple[Layer, Shape]:
    of = usable[-1 - draw(st.integers(0, len(usable) - 1))]
    shape = shapes[of]
    equal = [place for place in usable if shapes[place] == shape]
    if len(equal) > 1 and _seldom(draw, 4):
        words = draw(st.sampled_from(["Add", "Multiply", "Concatenate"]))
        pair = tuple(equal[-2:])
        made = (*shape[:-1], 2 * shape[-1]) if words == "Concatenate" else shape
        return Layer(f"keras.layers.{words}()", pair), made
    of_rank = {1: _of_vectors, 2: _of_series, 3: _of_images}[len(shape)]
    options: list[Callable[[st.DrawFn, Shape], Drawn | None]] = [_dense, _normalization, _same, of_rank]
    drawn = options[draw(st.integers(0, len(options) - 1))](draw, shape)
    if drawn is None or _size(drawn[1]) > MOST_NUMBERS:
        drawn = _dense(draw, shape)
    words, made = drawn
    values = (of, of) if words.startswith("MultiHeadAttention") else (of,)
    return Layer(words if words.startswith("Adds") else f"keras.layers.{words}", values), made


def _size(shape: Shape) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _activation(draw: st.DrawFn) -> str:
    chosen = draw(st.sampled_from([None, "tanh", "relu", "softplus", "gelu", "swish"]))
    return f', activation="{chosen}"' if chosen else ""


def _regularized(draw: st.DrawFn) -> str:
    return draw(st.sampled_from(["", "", ', kernel_regularizer="l2"', ', activity_regularizer="l2"']))


def _dense(draw: st.DrawFn, shape: Shape) -> Drawn:
    units = draw(st.integers(1, 5))
    return f"Dense({units}{_activation(draw)}{_regularized(draw)})", (*shape[:-1], units)


def _normalization(draw: st.DrawFn, shape: Shape) -> Drawn:
    momentum = draw(st.sampled_from(["momentum=0.6", "", "scale=False", "center=False"]))
    words = draw(st.sampled_from([
        f"BatchNormalization({momentum})", "LayerNormalization()", "RMSNormalization()", "GroupNormalization(groups=1)",
        "UnitNormalization()", "GroupNormalization(groups=-1)",
    ]))  # fmt: skip
    if shape[-1] == 1 and words.startswith(OF_ONE):
        words = f"BatchNormalization({momentum})"
    return words, shape


def _same(draw: st.DrawFn, shape: Shape) -> Drawn:
    return draw(st.sampled_from([
        'Activation("tanh")', "AddsMean()", "AddsSum()", "Dropout(0.0)", 'ActivityRegularization(l2=0.1)', "PReLU()",
        "LeakyReLU()", "Rescaling(0.5, 0.1)", "Softmax()",
    ])), shape  # fmt: skip


def _of_vectors(draw: st.DrawFn, shape: Shape) -> Drawn:
    (size,) = shape
    units = draw(st.integers(1, 4))
    return draw(st.sampled_from([
        (f"RepeatVector({units + 1})", (units + 1, size)),
        (f"Reshape(({size}, 1))", (size, 1)),
        (f"SpectralNormalization(keras.layers.Dense({units}))", (units,)),
        (f'EinsumDense("ab,bc->ac", output_shape={units}, bias_axes="c")', (units,)),
    ]))  # fmt: skip


def _of_series(draw: st.DrawFn, shape: Shape) -> Drawn:
    steps, size = shape
    units, kernel = draw(st.integers(1, 4)), draw(st.integers(1, min(3, steps)))
    sequences = draw(st.booleans())
    ends = (steps,) if sequences else ()
    cell = f"{units}, return_sequences={sequences}"
    padding = draw(st.sampled_from(["same", "valid", "causal"]))
    left = steps - kernel + 1 if padding == "valid" else steps
    return draw(st.sampled_from([
        ("Flatten()", (steps * size,)),
        ("GlobalAveragePooling1D()", (size,)),
        ("GlobalMaxPooling1D()", (size,)),
        (f"LSTM({cell})", (*ends, units)),
        (f"GRU({cell})", (*ends, units)),
        (f"SimpleRNN({cell})", (*ends, units)),
        (f"Bidirectional(keras.layers.LSTM({cell}))", (*ends, 2 * units)),
        (f'Conv1D({units}, {kernel}, padding="{padding}")', (left, units)),
        (f'SeparableConv1D({units}, {kernel}, padding="same")', (steps, units)),
        ('MaxPooling1D(2, padding="same")', (-(-steps // 2), size)),
        ('AveragePooling1D(2, padding="same")', (-(-steps // 2), size)),
        (f"TimeDistributed(keras.layers.Dense({units}))", (steps, units)),
        ("MultiHeadAttention(2, 2)", shape),
        ("UpSampling1D(2)", (2 * steps, size)),
        ("Permute((2, 1))", (size, steps)),
    ]))  # fmt: skip


def _of_images(draw: st.DrawFn, shape: Shape) -> Drawn:
    height, width, channels = shape
    filters, kernel = draw(st.integers(1, 4)), draw(st.integers(1, min(3, height, width)))
    stride, padding = draw(st.integers(1, 2)), draw(st.sampled_from(["same", "valid"]))

    def after(length: int) -> int:
        return -(-length // stride) if padding == "same" else (length - kernel) // stride + 1

    cut, rest = (after(height), after(width)), f'strides={stride}, padding="{padding}"'
    return draw(st.sampled_from([
        ("Flatten()", (height * width * channels,)),
        ("GlobalAveragePooling2D()", (channels,)),
        ("GlobalMaxPooling2D()", (channels,)),
        (f"Conv2D({filters}, {kernel}, {rest}{_activation(draw)})", (*cut, filters)),
        (f"SeparableConv2D({filters}, {kernel}, {rest})", (*cut, filters)),
        (f"DepthwiseConv2D({kernel}, {rest})", (*cut, channels)),
        (f'Conv2DTranspose({filters}, {kernel}, padding="same")', (height, width, filters)),
        ('MaxPooling2D(2, padding="same")', (-(-height // 2), -(-width // 2), channels)),
        ('AveragePooling2D(2, padding="same")', (-(-height // 2), -(-width // 2), channels)),
        (f"Reshape(({height * width}, {channels}))", (height * width, channels)),
        ("UpSampling2D(2)", (2 * height, 2 * width, channels)),
    ]))  # fmt: skip


@dataclass(frozen=True)
class _Goal:
    labels: str
    activation: str
    losses: tuple[str, ...]
    metrics: tuple[str, ...]
    in_series: bool = False


_LOSSES, _METRICS = "keras.losses.", "keras.metrics."
_GOALS = (
    _Goal(
        "numbers", "",
        (
            "MeanSquaredError", "MeanAbsoluteError", "Huber", "LogCosh", "CosineSimilarity", "mean_loss",
            "loss_of_each", "sum_loss",
        ),
        ("MeanAbsoluteError()", "RootMeanSquaredError()", "CosineSimilarity()", "R2Score()", "far", "furthest()"),
        in_series=True,
    ),
    _Goal(
        "classes", "", ("SparseCategoricalCrossentropy(from_logits=True",),
        ("SparseCategoricalAccuracy()", "SparseTopKCategoricalAccuracy(2)"), in_series=True,
    ),
    _Goal(
        "one-hot", "softmax",
        ("CategoricalCrossentropy", "CategoricalCrossentropy(label_smoothing=0.1", "CategoricalFocalCrossentropy",
         "KLDivergence", "CategoricalHinge", "Poisson"),
        ("CategoricalAccuracy()", 'F1Score(average="macro")', "AUC(multi_label=True)", "KLDivergence()"),
    ),
    _Goal(
        "binary", "sigmoid",
        ("BinaryCrossentropy", "BinaryCrossentropy(label_smoothing=0.1", "BinaryFocalCrossentropy", "Hinge",
         "SquaredHinge"),
        ("BinaryAccuracy()", "AUC()", "Precision()", "Recall()", "FalsePositives()", "SensitivityAtSpecificity(0.5)"),
    ),
)  # fmt: skip


def _output(draw: st.DrawFn, shapes: Sequence[Shape], of: int) -> Output:
    shape, goal = shapes[of], draw(st.sampled_from(_GOALS))
    layers, ends = [], ()
    if len(shape) > 1:
        if len(shape) == 2 and goal.in_series and draw(st.booleans()):
            ends = shape[:1]
        else:
            pooling = f"GlobalAveragePooling{len(shape) - 1}D"
            layers.append(f"keras.layers.{draw(st.sampled_from(['Flatten', pooling]))}()")
    classes = draw(st.integers(2, 4)) if goal.labels in ("classes", "one-hot") else draw(st.integers(1, 2))
    activation = f', activation="{goal.activation}"' if goal.activation else ""
    layers.append(f"keras.layers.Dense({classes}{activation})")
    of_each = {"classes": (), "one-hot": (classes,), "binary": (classes,), "numbers": (classes,)}[goal.labels]
    metrics = goal.metrics[:2] if ends else goal.metrics
    some = st.lists(st.sampled_from(metrics), max_size=2, unique=True)
    weighted = st.lists(st.sampled_from([metric for metric in metrics if metric != "furthest()"]), max_size=1)
    return Output(
        tuple(layers), of, goal.labels, (*ends, *of_each), classes, _loss(draw, goal),
        draw(st.sampled_from([1.0, 1.0, 0.3])), *(tuple(map(_metric, draw(one))) for one in (some, weighted)),
    )  # fmt: skip


def _loss(draw: st.DrawFn, goal: _Goal) -> str:
    words = draw(st.sampled_from(goal.losses))
    if words[0].islower():
        return words
    reduction = draw(st.sampled_from(["", "", "sum", "mean_with_sample_weight"]))
    opened = words if "(" in words else f"{words}("
    comma = "" if opened.endswith("(") or not reduction else ", "
    return f'{_LOSSES}{opened}{comma}reduction="{reduction}")' if reduction else f"{_LOSSES}{opened})"


def _metric(words: str) -> str:
    return words if words[0].islower() else f"{_METRICS}{words}"


def _optimizer(draw: st.DrawFn) -> tuple[str, bool]:
    """The optimizer's words, and whether its rate is a number."""
    schedule = draw(st.sampled_from([
        None, None, "ExponentialDecay({rate}, 2, 0.5)", "CosineDecay({rate}, 5)",
        "PiecewiseConstantDecay([2], [{rate}, 0.001])", "PolynomialDecay({rate}, 3, power=2.0)",
        "InverseTimeDecay({rate}, 2, 0.5)",
    ]))  # fmt: skip
    # Adaptive ones divide by the root of what they have seen: gradients of rounding alone are as large as others there.
    name, rate, rest = draw(st.sampled_from([
        ("SGD", 0.1, ""), ("SGD", 0.1, ", momentum=0.9"), ("SGD", 0.1, ", momentum=0.9, nesterov=True"),
        ("Adam", 0.02, ", epsilon=0.001"), ("AdamW", 0.02, ", epsilon=0.001"), ("RMSprop", 0.02, ", epsilon=0.001"),
        ("Adagrad", 0.1, ""), ("Adadelta", 1.0, ""), ("Adamax", 0.02, ", epsilon=0.001"),
        ("Nadam", 0.02, ", epsilon=0.001"), ("Ftrl", 0.1, ""), ("Lamb", 0.02, ""), ("Adafactor", 0.02, ""),
    ]))  # fmt: skip
    clipped = draw(st.sampled_from(["", "", ", clipnorm=0.1", ", global_clipnorm=0.1", ", clipvalue=0.05"]))
    decayed = draw(st.sampled_from(["", "", ", weight_decay=0.01"]))
    averaged = draw(st.sampled_from([
        "", "", ", use_ema=True, ema_momentum=0.5", ", use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2",
    ]))  # fmt: skip
    chosen = str(rate) if schedule is None else f"keras.optimizers.schedules.{schedule}".format(rate=rate)
    return f"keras.optimizers.{name}({chosen}{rest}{clipped}{decayed}{averaged})", schedule is None


def _callbacks(draw: st.DrawFn, validated: bool, fixed_rate: bool) -> tuple[str, ...]:
    monitor = draw(st.sampled_from(["loss", "val_loss"])) if validated else "loss"
    restored = draw(st.booleans())
    options = [f'EarlyStopping("{monitor}", patience=0, restore_best_weights={restored})', "TerminateOnNaN()"]
    if fixed_rate:
        options += [f'ReduceLROnPlateau("{monitor}", patience=0, factor=0.3)', "LearningRateScheduler(halved)"]
    chosen = draw(st.lists(st.sampled_from(options), max_size=1))
    return tuple(f"keras.callbacks.{words}" for words in chosen)
