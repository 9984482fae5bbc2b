"""What Keras's `fit` does around steps that the workers of a `ParameterServerStrategy` make asynchronously."""

import contextlib
from collections.abc import Iterator

from pipeline.worker.input.passes import Passes
from pipeline.worker.keras_fit.keras_loop import KerasLoop
from pipeline.worker.loop import Call
from pipeline.worker.tensorflow.scheduled import AsyncLoop, AsyncSteps


class AsyncKerasLoop(AsyncLoop, KerasLoop):
    """A loop as Keras's `fit` has it, on the coordinator, which hands out the steps of each pass over the data."""

    _async_steps: AsyncSteps | None = None

    @property
    def concurrent_steps(self) -> int:  # type: ignore[override]
        """Asynchronous workers."""
        return int(self.strategy._num_workers)

    @contextlib.contextmanager
    def ready(self, train: Passes) -> Iterator[None]:
        """Inside, workers train on `train` asynchronously."""
        self._async_steps = AsyncSteps(
            self.model,
            self.strategy,
            train.source(self.concurrent_steps),
            self.concurrent_steps,
            1 + len(self.outputs),
        )
        try:
            yield
        finally:
            self._async_steps = None

    @property
    def async_steps(self) -> AsyncSteps:
        """The asynchronous steps of the fit that goes on."""
        assert self._async_steps is not None, "over comes first"
        return self._async_steps

    def call(self, count: int, wanted: int = 0) -> Call:
        """The results of the next call that a worker has made; see `AsyncSteps.call`."""
        made = self.async_steps.call(count, wanted)
        self._seen += made.steps
        if self._seen == self._passes.length:
            self._seen = 0
        return made

    def _begin_pass(self) -> None:
        """Nothing: workers read their shares round and round."""
