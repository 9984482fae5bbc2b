"""Makes many steps of JAX's engine, one in each call, on two CPU devices of one process, and prints the last loss."""

import os

# Threads of XLA's pool: as many as devices, as under a plan of one thread a device.
os.environ["NPROC"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Cut

from pipeline.worker.jax.compiled import CompiledSteps
from pipeline.worker.jax.reader import ReadBlock

STEPS, WIDTH, BATCH = 1500, 784, 128


def main():
    """Descends on a mean of squares, whose gradient both devices add up."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    weights = jax.device_put(np.eye(WIDTH, BATCH, dtype=np.float32), NamedSharding(mesh, Cut()))
    batch = jax.device_put(np.full((BATCH, WIDTH), 0.1, np.float32), NamedSharding(mesh, Cut("batch")))

    def step(state, batch):
        loss, gradient = jax.value_and_grad(lambda weights: jnp.mean(jnp.tanh(batch @ weights) ** 2))(state[0])
        return (state[0] - 0.1 * gradient,), loss

    steps = CompiledSteps(step, mesh, (weights,), batch, in_epoch=STEPS, alike=True)
    state, losses = (weights,), []
    for _ in range(STEPS):
        state, of_call = steps(state, ReadBlock(batch, 1, BATCH, stacked=False), 0, 1)
        losses += of_call
    print(jax.device_get(losses)[-1])


if __name__ == "__main__":
    main()
