"""Every key of the schema with what cannot be its value, as a command: one message, exit code 2, nothing begun."""

from dataclasses import is_dataclass

import pytest
from bad_input import Case, cases, fault, keys, of_key
from conftest import sampled


@pytest.fixture
def faults(asked):
    """What is wrong with how the command refuses cases."""

    def found(cases: list[Case]) -> list[str]:
        ended = [(case, asked(*case, module="bad_input")) for case in cases]
        return [f"{' '.join(case)}: {fault(ran)}: {ran.err}" for case, ran in ended if fault(ran)]

    return found


def test_every_key_of_the_schema_has_a_case():
    said = {case[0].lstrip("+~").partition("=")[0] for case in cases()}
    assert {name for name, _ in keys()} <= said
    assert len(cases()) >= 200


def one_for_each_key() -> list[Case]:
    """A case for each key that holds a value, another kind of mistake for each."""
    each = [of_key(name, kind) for name, kind in keys() if not is_dataclass(kind)]
    return [wrong[place % len(wrong)] for place, wrong in enumerate(each)]


def quick() -> list[Case]:
    """A quarter of those, others in each run: a case is a command's composing."""
    return sampled(one_for_each_key(), len(one_for_each_key()) // 4)


def test_something_that_is_wrong_for_a_quarter_of_the_keys_is_refused_in_one_message(faults):
    assert not faults(quick())


@pytest.mark.slow
def test_something_wrong_for_every_other_key_and_an_eighth_of_all_else_are_refused_in_one_message(faults):
    others = sorted(set(cases()) - set(one_for_each_key()))
    assert len(others) >= 200
    keys = [case for case in one_for_each_key() if case not in quick()]
    assert not faults([*keys, *sampled(others, len(others) // 8)])
