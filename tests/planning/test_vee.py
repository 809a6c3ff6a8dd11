import re
from pathlib import Path

import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.plan import Plan, check
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.vee import dualpipe_v, placement, v_half, v_min

DATA = Path(__file__).parent.parent / "data" / "torch"


def run(schedule, microbatches, times=(1, 1, 1)):
    """The simulation of a schedule whose stages all take `times`."""
    devices = len(schedule)
    stages = 2 * devices
    pieces = tuple(PieceCost(f"p{i}", "k", *times) for i in range(stages))
    names, bounds = tuple(piece.name for piece in pieces), tuple(range(stages + 1))
    plan = Plan("v", devices, microbatches, names, bounds, placement(devices), ("none",) * stages, schedule)
    check(plan)
    return simulate(plan, CostTable("unit", pieces))


def test_placement_folds_the_line():
    assert placement(3) == (0, 1, 2, 2, 1, 0)


# Makespan and most pairs in flight that the authors' scheduler reaches with F = I = W = 1
# and 2p, 3p or 4p micro-batches (6 a micro-batch taken off): sail-sg/zero-bubble-pipeline-parallelism, main,
# megatron/core/pipeline_parallel/zerobubble/scheduler/zbv_greedy.py, run for each p.
AUTHORS = {
    v_half: {2: (1, 4), 3: (5, 4), 4: (5, 6), 5: (11, 6), 6: (11, 8), 8: (17, 10), 9: (23, 10), 12: (29, 14)},
    v_min: {2: (3, 4), 3: (5, 4), 4: (11, 4), 5: (15, 6), 6: (17, 6), 8: (27, 8), 9: (29, 8), 12: (41, 10)},
}


@pytest.mark.parametrize(("make", "devices"), [(make, p) for make, rows in AUTHORS.items() for p in rows])
def test_time_and_memory_of_the_authors_scheduler(make, devices):
    bubble, in_flight = AUTHORS[make][devices]
    for microbatches in (2 * devices, 3 * devices, 4 * devices + 1):
        simulation = run(make(devices, microbatches), microbatches)
        assert simulation.makespan - 6 * microbatches == bubble
        assert max(simulation.peak_in_flight) == in_flight


@pytest.mark.parametrize("devices", range(1, 17))
def test_published_memory_and_the_formulas_for_time(devices):
    """arXiv 2405.15362, table 1: (p + 2) // 2 and (p + 4) // 3 micro-batches, of two stages each."""
    half = 3 * devices - (4 if devices % 2 else 7) if devices > 2 else devices - 1
    third = 4 * devices - (5 if devices % 3 else 7) if devices > 1 else 0
    for make, bubble, memory in ((v_half, half, (devices + 2) // 2), (v_min, third, (devices + 4) // 3)):
        for microbatches in (1, 2, devices, 2 * devices, 2 * devices + 3):
            simulation = run(make(devices, microbatches), microbatches)
            assert max(simulation.peak_in_flight) <= 2 * memory
            if microbatches >= 2 * devices:
                assert simulation.makespan == 6 * microbatches + bubble


def test_dualpipe_v_equals_pytorch_but_for_what_overlaps():
    text = (DATA / "dualpipev_p4_v2_m8.csv").read_text()
    apart, pairs = re.subn(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1,\2", text)
    assert pairs == 25
    assert dualpipe_v(4, 8) == read_csv(apart)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2), (5, 4, 1)])
def test_dualpipe_v_has_at_most_the_published_bubble(devices, times):
    forward, gradient, weight = times
    backward = gradient + weight
    for microbatches in (2 * devices, 2 * devices + 1, 5 * devices):
        simulation = run(dualpipe_v(devices, microbatches), microbatches, times)
        bubble = simulation.makespan - 2 * microbatches * sum(times)
        assert 0 <= bubble <= (devices - 1) * (forward + backward + backward - 3 * weight)
        assert simulation.peak_in_flight == (2 * devices + 1,) * devices


def test_dualpipe_v_says_how_many_microbatches_it_takes():
    with pytest.raises(ValueError, match=r"^DualPipeV on 4 devices takes at least 8 micro-batches, not 7$"):
        dualpipe_v(4, 7)
