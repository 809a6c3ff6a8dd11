from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.planning.partition import balanced
from jaxpipe.planning.spread import merged, placements, spread

WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def loads(weights, bounds, homes, devices):
    found = [0] * devices
    for (low, high), home in zip(pairwise(bounds), homes):
        found[home] += sum(weights[low:high])
    return found


def test_placements_are_loops_and_waves():
    assert list(placements(2, 7)) == [(0, 1), (0, 1) * 2, (0, 1, 1, 0), (0, 1) * 3, (0, 1, 1, 0, 0, 1)]
    assert list(placements(3, 2)) == []
    assert all(len(homes) <= 50 for homes in placements(4, 50))


def test_merged():
    assert merged((0, 2, 2, 3, 5), (0, 1, 0, 1)) == ((0, 3, 5), (0, 1))
    assert merged((0, 0, 4), (1, 0)) == ((0, 4), (0,))
    assert merged((0, 1, 2, 3), (0, 1, 0)) == ((0, 1, 2, 3), (0, 1, 0))


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.data(), st.booleans())
def test_stages_are_valid(weights, data, keep):
    homes = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=len(weights)))
    bounds, found = spread(weights, homes, keep)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), len(found) + 1)
    assert all(low < high for low, high in pairwise(bounds))
    assert all(here != there for here, there in pairwise(found))
    if keep:
        assert found == merged(range(len(homes) + 1), homes)[1]
    # Equal stages are where the search begins, and every move makes the loads more equal.
    total = np.concatenate([[0], np.cumsum(weights)])
    start = np.searchsorted(total, total[-1] * np.arange(len(homes) + 1) / len(homes))
    start[0], start[-1] = 0, len(weights)
    if not keep:
        squares = [
            sum(load**2 for load in loads(weights, b, h, 4)) for b, h in ((bounds, found), (start, homes))
        ]
        assert squares[0] <= squares[1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=12), st.integers(1, 4))
def test_one_stage_a_device_is_a_local_optimum(weights, devices):
    """No piece at the edge of the fullest device can go over to a neighbour that is less full even then."""
    bounds, homes = spread(weights, range(devices), keep=True)
    found = loads(weights, bounds, homes, devices)
    fullest = found.index(max(found))
    assert max(found) >= max(loads(weights, balanced(weights, devices), range(devices), devices))
    low, high = bounds[fullest : fullest + 2]
    for neighbour, piece in ((fullest - 1, low), (fullest + 1, high - 1)):
        if 0 <= neighbour < devices and high - low > 1:
            assert found[neighbour] + weights[piece] >= found[fullest]


@pytest.mark.parametrize(
    ("weights", "homes", "expected"),
    [
        ([1] * 12, (0, 1, 2), [4, 4, 4]),
        ([1] * 12, (0, 1, 0, 1), [6, 6]),
        ([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], (0, 1, 0, 1), [9, 9]),
        ([3, 1, 2, 2, 1, 3], (0, 1, 1, 0), [6, 6]),
        ([5, 1, 1, 1, 1, 1], (0, 1), [5, 5]),
    ],
)
def test_equal_loads_where_they_are_possible(weights, homes, expected):
    assert loads(weights, *spread(weights, homes), len(expected)) == expected
