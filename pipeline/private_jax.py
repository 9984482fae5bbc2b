"""Everything taken from JAX beyond its public API, and what it is for."""

# Where processes listen for each other's sums on CPUs, which has no public setting and would be any interface.
from jax._src import distributed, xla_bridge
from jaxlib import _jax

__all__ = ["ATTRIBUTES", "_jax", "distributed", "xla_bridge"]

# What is used of these.
ATTRIBUTES = {
    "_jax": ("make_gloo_tcp_collectives",),
    "distributed": ("global_state",),
    "xla_bridge": ("make_cpu_client", "register_backend_factory"),
}
