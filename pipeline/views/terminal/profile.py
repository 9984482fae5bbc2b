"""Turns what the input and the model can do alone, the `profile` of result.json, into lines for a person."""

from pipeline.record.findings import Profile
from pipeline.views.terminal.words import rate


def profile_lines(profile: Profile | None) -> list[str]:
    """Which of the two sets the pace and what there is to gain; and their rates.

    >>> profile_lines(Profile(480.0, 9000.0, "input", 9000.0))
    ['input-bound: the model alone trains 9,000 examples/s', \
'input alone 480 examples/s, model alone 9,000 examples/s']
    """
    if profile is None:
        return []
    fed, trained = profile.input_examples_per_second, profile.model_examples_per_second
    return [profile_line(profile), f"input alone {rate(fed)} examples/s, model alone {rate(trained)} examples/s"]


def profile_line(profile: Profile | None) -> str:
    """The first of these lines; empty where nothing was profiled."""
    if profile is None:
        return ""
    if profile.bound == "neither":
        return "neither the input nor the model clearly sets the pace"
    if (ceiling := profile.ceiling_examples_per_second) is None:
        return f"{profile.bound}-bound"
    other = "the input alone makes" if profile.bound == "model" else "the model alone trains"
    return f"{profile.bound}-bound: {other} {rate(ceiling)} examples/s"
