"""Models whose steps are their own, written as Keras's guides write them, and data for them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


def points(examples=40, labelled=True):
    """(x, y), or x alone: float32 [examples, 6], and int32 [examples], each of 0 to 2; half as many to validate on."""
    x = np.random.default_rng(0).normal(size=(examples, 6)).astype("float32")
    y = (x.sum(1) > 0).astype("int32") + (x[:, 0] > 0.5)
    whole = (x, y) if labelled else (x,)
    return whole, tuple(array[: examples // 2] for array in whole)


def dense(*sizes):
    """Layers of such sizes, the first being the input's, with a hyperbolic tangent between them."""
    inner = [layers.Dense(size, activation="tanh") for size in sizes[1:-1]]
    return keras.Sequential([keras.Input(sizes[:1]), *inner, layers.Dense(sizes[-1])])


class GAN(keras.Model):
    """That of Keras's guide to custom training steps; `noisy=False` draws nothing."""

    def __init__(self, discriminator, generator, latent_dim, noisy=True):
        super().__init__()
        self.discriminator, self.generator, self.latent_dim, self.noisy = discriminator, generator, latent_dim, noisy
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.seed_generator = keras.random.SeedGenerator(1337)

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def latent(self, real):
        if not self.noisy:
            return real[:, : self.latent_dim]
        return keras.random.normal(shape=(ops.shape(real)[0], self.latent_dim), seed=self.seed_generator)

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = ops.shape(real_images)[0]
        generated_images = self.generator(self.latent(real_images))
        combined_images = ops.concatenate([generated_images, real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        if self.noisy:
            labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)

        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined_images)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))

        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(self.latent(real_images)))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))

        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


