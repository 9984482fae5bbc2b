"""Models whose losses and metrics are of a batch as a whole."""

import keras
import numpy as np
from keras import ops

# Named by the module, which registers what its models are saved with.
NAMED = (
    *(f"{part}.build._target_={__name__}.{name}" for part, name in (("model", "embedder"), ("data", "grouped"))),
    "train.global_batch=16",
)
GATHERED = (*NAMED, "train.epochs=2", "train.gather=true")


def grouped(examples=93):
    """(x, y) twice: float32 [examples, 6], and int32 [examples] of three classes."""
    random = np.random.default_rng(4)
    y = random.integers(0, 3, examples).astype("int32")
    x = (random.normal(size=(examples, 6)) + y[:, None]).astype("float32")
    return (x, y), (x[:61], y[:61])


@keras.saving.register_keras_serializable("tests of wholes")
class Largest(keras.metrics.Metric):
    def __init__(self, start=-np.inf, aggregation="sum", name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.start = start
        self.top = self.add_variable((), keras.initializers.Constant(start), aggregation=aggregation, name="top")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.top.assign(ops.maximum(self.top, ops.max(ops.abs(y_pred))))

    def result(self):
        return self.top.value

    def reset_state(self):
        self.top.assign(self.start)


@keras.saving.register_keras_serializable("tests of wholes")
class Fading(keras.metrics.Metric):
    """A moving average over batches of the mean output."""

    def __init__(self, name="fading", **kwargs):
        super().__init__(name=name, **kwargs)
        self.average = self.add_variable((), "zeros", name="average")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.average.assign(0.9 * self.average + 0.1 * ops.mean(ops.abs(y_pred)))

    def result(self):
        return self.average.value


@keras.saving.register_keras_serializable("tests of wholes")
class Bounds(keras.metrics.Metric):
    def __init__(self, name="bounds", **kwargs):
        super().__init__(name=name, **kwargs)
        self.least, self.most = (self.add_variable((), "zeros", name=end) for end in ("least", "most"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.least.assign(ops.minimum(self.least, ops.min(y_pred)))
        self.most.assign(ops.maximum(self.most, ops.max(y_pred)))

    def result(self):
        return {"least": self.least.value, "most": self.most.value}


@keras.saving.register_keras_serializable("tests of wholes")
def deviation(y_true, y_pred):
    return ops.std(y_pred)


@keras.saving.register_keras_serializable("tests of wholes")
def contrastive(y_true, y_pred):
    """How much nearer examples of one class are than all examples (Khosla et al., 2020)."""
    unit = y_pred / ops.sqrt(ops.sum(y_pred * y_pred, -1, keepdims=True) + 1e-6)
    alike = ops.cast(ops.equal(y_true[:, None], y_true[None, :]), "float32")
    near = ops.log_softmax(ops.matmul(unit, ops.transpose(unit)) / 0.5, -1)
    return -ops.sum(alike * near) / ops.sum(alike)


def embedder(loss="contrastive", metrics=True):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)])
    chosen = contrastive if loss == "contrastive" else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    counted = [Largest(), Largest(aggregation="mean", name="mean_of_largest"), Fading(), Bounds(), deviation]
    model.compile(keras.optimizers.SGD(0.05), chosen, metrics=counted if metrics else [])
    return model
