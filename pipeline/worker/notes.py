"""What a person should know of the data and the model that a process trains: told once, and kept for the result."""

from pipeline.record.events import Warned
from pipeline.worker.engine import Tell


class Notes:
    """Texts in the order in which they came; with no way to `tell`, another process tells them, and none are kept."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self.texts: list[str] = []

    def keep(self, text: str) -> None:
        """Keeps a text for the result alone: it is nothing to be warned of."""
        if self._tell is not None and text not in self.texts:
            self.texts.append(text)

    def add(self, text: str) -> None:
        """Tells a text, the first time that it comes."""
        if self._tell is not None and text not in self.texts:
            self.texts.append(text)
            self._tell(Warned(text))
