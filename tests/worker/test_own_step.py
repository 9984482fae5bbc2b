"""A model's own steps train on two replicas what they train on one device, where their losses can be taken apart."""

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import steps as own
import tensorflow as tf
import two_devices  # noqa: F401 # which are this process's
from conftest import sampled
from loops import checked, loop_over

from pipeline.worker.collective import Pausable
from pipeline.worker.data import batches
from pipeline.worker.tensorflow import build
from pipeline.worker.tensorflow.collective import over

EPOCHS = 3


def trained(strategy: tf.distribute.Strategy, make: Any, labelled: bool) -> Any:
    """(the model, what each epoch came to, losses of all steps); the last batch of 40 leaves a replica without any."""
    keras.utils.set_random_seed(0)
    train, held_out = own.points(labelled=labelled)
    loop = loop_over(make, train, strategy, 13, seed=0, held_out=held_out, collective=Pausable(over(strategy)))
    assert loop.own is not None
    if strategy.num_replicas_in_sync > 1:
        found = checked(loop, train)
        assert (found.outcome, found.unsaid, found.differences) == ("equal", "", [])
    epochs, losses = [], []
    for _ in range(EPOCHS):
        loop.reset_metrics()
        call = loop.call(loop.steps_per_epoch)
        losses += call.losses[:, 0].tolist()
        epochs.append(loop.metrics() | {f"val_{name}": value for name, value in loop.evaluate(2, print).items()})
    return loop.model, epochs, losses


WAYS = (
    "at_once", "persistent", "in_functions", "summed_loss", "averaged_by_hand", "clipped", "by_jacobian",
    "sharpness_aware", "several_times", "by_results", "penalized",
)  # fmt: skip
SEPARABLE = {
    "gan": (lambda: own.gan(noisy=False), False),
    "gan with batch normalization": (lambda: own.gan(noisy=False, normalised=True), False),
    "vae": (lambda: own.vae(noisy=False), False),
    "distiller": (own.distiller, True),
    "keras's own step": (own.by_keras, True),
} | {way: (partial(own.classifier, way), True) for way in WAYS}


def test_a_sum_over_examples_is_told_and_a_mean_or_what_is_drawn_is_not(mirrored):
    said: list[str] = []
    put_right = partial(own.classifier, "summed_loss")
    for make in (own.gan, own.vae, own.distiller, partial(own.classifier, "at_once"), put_right):
        build.model(
            make, mirrored, batches.spec(own.points(labelled=make not in (own.gan, own.vae))[0]), note=said.append
        )
    assert said == []
    build.model(partial(own.classifier, "summed_by_hand"), mirrored, batches.spec(own.points()[0]), note=said.append)
    assert len(said) == 1
    assert "received a sum in that of Classifier" in said[0]


def test_what_a_compile_of_its_own_was_given_is_kept_and_nothing_else_is_taken(mirrored):
    class Student(keras.Sequential):
        def compile(self, optimizer, student_loss):
            super().compile(optimizer=optimizer, loss=student_loss)

    def student():
        model = Student([keras.layers.Dense(3)])
        model.compile("adagrad", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    spec = batches.spec(own.points()[0])
    assert isinstance(build.model(student, mirrored, spec).optimizer, keras.optimizers.Adagrad)
    with pytest.raises(build.ModelError, match=r"Student, whose compile is its own.*received train\.optimizer\."):
        build.model(student, mirrored, spec, "sgd")
    with pytest.raises(build.ModelError, match="received one that is not compiled"):
        build.model(lambda: Student([keras.layers.Dense(3)]), mirrored, spec)


LONG = "several_times"


@pytest.mark.parametrize(
    "kind", [*sampled([kind for kind in SEPARABLE if kind != LONG], 3), pytest.param(LONG, marks=pytest.mark.slow)]
)
def test_two_replicas_train_what_one_device_trains_and_the_check_before_tells_and_changes_nothing(kind, mirrored):
    make, labelled = SEPARABLE[kind]
    one, one_epochs, one_losses = trained(tf.distribute.get_strategy(), make, labelled)
    two, two_epochs, two_losses = trained(mirrored, make, labelled)
    assert one_losses == pytest.approx(two_losses, rel=1e-5, abs=1e-5)
    for ours, reference in zip(two.variables, one.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), reference.numpy(), atol=1e-5, err_msg=ours.path)
    for ours, reference in zip(two_epochs, one_epochs, strict=True):
        assert ours == pytest.approx(reference, rel=1e-5, abs=1e-5)
