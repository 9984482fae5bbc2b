"""Turns what a run told into its description in MLflow: its result in a sentence, the command, the commit, notes."""

from dataclasses import dataclass, field

from pipeline.analyze.comparable import doubts
from pipeline.record.results import Result
from pipeline.views.terminal.words import (
    bare_times,
    brackets,
    clean,
    figure,
    listed,
    percent,
    plural,
    rate,
    span,
)

# Enough of a commit's name to find it by.
COMMIT_LETTERS = 12


@dataclass
class About:
    """What is known of a run so far."""

    result: str = ""
    error: str = ""
    command: str = ""
    commit: str = ""
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Takes in what is to be said, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def text(self) -> str:
        """The description, in Markdown.

        >>> About(result="**Two.**", command="python -m pipeline", notes=["Slow."]).text
        '**Two.**\\n\\n`python -m pipeline`\\n\\n- Slow.'
        """
        command = f"`{self.command.replace('`', '?')}`" if self.command else ""
        commit = f"commit `{self.commit[:COMMIT_LETTERS]}`" if self.commit else ""
        parts = (
            f"**{self.error}**" if self.error else "",
            self.result,
            listed(command, commit),
            "\n".join(f"- {note}" for note in self.notes),
        )
        return "\n\n".join(part for part in parts if part)


def sentence(result: Result) -> str:
    """What came of a run: speedup and throughput with their intervals, and of what; empty where nothing was measured.

    >>> from pipeline.record.results import from_values
    >>> sentence(from_values({"examples_per_second": 96.04, "strategy": "mirrored", "workers": 2}))
    '**96.0 examples/s** with mirrored on 2 workers.'
    """
    speed, layout, training = result.speed, result.layout, result.training
    if speed.examples_per_second is None:
        return ""
    ends = span(speed.examples_per_second_low, speed.examples_per_second_high, rate, " to ")
    throughput = f"{rate(speed.examples_per_second)} examples/s"
    doubtful = listed(*doubts(layout))
    said = f"**{throughput}**{brackets(listed(doubtful, ends))}"
    if speed.speedup is not None:
        of_speedup = span(speed.speedup_low, speed.speedup_high, bare_times, " to ")
        efficiency = "" if speed.efficiency is None else f", {percent(speed.efficiency)} efficiency"
        said = f"**{speed.speedup:.2f} times one device**{brackets(listed(doubtful, of_speedup))}{efficiency}: "
        said += f"{throughput}{brackets(ends)}"
    strategy = " on ".join(filter(None, [clean(result.choices.called), plural(layout.workers, "worker")]))
    scaling = f"{layout.scaling} scaling" if layout.scaling else ""
    sure = f"{percent(speed.interval_confidence)} intervals" if ends and speed.interval_confidence else ""
    known = [(clean(name), value) for name, value in training.val_metrics.items()][:1]
    learnt = "".join(f"validation {name} {figure(value)}" for name, value in known)
    of = listed(strategy, scaling, clean(layout.precision), sure, learnt)
    return f"{said} with {of}." if of else f"{said}."
