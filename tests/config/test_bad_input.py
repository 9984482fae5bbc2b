"""Every key of the schema with what cannot be its value, as a command: one message, exit code 2, nothing begun."""

from dataclasses import is_dataclass

import pytest
from bad_input import cases, fault, keys, of_key
from conftest import sampled

# A case for each key that holds a value, another kind of mistake for each.
EACH = [
    (wrong := of_key(name, kind))[place % len(wrong)]
    for place, (name, kind) in enumerate((name, kind) for name, kind in keys() if not is_dataclass(kind))
]
# A quarter of those, others in each run: a case is a command's composing.
QUICK = sampled(EACH, len(EACH) // 4)


def faults(asked, cases):
    """What is wrong with how the command refuses cases."""
    ended = [(case, asked(*case, module="bad_input")) for case in cases]
    return [f"{' '.join(case)}: {fault(ran)}: {ran.err}" for case, ran in ended if fault(ran)]


def test_something_that_is_wrong_for_a_quarter_of_the_keys_is_refused_in_one_message(asked):
    assert {name for name, _ in keys()} <= {case[0].lstrip("+~").partition("=")[0] for case in cases()}
    assert not faults(asked, QUICK)


@pytest.mark.slow
def test_something_wrong_for_every_other_key_and_an_eighth_of_all_else_are_refused_in_one_message(asked):
    others = sorted(set(cases()) - set(EACH))
    assert len(others) >= 200
    assert not faults(asked, [*(case for case in EACH if case not in QUICK), *sampled(others, len(others) // 8)])
