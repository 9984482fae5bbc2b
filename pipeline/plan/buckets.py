"""Says how many bytes of gradients leave together for other hosts, while backpropagation makes others."""

import math

# About so many bytes more take as long between hosts as another message does: 1 ms, most of it a processor's.
MESSAGE_BYTES = 1 << 18


def bucket_of(gradient_bytes: int, bucket_bytes: int | None) -> int:
    """Bytes of a bucket of so many bytes of gradients, from `Plan.bucket_bytes`.

    In buckets of s bytes, D bytes take D / s messages, each of which costs as much as M bytes, and the last s bytes are
    always waited for: D M / s + s is least at the square root of D M.

    >>> bucket_of(4_800_000, None), bucket_of(4_800_000, 0)
    (1121735, 4800000)
    """
    if bucket_bytes is None:
        return max(1, math.isqrt(gradient_bytes * MESSAGE_BYTES))
    return bucket_bytes or gradient_bytes
