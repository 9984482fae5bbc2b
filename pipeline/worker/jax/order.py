"""The order of an epoch's examples, which is the one that TensorFlow's engine trains them in, without TensorFlow."""

import numpy as np

# Philox of four 32-bit words and ten rounds (Salmon et al., 2011).
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# The key that scrambles a stateless seed (tensorflow/core/kernels/stateless_random_ops.cc).
_SCRAMBLING = (0x3EC8F720, 0x02461E29)
_WORD = np.uint64(0xFFFFFFFF)


def order(examples: int, seed: int, epoch: int) -> np.ndarray:
    """The places of an epoch's examples in their order, int64 [examples]; drawn from `seed` and `epoch` alone.

    That of `tf.random.experimental.stateless_shuffle`: a Fisher-Yates shuffle whose draws are Philox's words.

    >>> order(5, seed=0, epoch=1).tolist()
    [4, 3, 1, 0, 2]
    """
    counter = np.array([_words(seed), _words(epoch)], np.uint64).reshape(1, 4)
    mixed = _philox(counter, _SCRAMBLING)[0]
    key, offset = (int(mixed[0]), int(mixed[1])), int(mixed[2]) | int(mixed[3]) << 32
    draws = max(0, examples - 1)
    blocks = np.arange(-(-draws // 4), dtype=np.uint64)
    counters = np.zeros((len(blocks), 4), np.uint64)
    counters[:, 0], counters[:, 1] = blocks & _WORD, blocks >> np.uint64(32)
    counters[:, 2], counters[:, 3] = offset & 0xFFFFFFFF, offset >> 32
    words = _philox(counters, key).ravel()[:draws]
    jumps = (words % np.arange(examples, examples - draws, -1, dtype=np.uint64)).tolist()
    places = list(range(examples))
    for place, jump in enumerate(jumps):
        other = place + jump
        places[place], places[other] = places[other], places[place]
    return np.array(places, np.int64)


def _words(number: int) -> tuple[int, int]:
    return number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF


def _philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Random words, uint64 [count, 4] below 2**32, of counters of the same shape and type."""
    first, second, third, fourth = counters.T
    low, high = key
    for _ in range(_ROUNDS):
        one, two = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = (
            (two >> np.uint64(32)) ^ second ^ np.uint64(low),
            two & _WORD,
            (one >> np.uint64(32)) ^ fourth ^ np.uint64(high),
            one & _WORD,
        )
        low, high = (low + _WEYL[0]) & 0xFFFFFFFF, (high + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([first, second, third, fourth], axis=1)