def gan(*inner, noisy=True):
    """A generator and a discriminator of points, which has the `inner` layers, or a hyperbolic tangent, within it."""
    inner = inner or (layers.Activation("tanh"),)
    discriminator = keras.Sequential([keras.Input((6,)), layers.Dense(8), *inner, layers.Dense(1)])
    model = GAN(discriminator, dense(4, 8, 6), 4, noisy)
    optimizers = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(*optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class Distiller(keras.Model):
    """That of Keras's example as it stood in Keras 3: `compute_loss` of its own, and a step that clips by hand."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False, training=True):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self.student(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.student.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.05)
        self.optimizer.apply(gradients, self.student.trainable_variables)
        return {**self.compute_metrics(x, y, y_pred), "gradient_norm": norm, "distilled": loss}

    def call(self, x):
        return self.student(x)


def distiller():
    model = Distiller(dense(6, 4, 3), dense(6, 16, 3))
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.losses.KLDivergence()
    model.compile(keras.optimizers.Adam(0.01), [keras.metrics.SparseCategoricalAccuracy()], *losses)
    return model


class Classifier(keras.Model):
    """Two layers under two optimizers, trained in one of several `ways` in which people write a step."""

    def __init__(self, way):
        super().__init__()
        self.way = getattr(self, way)
        self.table = layers.Embedding(8, 5)
        self.inner, self.outer = layers.Dense(5, activation="tanh"), layers.Dense(3)
        self.optimizers = {"inner": keras.optimizers.SGD(0.01), "outer": keras.optimizers.Adam(0.01)}
        self.mean_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        self.tracker = keras.metrics.Mean(name="tracked")
        self.count = keras.metrics.Sum(name="count")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, x):
        rows = ops.cast(ops.abs(x) * 3, "int32") % 8
        return self.outer(self.inner(x) + ops.sum(self.table(rows), axis=1))

    def loss_of(self, x, y):
        logits = self(x, training=True)
        self.accuracy.update_state(y, logits)
        return self.mean_loss(y, logits)

    def apply_both(self, gradients, variables):
        split = len(self.table.trainable_variables + self.inner.trainable_variables)
        self.optimizers["inner"].apply(gradients[:split], variables[:split])
        self.optimizers["outer"].apply_gradients(zip(gradients[split:], variables[split:], strict=True))

    @property
    def halves(self):
        return [layer.trainable_variables for layer in (self.table, self.inner, self.outer)]

    @property
    def everything(self):
        return [variable for half in self.halves for variable in half]

    def counted(self, loss):
        self.tracker.update_state(loss)
        self.count.update_state(1.0)
        return {"loss": loss, **{m.name: m.result() for m in (self.tracker, self.count, self.accuracy)}}

    def train_step(self, data):
        return self.counted(self.way(*data))

    def test_step(self, data):
        return self.counted(self.loss_of(*data))

    def descended(self, loss_of, weighed=lambda loss: loss, change=lambda gradients: gradients):
        with tf.GradientTape() as tape:
            loss = loss_of()
            larger = weighed(loss)
        variables = self.everything
        self.apply_both(change(tape.gradient(larger, variables)), variables)
        return loss

    def at_once(self, x, y):
        return self.descended(lambda: self.loss_of(x, y))

    def persistent(self, x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss_of(x, y)
            weighed = 2.0 * loss
        gradients = [gradient for half in self.halves for gradient in tape.gradient(weighed, half)]
        self.apply_both(gradients, self.everything)
        return loss

    @tf.function
    def in_functions(self, x, y):
        if tf.reduce_sum(y) > 12:
            x *= 2.0
        return self.at_once(x, y)

    def summed_loss(self, x, y):
        summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        return self.descended(lambda: summed(y, self(x)) / 10)

    def averaged_by_hand(self, x, y):
        return self.descended(lambda: ops.mean(self.per_example(y, self(x))))

    def summed_by_hand(self, x, y):
        return self.descended(lambda: ops.sum(self.per_example(y, self(x))))

    def clipped(self, x, y):
        return self.descended(
            lambda: self.loss_of(x, y),
            change=lambda gradients: [tf.clip_by_norm(tf.convert_to_tensor(one), 0.1) for one in gradients],
        )

    def by_jacobian(self, x, y):
        with tf.GradientTape() as tape:
            loss = ops.stack([self.loss_of(x, y)])
        variables = self.outer.trainable_variables
        self.optimizers["outer"].apply([jacobian[0] for jacobian in tape.jacobian(loss, variables)], variables)
        return loss[0]

    def sharpness_aware(self, x, y):
        variables = self.inner.trainable_variables + self.outer.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        gradients = tape.gradient(loss, variables)
        scale = 0.05 / (tf.linalg.global_norm(gradients) + 1e-12)
        moved = [(variable, gradient * scale) for variable, gradient in zip(variables, gradients, strict=True)]
        for variable, move in moved:
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            sharp = self.loss_of(x, y)
        second = tape.gradient(sharp, variables)
        for variable, move in moved:
            variable.assign_sub(move)
        self.optimizers["outer"].apply(second, variables)
        return loss

    def penalized(self, x, y):
        """Adds how steep outputs are in inputs, as WGANs do."""

        def loss():
            with tf.GradientTape() as tape:
                tape.watch(x)
                sums = ops.sum(self(x, training=True), axis=1)
            norms = ops.sqrt(1e-6 + ops.sum(ops.square(tape.gradient(sums, x)), axis=1))
            return self.loss_of(x, y) + 10.0 * ops.mean((norms - 1.0) ** 2)

        return self.descended(loss)

    def of_pairs(self, x, y):
        """Tells each example from all others, as contrastive losses do."""

        def loss():
            unit = ops.normalize(self(x, training=True), axis=1)
            similarities = ops.matmul(unit, ops.transpose(unit)) / 0.1
            return self.mean_loss(ops.arange(ops.shape(x)[0]), similarities)

        return self.descended(loss)

    def by_results(self, x, y):
        loss = self.descended(lambda: self.loss_of(x, y), weighed=lambda loss: loss * (2.0 - self.accuracy.result()))
        # One update and its result in a call, and a number of two results.
        return self.tracker(loss) / (1.0 + self.count.result())

    def under_a_condition(self, x, y):
        loss = self.loss_of(x, y)
        return tf.cond(loss > 0, lambda: self.at_once(x, y), lambda: loss)

    def without_optimizer(self, x, y):
        return self.loss_of(x, y)

    def raising(self, x, y):
        return {"here": x}["nowhere"]

    def several_times(self, x, y):
        for _ in range(2):
            loss = self.at_once(x, y)
        return loss


def classifier(way="at_once", kind=Classifier):
    model = kind(way)
    model.compile()
    return model


class Centred(Classifier):
    """Keeps a mean of its outputs beside its step, as DINO does."""

    def __init__(self, way):
        super().__init__(way)
        self.centre = self.add_weight(shape=(3,), initializer="zeros", trainable=False, name="centre")

    def centred(self, x, y):
        loss = self.at_once(x, y)
        self.centre.assign(0.9 * self.centre + 0.1 * ops.mean(self(x), axis=0))
        return loss


class ByKeras(keras.Model):
    def train_step(self, data):
        x, y = data
        within = {"largest": ops.mean(ops.abs(x), axis=0), "others": {"smallest": ops.mean(ops.square(x))}}
        return {**super().train_step((x * 0.5, y)), "within": within}

    def test_step(self, data):
        return super().test_step(data)


def by_keras(**compiled):
    inputs = keras.Input((6,))
    model = ByKeras(inputs, layers.Dense(3, activation="softmax", kernel_regularizer="l2")(inputs))
    model.compile("adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"], **compiled)
    return model
