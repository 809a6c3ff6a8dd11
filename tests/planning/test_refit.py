import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.refit import refit


def table(*pieces):
    """(F, stash bytes, output bytes) of each piece."""
    return CostTable(
        "unit", tuple(PieceCost(f"p{i}", "k", f, 1, 1, 0, s, s, o) for i, (f, s, o) in enumerate(pieces))
    )


COSTS = table((4, 8, 1), (1, 5, 2), (0, 3, 3), (1, 2, 0))
"""Recompute saves 8, 4, 1 bytes, and -1: for the time 2, 4, infinitely many."""
FLIGHT = np.array([[3.0, 0, 3, 0], [0, 2, 0, 2]])
STATE = np.array([10.0, 1.0])


def test_what_saves_most_for_the_time_comes_first():
    """Device 0 holds 10 + 3 * 8 + 3 * 3 = 43, device 1 1 + 2 * 5 + 2 * 2 = 15."""
    assert refit(COSTS, FLIGHT, STATE, 43) == (False, False, False, False)
    assert refit(COSTS, FLIGHT, STATE, 42) == (False, False, True, False)
    assert refit(COSTS, FLIGHT, STATE, 40) == (False, False, True, False)
    assert refit(COSTS, FLIGHT, STATE, 39) == (True, False, True, False)
    assert refit(COSTS, FLIGHT, STATE, 14) == (True, True, True, False)


def test_only_devices_that_are_over_the_limit():
    assert refit(COSTS, FLIGHT, np.array([0.0, 50.0]), 60) == (False, True, False, False)


def test_what_cannot_fit_is_recomputed_as_far_as_it_saves():
    assert refit(COSTS, FLIGHT, STATE, 0) == (True, True, True, False)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_fits_where_anything_does(data):
    number = st.integers(0, 9)
    count, devices = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    costs = table(*((data.draw(number), data.draw(number), data.draw(number)) for _ in range(count)))
    flight = np.array([[float(data.draw(number)) for _ in range(count)] for _ in range(devices)])
    state, limit = np.array([data.draw(number)] * devices), data.draw(st.integers(0, 200))
    none = np.array([piece.stash_bytes for piece in costs.pieces])
    read = np.array([0, *(piece.output_bytes for piece in costs.pieces[:-1])])
    full = np.array(refit(costs, flight, state, limit))
    least = state + flight @ np.minimum(none, read)
    held = state + flight @ np.where(full, read, none)
    assert (held <= np.maximum(limit, least)).all()
    assert not (full & (read >= none)).any()
