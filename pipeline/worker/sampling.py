"""Has a trained language model write: text that goes on from held-out text, at the end of a run, to be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pipeline.plan.plan import Plan
from pipeline.record.events import SAMPLE, Beat
from pipeline.record.log import write_whole
from pipeline.worker.engine import Tell

# Where nobody said how many.
TOKENS = 100
# Tokens int32 [1, length] to the logits of what comes after each of them, [1, length, vocabulary].
Logits = Callable[[np.ndarray], np.ndarray]
# The name of a byte that is not written as itself.
_BYTE = re.compile(r"\\x([0-9a-f]{2})")


@dataclass(frozen=True)
class Writing:
    """What is to be written: so many tokens after a `prompt`, int [length], of which each stands for one of `names`.

    They are drawn at a temperature: at 0 always the most probable one.
    """

    tokens: int
    temperature: float
    seed: int
    prompt: np.ndarray
    names: tuple[str, ...]

    def write(self, logits: Logits, folder: Path, tell: Tell) -> None:
        """Writes the prompt and what the model makes of it into `folder`, telling meanwhile that it gets on."""
        written = []
        for token in continued(self.prompt, logits, self.temperature, np.random.default_rng(self.seed)):
            tell(Beat())
            written.append(token)
            if len(written) == self.tokens:
                break
        drawn = f"{self.tokens:,} tokens, temperature {self.temperature:g}, seed {self.seed}"
        before, after = text_of(self.prompt, self.names), text_of(written, self.names)
        write_whole(folder / SAMPLE, f"{before}\n\n--- what the model made of it: {drawn} ---\n\n{after}\n")


def writing_of(
    plan: Plan,
    model: keras.Model,
    names: tuple[str, ...] | None,
    example: Callable[[], Any],
    note: Callable[[str], None],
) -> Writing | None:
    """What a model is to write, where it is a language model; notes where it is none and was asked to all the same.

    `names` are those of the data's labels, and `example` gives a batch (x, y) of one example, where these are known.
    """
    asked = plan.training.sample_tokens
    if asked == 0:
        return None
    prompt = _prompt(*example()[:2]) if names is not None and _tells_next(model, len(names)) else None
    if prompt is None or names is None:
        if asked:
            note(
                f"No text was sampled. Expected tokens, names for them, and a model of the logits of each next one, as "
                f"data=text and model=transformer are, for train.sample_tokens={asked}, received "
                f"data={plan.data.name} and model={plan.model.name}. Try train.sample_tokens=null."
            )
        return None
    return Writing(asked or TOKENS, plan.training.sample_temperature, plan.training.seed, prompt, names)


def continued(prompt: np.ndarray, logits: Logits, temperature: float, chance: np.random.Generator) -> Iterator[int]:
    """Tokens that follow on a prompt, int32 [length], one after the other, each drawn by what the last `length` say.

    >>> next_one = lambda tokens: np.eye(4)[(tokens + 1) % 4] * 9
    >>> from itertools import islice
    >>> list(islice(continued(np.array([0, 1]), next_one, 0, np.random.default_rng(0)), 5))
    [2, 3, 0, 1, 2]
    """
    window = np.asarray(prompt, np.int32)
    while True:
        scores = np.asarray(logits(window[None]))[0, -1].astype(np.float64)
        if temperature:
            # The largest of logits with Gumbel noise is drawn by their softmax (Gumbel, 1954).
            scores = scores / temperature + chance.gumbel(size=len(scores))
        token = int(scores.argmax())
        window = np.append(window[1:], np.int32(token))
        yield token


def text_of(tokens: Sequence[int] | np.ndarray, names: Sequence[str]) -> str:
    r"""What tokens stand for, be it characters or bytes of UTF-8.

    >>> text_of([0, 1, 2], ["a", "\\xc3", "\\xa9"])
    'aé'
    """
    found = (names[int(token)] for token in tokens)
    parts = (bytes.fromhex(byte[1]) if (byte := _BYTE.fullmatch(name)) else name.encode() for name in found)
    return b"".join(parts).decode(errors="replace")


def _tells_next(model: keras.Model, vocabulary: int) -> bool:
    """Are there as many outputs for each token as there are tokens that may come next?"""
    shape = getattr(model, "output_shape", None)
    return isinstance(shape, tuple) and len(shape) == 3 and shape[2] == vocabulary


def _prompt(x: Any, y: Any) -> np.ndarray | None:
    """The tokens of an example, int [length]; None where it, or what is learnt of it, is something else."""
    if any(isinstance(structure, dict | list | tuple) for structure in (x, y)):
        return None
    tokens, labels = np.asarray(x), np.asarray(y)
    alike = tokens.ndim == 2 and tokens.shape == labels.shape and {tokens.dtype.kind, labels.dtype.kind} <= set("iu")
    return tokens[0] if alike else None
