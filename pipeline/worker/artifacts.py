"""Artifacts of a training's end: the model as a file, and text that a language model writes after held-out text."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pipeline.plan.plan import Plan
from pipeline.record.events import MODEL, SAMPLE, WEIGHTS, Beat, Warned
from pipeline.record.log import write_whole
from pipeline.worker.engine import Emit, Note
from pipeline.worker.model_error import TrainingError

# Where nobody said how many.
TOKENS = 100
# Tokens int32 [1, length] to the logits of what comes after each of them, [1, length, vocabulary].
Logits = Callable[[np.ndarray], np.ndarray]
# The name of a byte that is not written as itself.
_BYTE = re.compile(r"\\x([0-9a-f]{2})")


@dataclass(frozen=True)
class TextSample:
    """Text to sample: `tokens` after a `prompt`, int [length], each one of `names`, drawn at a temperature."""

    tokens: int
    temperature: float
    seed: int
    prompt: np.ndarray
    names: tuple[str, ...]

    def write(self, logits: Logits, folder: Path, emit: Emit) -> None:
        """Writes the prompt and what the model makes of it into `folder`, telling meanwhile that it gets on."""
        written, drawing = [], continued(self.prompt, logits, self.temperature, np.random.default_rng(self.seed))
        for token in itertools.islice(drawing, self.tokens):
            emit(Beat())
            written.append(token)
        drawn = f"{self.tokens:,} tokens, temperature {self.temperature:g}, seed {self.seed}"
        before, after = text_of(self.prompt, self.names), text_of(written, self.names)
        write_whole(folder / SAMPLE, f"{before}\n\n--- what the model made of it: {drawn} ---\n\n{after}\n")


def sample_of(
    plan: Plan, model: keras.Model, names: tuple[str, ...] | None, example: Callable[[], Any], note: Note
) -> TextSample | None:
    """Returns the text that a language model is to write, by `names` of labels; notes where it cannot as asked."""
    training, shape = plan.training, getattr(model, "output_shape", None)
    tokens = training.sample_tokens
    # As many outputs for each token as there are tokens that may come next.
    of_tokens = names is not None and isinstance(shape, tuple) and len(shape) == 3 and shape[2] == len(names)
    x, y, *_ = example() if of_tokens and tokens != 0 else ({}, {})
    if names is not None and not any(isinstance(structure, dict | list | tuple) for structure in (x, y)):
        x, y = np.asarray(x), np.asarray(y)
        if x.ndim == 2 and x.shape == y.shape and {x.dtype.kind, y.dtype.kind} <= set("iu"):
            return TextSample(tokens or TOKENS, training.sample_temperature, training.seed, x[0], names)
    if tokens:
        note(
            f"No text was sampled. Expected tokens, names for them, and a model of the logits of each next one, as "
            f"data=text and model=transformer are, for train.sample_tokens={tokens}, received "
            f"data={plan.data.name} and model={plan.model.name}. Try train.sample_tokens=null."
        )
    return None


def continued(prompt: np.ndarray, logits: Logits, temperature: float, chance: np.random.Generator) -> Iterator[int]:
    """Yields the tokens that follow a prompt, int32 [length], each drawn from the logits of the last ones."""
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
    """Returns the text that tokens stand for, be it characters or bytes of UTF-8."""
    named = (names[int(token)] for token in tokens)
    parts = (bytes.fromhex(byte[1]) if (byte := _BYTE.fullmatch(name)) else name.encode() for name in named)
    return b"".join(parts).decode(errors="replace")


def save(model: keras.Model, folder: Path, emit: Emit) -> str:
    """Writes the model whole or not at all, or its weights where Keras cannot save it; returns the file's name."""
    try:
        try:
            return _written(model.save, folder, MODEL)
        except OSError:
            raise
        except Exception as error:  # whatever a class of a user's own raises
            name, why = _written(model.save_weights, folder, WEIGHTS), " ".join(str(error).split())[:200]
            saved = f"The trained model was saved as its weights, {name}, since Keras cannot save it whole: {why}. Try"
            again = "the weights load into a model that is made and built as this one was."
            emit(Warned(f"{saved} get_config and from_config in {type(model).__name__}; {again}"))
            return name
    except OSError as error:
        expected = f"Expected to be able to write the trained model to {folder}, received: {error.strerror or error}."
        instead = "Try more space: the same command then goes on from the last checkpoint."
        raise TrainingError(f"{expected} {instead}") from error


def _written(write: Callable[[Path], object], folder: Path, name: str) -> str:
    partial = folder / f".partial.{name}"
    try:
        write(partial)
        partial.rename(folder / name)
    finally:
        partial.unlink(missing_ok=True)
    return name
