import json
from pathlib import Path

import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.interleaved import breadth_first, hanayo, interleaved_1f1b
from jaxpipe.planning.simulator import simulate

DATA = Path(__file__).parent.parent / "data" / "torch"
EXPECTED = {row["file"]: row for row in json.loads((DATA / "expected.json").read_text())}

TIMES = pytest.mark.parametrize("times", [(1, 1, 1), (3, 1, 1), (2, 3, 4), (2, 1, 0)])
GRID = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 6, 8, 12, 18)]
GROUPS = [(p, m) for p, m in GRID if m % p == 0]


def run(schedule, home, microbatches, times):
    """A simulation of equal stages."""
    pieces = tuple(PieceCost(f"p{i}", "k", *times) for i in range(len(home)))
    costs = CostTable("unit", pieces)
    return simulate(staged_plan("plan", costs, microbatches, home, schedule), costs)


def loop(devices, chunks):
    return [stage % devices for stage in range(devices * chunks)]


def zigzag(devices, waves):
    return [*range(devices), *reversed(range(devices))] * waves


@pytest.mark.parametrize(
    ("rule", "name"),
    [(interleaved_1f1b, "interleaved1f1b_p4_v2_m8.csv"), (breadth_first, "loopedbfs_p4_v2_m8.csv")],
)
def test_equal_to_pytorch(rule, name):
    schedule, expected = rule(4, 8), EXPECTED[name]
    assert schedule == read_csv((DATA / name).read_text())
    simulation = run(schedule, loop(4, 2), 8, (1, 1, 1))
    assert simulation.makespan == expected["unit_cost_makespan"]
    assert list(simulation.peak_in_flight) == expected["peak_inflight_chunk_activations"]


@TIMES
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaved_bubble_and_peak(chunks, times):
    """arXiv 2104.04473, section 2.2.2: the bubble of 1F1B over the chunks."""
    for p, m in GROUPS:
        simulation = run(interleaved_1f1b(p, m, chunks), loop(p, chunks), m, times)
        assert simulation.makespan == (m * chunks + p - 1) * sum(times)
        assert simulation.bubble_fraction == pytest.approx((p - 1) / (m * chunks + p - 1))
        warmup = [2 * (p - 1 - d) + (chunks - 1) * p for d in range(p)]
        assert list(simulation.peak_in_flight) == [min(w + 1, m * chunks) for w in warmup]


def test_interleaving_needs_whole_groups():
    with pytest.raises(ValueError, match=r"^6 micro-batches cannot be interleaved; expected a multiple of 4"):
        interleaved_1f1b(4, 6)


@TIMES
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_breadth_first_bubble_and_peak(chunks, times):
    """arXiv 2211.05953: the bubble of the interleaved schedule; with few micro-batches each loop waits."""
    for p, m in GRID:
        simulation = run(breadth_first(p, m, chunks), loop(p, chunks), m, times)
        bubble = p - 1 + (chunks - 1) * max(0, p - m)
        assert simulation.makespan == (m * chunks + bubble) * sum(times)
        assert simulation.peak_in_flight == (m * chunks,) * p


def test_one_wave_on_two_devices():
    rows = [" ".join(map(str, row)) for row in hanayo(2, 2, waves=1)]
    assert rows == ["0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"]


@TIMES
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_hanayo_bubble_and_peak(waves, times):
    forward, backward = times[0], times[1] + times[2]
    for p, m in GROUPS:
        simulation = run(hanayo(p, m, waves), zigzag(p, waves), m, times)
        bubble = 2 * (p - 1) * (max(forward, backward) + (m // p - 1) * abs(backward - forward))
        assert simulation.makespan == m * 2 * waves * (forward + backward) + bubble
        assert list(simulation.peak_in_flight) == [p * (2 * waves - 1) + d + 1 for d in range(p)]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_more_waves_have_less_bubble(p):
    """One model on p devices, B = 2F and p micro-batches: (2p - 2)/waves forwards of a whole device."""
    whole = 24.0
    for waves in (1, 2, 3):
        forward = whole / (2 * waves)
        simulation = run(hanayo(p, p, waves), zigzag(p, waves), p, (forward, forward, forward))
        assert simulation.makespan - 3 * whole * p == pytest.approx((2 * p - 2) * whole / waves)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_hanayo_takes_any_number_of_micro_batches(p):
    for m in (1, 2, 3, 5, 6, 7, 9):
        simulation = run(hanayo(p, m), zigzag(p, 2), m, (1, 1, 1))
        assert max(simulation.peak_in_flight) <= 4 * p
