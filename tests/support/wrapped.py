"""What people bring along from Horovod: an optimizer in its wrapper, and one of its callbacks."""

import keras


def model(input_shape, num_classes, standing_in=True):
    """A classifier compiled with Horovod's wrapper of Adam, or with a class that is made in the same way."""
    made = keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)])
    if standing_in:
        optimizer = type("Adam", (keras.optimizers.Adam,), {"__module__": "horovod._keras"})(0.01)
    else:
        import horovod.tensorflow.keras as hvd

        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    made.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])
    return made


def broadcasts():
    """A callback as Horovod's, which is called on every rank there."""
    kind = type("BroadcastGlobalVariablesCallback", (keras.callbacks.Callback,), {"__module__": "horovod.callbacks"})
    return kind()
