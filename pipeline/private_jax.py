"""Everything taken from JAX beyond its public API, and what it is for."""

# Where processes listen for each other's sums on CPUs, which has no public setting and would be any interface; and what
# keeps compiled programs, of which it keeps the first process's alone.
from jax._src import compilation_cache, compiler, distributed, xla_bridge
from jax._src.lru_cache import LRUCache
from jaxlib import _jax
