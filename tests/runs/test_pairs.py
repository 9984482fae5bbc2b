"""Every strategy with every choice of `train`, `data` and `checkpoint`: trained, or refused in words before it starts.

`tests/pairs.py` makes the rows, and all of the runs; here are the first of them, which hold most pairs.
"""

import pairs
import pytest

# Rows that are run, and a refused pair of so many.
FIRST, EACH = 10, 50


@pytest.fixture(scope="module")
def crossed():
    return pairs.rows(pairs.factors(), pairs.refusal)


def test_rows_hold_every_pair_that_is_not_refused_and_every_refusal_says_what_to_try(crossed):
    made, refused = crossed
    factors = pairs.factors()
    assert {"train.deterministic", "data.cache", "checkpoint.best_is", "strategy"} <= set(factors)
    held = {(one, other, str(row[one]), str(row[other])) for row in [*made, *refused] for one in row for other in row}
    for one in factors:
        for other in factors:
            if one != other:
                assert held >= {(one, other, str(a), str(b)) for a in factors[one] for b in factors[other]}
    assert all(pairs.refusal(row) is None for row in made)
    for row in refused:
        said = pairs.refusal(row)
        assert all(word in said for word in ("Expected ", "received ", "Try ")), said


def test_a_refused_pair_leaves_with_exit_code_2_and_leaves_nothing(crossed, asked, tmp_path):
    _, refused = crossed
    # Not those that only a run can tell.
    told = [row for row in refused if row["data"] == "arrays" and row["train.check"] != "strict"]
    for row in told[::EACH]:
        ran = asked(*pairs.typed_of(row)).failed(2)
        assert pairs.wrong(ran.code, ran.out + ran.err) is None, ran.err
        assert not list(tmp_path.glob("outputs/runs/*"))


@pytest.mark.slow
@pytest.mark.waits
def test_the_first_rows_train_without_a_traceback(crossed):
    made, _ = crossed
    for row, (code, found, said) in pairs.at_once(made[:FIRST]):
        assert (code, found) == (0, None), f"{pairs.typed_of(row)} {said}"
