import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.planning.partition import balanced, even

CASES = json.loads((Path(__file__).parent.parent / "data" / "deepspeed_partition_cases.json").read_text())


def score(weights, bounds):
    parts = [sum(weights[i:j]) for i, j in pairwise(bounds)]
    return max(parts), sum(part * part for part in parts)


@given(st.data())
def test_balanced_is_the_best_of_all_partitions(data):
    weights = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=9))
    parts = data.draw(st.integers(1, len(weights)))
    bounds = balanced(weights, parts)
    assert len(bounds) == parts + 1
    assert (bounds[0], bounds[-1]) == (0, len(weights))
    assert all(i < j for i, j in pairwise(bounds))
    every = combinations(range(1, len(weights)), parts - 1)
    assert score(weights, bounds) == min(score(weights, (0, *cuts, len(weights))) for cuts in every)


def test_the_best_prefix_is_not_always_part_of_the_best_whole():
    """The parts 1 | 7 | 2 5 have a smaller maximum than 1 7 | 2 | 5, but the 8 at the end outdoes both."""
    weights = [1, 7, 2, 5, 6, 8]
    assert balanced(weights, 5) == (0, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    "case",
    CASES["exact"] + CASES["max_load_minimising_only (skipped upstream since PR4312 switched to max-min)"],
)
def test_published_partitions(case):
    assert balanced(case["w"], case["parts"]) == tuple(case["bounds"])


def test_floats_and_large_weights():
    assert balanced([0.1] * 10, 5) == (0, 2, 4, 6, 8, 10)
    weights = CASES["bert_params"]["w"]
    bounds = balanced(weights, CASES["bert_params"]["parts"])
    # Both ends weigh 4.2 layers, and 24 layers fill the other six parts with 4 each.
    assert score(weights, bounds)[0] == weights[0]


@given(st.integers(1, 60), st.integers(1, 60))
def test_even_parts_differ_by_at_most_one(count, parts):
    if count < parts:
        with pytest.raises(ValueError, match=rf"^{count} pieces? cannot fill {parts} devices"):
            even(count, parts)
        return
    sizes = [j - i for i, j in pairwise(even(count, parts))]
    assert sum(sizes) == count
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_errors():
    with pytest.raises(ValueError, match=r"^2 pieces cannot fill 3 devices; expected a piece for each"):
        balanced([1, 2], 3)
    with pytest.raises(ValueError, match="into 0 parts"):
        even(3, 0)
    with pytest.raises(ValueError, match="weight 1 is -1"):
        balanced([1, -1], 2)
    with pytest.raises(ValueError, match="weight 0 is nan"):
        balanced([float("nan"), 1], 2)
