"""What a conductor has heard of a training, and what of it none has."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.record.events import Epoch, Event, Steps, Told


@dataclass
class Heard:
    """The last step and epoch of a training that are known."""

    step: int = 0
    epoch: int = 0

    def note(self, event: Told) -> None:
        """Takes in what training tells."""
        match event:
            case Steps(step=step):
                self.step = max(self.step, step)
            case Epoch(epoch=epoch):
                self.epoch = max(self.epoch, epoch)

    def unheard(self, told: Sequence[Told]) -> list[Event]:
        """Of what a training had told before its checkpoint, what no conductor has heard: one was killed meanwhile.

        >>> [missed.step for missed in Heard(step=4).unheard([Steps(4, [1.0]), Steps(8, [1.0])])]
        [8]
        """
        return [
            dataclasses.replace(event, group="point", rank=0)
            for event in told
            if (isinstance(event, Steps) and event.step > self.step)
            or (isinstance(event, Epoch) and event.epoch > self.epoch)
        ]
