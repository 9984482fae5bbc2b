"""Turns what the input and the model can do alone, the `profile` of result.json, into lines for a person."""

from collections.abc import Sequence

from pipeline.record.profile import Profile, Stage
from pipeline.views.terminal.words import clean, percent, rate

# Stages with a smaller share of the input's time are not told one by one.
LEAST_SHARE = 0.01


def profile_lines(profile: Profile | None) -> list[str]:
    """Which of the two sets the pace and what there is to gain; their rates; the stages of the input, costliest first.

    >>> profile_lines(Profile(480.0, 9000.0, "input", 9000.0, [Stage("map(slow)", 2012.0, 0.96)]))
    ['input-bound: 9,000 examples/s without map(slow), 96% of the input', \
'input alone 480 examples/s, model alone 9,000 examples/s', 'input: map(slow) 96%, 2,012 us an example']
    """
    if profile is None:
        return []
    fed, trained = profile.input_examples_per_second, profile.model_examples_per_second
    stages = [
        f"{clean(stage.name)} {percent(stage.share)}, {rate(stage.microseconds_per_example)} us an example"
        for stage in _costliest_first(profile.stages)
        if stage.share >= LEAST_SHARE
    ]
    return [
        profile_line(profile),
        f"input alone {rate(fed)} examples/s, model alone {rate(trained)} examples/s",
        *([f"input: {'; '.join(stages)}"] if stages else []),
    ]


def profile_line(profile: Profile | None) -> str:
    """The first of these lines; empty where nothing was profiled."""
    if profile is None:
        return ""
    if profile.bound == "neither":
        return "neither the input nor the model clearly sets the pace"
    ceiling, stages = profile.ceiling_examples_per_second, _costliest_first(profile.stages)
    if ceiling is None:
        return f"{profile.bound}-bound"
    if profile.bound == "model":
        return f"model-bound: the input alone makes {rate(ceiling)} examples/s"
    without = f" without {clean(stages[0].name)}, {percent(stages[0].share)} of the input" if stages else ""
    return f"input-bound: {rate(ceiling)} examples/s{without}"


def _costliest_first(stages: Sequence[Stage]) -> list[Stage]:
    return sorted(stages, key=lambda stage: stage.share, reverse=True)
