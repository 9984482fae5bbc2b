"""Turns what the input and the model can do alone, the `profile` of result.json, into lines for a person."""

from collections.abc import Mapping

from pipeline.views.terminal.words import clean, items, listed, number, percent, rate

# Stages with a smaller share of the input's time are not told one by one.
LEAST_SHARE = 0.01


def profile_lines(profile: object) -> list[str]:
    """Which of the two sets the pace and what there is to gain; their rates; the stages of the input, costliest first.

    >>> stages = [{"name": "map(slow)", "microseconds_per_example": 2012.0, "share": 0.96}]
    >>> profile_lines({"bound": "input", "input_examples_per_second": 480.0, "model_examples_per_second": 9000.0,
    ...                "ceiling_examples_per_second": 9000.0, "stages": stages})
    ['input-bound: 9,000 examples/s without map(slow), 96% of the input', \
'input alone 480 examples/s, model alone 9,000 examples/s', 'input: map(slow) 96%, 2,012 us an example']
    """
    said = profile_line(profile)
    if not said or not isinstance(profile, Mapping):
        return []
    fed, trained = (number(profile.get(f"{what}_examples_per_second")) for what in ("input", "model"))
    alone = listed(
        "" if fed is None else f"input alone {rate(fed)} examples/s",
        "" if trained is None else f"model alone {rate(trained)} examples/s",
    )
    told = [
        f"{name} {percent(share)}, {rate(cost)} us an example"
        for share, name, cost in _stages(profile)
        if share >= LEAST_SHARE
    ]
    return [said, *filter(None, (alone, f"input: {'; '.join(told)}" if told else ""))]


def profile_line(profile: object) -> str:
    """The first of these lines; empty where nothing was profiled."""
    bound = clean(profile.get("bound")) if isinstance(profile, Mapping) else ""
    if not bound or not isinstance(profile, Mapping):
        return ""
    if bound == "neither":
        return "neither the input nor the model clearly sets the pace"
    ceiling, stages = number(profile.get("ceiling_examples_per_second")), _stages(profile)
    if ceiling is None:
        return f"{bound}-bound"
    if bound == "model":
        return f"model-bound: the input alone makes {rate(ceiling)} examples/s"
    without = f" without {stages[0][1]}, {percent(stages[0][0])} of the input" if stages else ""
    return f"input-bound: {rate(ceiling)} examples/s{without}"


def _stages(profile: Mapping[str, object]) -> list[tuple[float, str, float]]:
    """(share, name, microseconds an example) of the input's stages, the costliest first."""
    found = [item for item in items(profile.get("stages")) if isinstance(item, Mapping)]
    told = [
        (share, clean(stage.get("name")), cost)
        for stage in found
        if (share := number(stage.get("share"))) is not None
        and (cost := number(stage.get("microseconds_per_example"))) is not None
    ]
    return sorted(told, reverse=True)
