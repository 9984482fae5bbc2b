"""Prints how many pages the system hands out for a call of a compiled step."""

import resource

import jax
import jax.numpy as jnp

CALLS = 5


def main():
    jax.config.update("jax_platforms", "cpu")
    step, given = jax.jit(lambda value: jnp.max(jnp.sin(value @ value.T))), jnp.ones((4096, 64))
    for _ in range(CALLS):
        step(given).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        step(given).block_until_ready()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // CALLS)


if __name__ == "__main__":
    main()
