import csv
from itertools import product
from pathlib import Path

import pytest

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.plan import Action, Plan, check
from jaxpipe.planning.schedules import SCHEDULES, alternate, fuse_backward
from jaxpipe.planning.simulator import simulate

DATA = Path(__file__).parent.parent / "data"

GRID = list(product((1, 2, 3, 5, 8), (1, 2, 3, 5, 8, 9, 15, 20)))
"""Devices and micro-batches."""


def run(name, p, m, times, latency=0.0):
    """A simulation of equal stages."""
    costs = CostTable("unit", tuple(PieceCost(f"p{i}", "k", *times) for i in range(p)), Link(latency))
    return simulate(staged_plan(name, costs, m, range(p), SCHEDULES[name](p, m)), costs)


def span(simulation):
    """The longest time between the first start and the last end of one device."""
    return max(row[-1].end - row[0].start for row in simulation.events)


def test_1f1b_as_drawn_in_the_literature():
    rows = [" ".join(map(str, row)) for row in SCHEDULES["1f1b"](3, 4)]
    assert rows == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zb_h1_as_drawn_in_the_paper():
    """Each stage s has s micro-batches whose I is done and whose W is not when it begins to alternate."""
    rows = [" ".join(map(str, row)) for row in SCHEDULES["zb_h1"](3, 4)]
    assert rows == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_h2_as_drawn_in_the_paper():
    """Twice the warm-up of ZB-H1, and W put off by twice as many micro-batches."""
    rows = [" ".join(map(str, row)) for row in SCHEDULES["zb_h2"](3, 5)]
    assert rows == [
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
        "1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4",
        "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4",
    ]


def test_alternating_rows_hold_every_action_once():
    forwards, backwards = ([Action(0, phase, i) for i in range(3)] for phase in "FB")
    for warmup, text in enumerate(("F0 B0 F1 B1 F2 B2", "F0 F1 B0 F2 B1 B2", "F0 F1 F2 B0 B1 B2")):
        assert [str(a)[1:] for a in alternate(forwards, backwards, warmup)] == text.split()
    assert alternate(forwards, backwards, 9) == (*forwards, *backwards)


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 3, 2), (1, 2, 3), (3, 1, 0)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "gpipe_split", "1f1b_split"])
def test_bubble_and_peak(name, times):
    """arXiv 1811.06965, section 2.3; arXiv 2104.04473, section 2.2.1: (p - 1)(F + B), with I in place of B
    where the gradient does not wait for W."""
    forward, gradient, weight = times
    for p, m in GRID:
        simulation = run(name, p, m, times)
        waits = forward + gradient + (0 if name.endswith("split") else weight)
        assert simulation.makespan == m * sum(times) + (p - 1) * waits
        gpipe = name.startswith("gpipe")
        assert list(simulation.peak_in_flight) == [m if gpipe else min(p - s, m) for s in range(p)]


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 3, 2), (2, 3, 2), (3, 2, 1), (2, 5, 1)])
def test_zb_h1_bubble_and_peak(times):
    """arXiv 2401.10241, table 2: (p - 1)(F + I - W) at the memory of p micro-batches."""
    forward, gradient, weight = times
    for p, m in GRID:
        simulation = run("zb_h1", p, m, times)
        assert list(simulation.peak_in_flight) == [min(p, m)] * p
        if m >= p:
            bubble = (p - 1) * (forward + gradient - weight)
            assert simulation.makespan == m * sum(times) + bubble


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 3, 2), (2, 3, 2), (3, 2, 1), (2, 5, 1)])
def test_zb_h2_bubble_and_peak(times):
    """arXiv 2401.10241, table 2: (p - 1)(F + I - 2W) within a device, at 2p - 1 micro-batches."""
    forward, gradient, weight = times
    for p, m in GRID:
        simulation = run("zb_h2", p, m, times)
        assert list(simulation.peak_in_flight) == [min(2 * p - 1, m)] * p
        if m >= 2 * p - 1:
            bubble = forward + gradient - 2 * weight
            assert span(simulation) == m * sum(times) + (p - 1) * bubble
            assert simulation.makespan == m * sum(times) + (p - 1) * max(forward, bubble)


def zero_bubble_rows():
    with open(DATA / "zb_iclr_bubble_rates.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
@pytest.mark.parametrize("row", zero_bubble_rows(), ids=lambda row: f"{row['p']}x{row['n_microbatch']}")
def test_published_bubble_rates(row, name):
    """Rate (T - m (F + I + W)) / T; T is the makespan, for ZB-H2 the longest span of one device."""
    p, m, forward, gradient, weight, latency = (
        int(row[column]) for column in ("p", "n_microbatch", "F_us", "B_us", "W_us", "comm_us")
    )
    simulation = run(name, p, m, (forward, gradient, weight), latency)
    time = span(simulation) if name == "zb_h2" else simulation.makespan
    rate = (time - m * (forward + gradient + weight)) / time
    assert rate == pytest.approx(float(row[f"br_{name.replace('_', '')}"]), abs=0.6e-4)


def test_splitting_puts_w_right_after_i():
    rows = [" ".join(map(str, row)) for row in SCHEDULES["1f1b_split"](2, 2)]
    assert rows == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    rows = [" ".join(map(str, row)) for row in SCHEDULES["gpipe_split"](2, 2)]
    assert rows == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1W0 1I1 1W1"]


def test_fusing_takes_only_neighbours_of_one_stage_and_microbatch():
    texts = ["0F0 0F1 0I0 0W0 0I1 1I0 0W1 1W0", "2I0 3W0 2W0 3I0 3B1"]
    schedule = tuple(tuple(map(Action.parse, text.split())) for text in texts)
    rows = [" ".join(map(str, row)) for row in fuse_backward(schedule)]
    assert rows == ["0F0 0F1 0B0 0I1 1I0 0W1 1W0", "2I0 3W0 2W0 3I0 3B1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fusing_undoes_splitting(name):
    schedule = SCHEDULES[name](3, 5)
    assert fuse_backward(SCHEDULES[f"{name}_split"](3, 5)) == schedule == fuse_backward(schedule)


def test_gpipe_equals_pytorch():
    assert SCHEDULES["gpipe"](4, 8) == read_csv((DATA / "torch" / "gpipe_p4_v1_m8.csv").read_text())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 11])
def test_complete_for_any_counts(name, stages, microbatches):
    schedule = SCHEDULES[name](stages, microbatches)
    pieces = tuple(f"p{i}" for i in range(stages))
    line = tuple(range(stages))
    check(Plan(name, stages, microbatches, pieces, (*line, stages), line, ("none",) * stages, schedule))
