import csv
import json
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.plan import Plan, check
from jaxpipe.planning.simulator import simulate
from jaxpipe.planning.stages import StageCost
from jaxpipe.planning.vee import placement
from jaxpipe.planning.zero_bubble import Work, automatic, works
from tests.planning.exact import best_schedule, blank_plan

DATA = Path(__file__).parent.parent / "data"


def read(name):
    with open(DATA / name) as file:
        return list(csv.DictReader(file))


SETTINGS = {
    f"p{row['p']}_n{row['n_microbatch']}": [
        int(row[name]) for name in ("F_us", "B_us", "W_us", "comm_us", "hidden", "heads")
    ]
    for row in read("zb_mem_limit_costs.csv")
}
MEMORY_CASES = [
    (row, name)
    for row in read("zb_mem_limit_vs_bubble.csv")
    for name in ("p16_n48", "p16_n64", "p24_n96")
    if name == "p16_n48" or row["mem_limit_over_p_times_MB"] == "1.125"
]


def memory(hidden, heads):
    """What a micro-batch holds and what of it is kept for W, by mem.py of the authors, sequence 1024."""
    return 34 * hidden + 5 * heads * 1024, 32 * hidden


def peaks(schedule, stages):
    """The most that each device holds, in the order of its row."""
    found = []
    for row in schedule:
        held = [0]
        for stage, phase, _ in row:
            work = stages[stage]
            change = {"F": work.held, "I": work.kept - work.held, "W": -work.kept}[phase]
            held.append(held[-1] + change)
        assert held[-1] == pytest.approx(0)
        found.append(max(held))
    return found


def timed(schedule, stages, homes, microbatches, latency):
    """The simulation of a schedule of `stages`."""
    costs = CostTable(
        "us", tuple(PieceCost(f"p{i}", "k", w.F, w.I, w.W) for i, w in enumerate(stages)), Link(latency)
    )
    names, count = tuple(piece.name for piece in costs.pieces), len(stages)
    bounds = tuple(range(count + 1))
    plan = Plan("z", len(schedule), microbatches, names, bounds, tuple(homes), ("none",) * count, schedule)
    check(plan)
    return simulate(plan, costs)


def bubble_rate(stages, homes, microbatches, limit, latency):
    """(T - work) / T as published: T is the longest time from first start to last end on a device."""
    devices = 1 + max(homes)
    found = automatic(stages, homes, microbatches, [limit] * devices, goal="span")
    assert max(peaks(found.schedule, stages)) <= limit * (1 + 1e-9)
    events = timed(found.schedule, stages, homes, microbatches, latency).events
    longest = max(row[-1].end - row[0].start for row in events)
    assert longest <= found.span * (1 + 1e-9)
    return 1 - microbatches * sum(sum(stage[:3]) for stage in stages) / devices / longest


# The two longest take seconds each.
RATES = [row for row in read("zb_iclr_bubble_rates.csv") if int(row["p"]) * int(row["n_microbatch"]) < 4000]


@pytest.mark.parametrize("row", RATES, ids=lambda row: f"{row['p']}x{row['n_microbatch']}")
@pytest.mark.parametrize("factor", [1, 2])
def test_published_bubble_rates(row, factor):
    """arXiv 2401.10241: zb1p and zb2p, in the memory of p and 2p micro-batches."""
    names = ("p", "n_microbatch", "F_us", "B_us", "W_us", "comm_us", "hidden", "heads")
    devices, microbatches, *times, latency, hidden, heads = (int(row[name]) for name in names)
    held, kept = memory(hidden, heads)
    stages = [Work(*times, latency, held, kept)] * devices
    rate = bubble_rate(stages, range(devices), microbatches, factor * devices * held, latency)
    assert rate <= float(row[f"br_zb{factor}p"]) + 0.0003


@pytest.mark.parametrize(
    ("row", "name"), MEMORY_CASES, ids=lambda x: x if isinstance(x, str) else x["method"]
)
def test_published_bubble_under_a_memory_limit(row, name):
    """One stage a device ("zb") and two in a V ("zbv"), the same model."""
    devices, microbatches = (int(number[1:]) for number in name.split("_"))
    forward, gradient, weight, latency, hidden, heads = SETTINGS[name]
    held, kept = memory(hidden, heads)
    limit = float(row["mem_limit_over_p_times_MB"]) * devices * held
    if row["method"] == "zb":
        homes, limit = range(devices), int(limit)
        stages = [Work(2 * forward, 2 * gradient, 2 * weight, latency, held, kept)] * devices
    else:
        homes, limit = placement(devices), int(2 * limit)
        stages = [Work(forward, gradient, weight, latency, held, kept)] * (2 * devices)
        stages[devices - 1] = stages[0]._replace(message=0)
    rate = bubble_rate(stages, homes, microbatches, limit, latency)
    assert rate <= float(row[name]) + 0.005


def table(times, latency=0):
    pieces = (PieceCost(f"p{i}", "k", *t, stash_bytes=1) for i, t in enumerate(times))
    return CostTable("unit", tuple(pieces), Link(latency))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 3, 2), (5, 4, 1), (7, 8, 6)])
def test_at_least_as_good_as_by_hand_in_the_same_memory(devices, times):
    """arXiv 2401.10241, section 2: bubbles of (p - 1)(F + I - W) for ZB-H1 and (p - 1)(F + I - 2W) for ZB-H2,
    the latter on each device; no schedule fills the (p - 1)F before the last device begins."""
    forward, gradient, weight = times
    for microbatches in (2 * devices, 3 * devices):
        costs = table([times] * devices)
        one, two = (simulate(named_plan(n, costs, devices, microbatches), costs) for n in ("zb1p", "zb2p"))
        work = microbatches * sum(times)
        least = (devices - 1) * forward
        assert least <= one.makespan - work <= max(least, (devices - 1) * (forward + gradient - weight))
        by_hand = least + max(0, (devices - 1) * (forward + gradient - 2 * weight))
        assert least <= two.makespan - work <= by_hand
        assert max(one.peak_in_flight) <= devices
        assert max(two.peak_in_flight) <= 2 * devices


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 8])
def test_zb_v_has_no_bubble_but_the_fill(devices):
    """arXiv 2401.10241, section 6: with F = I = W none, in the memory of 1F1B."""
    costs = table([(1, 1, 1)] * (2 * devices))
    for microbatches in (2 * devices, 4 * devices):
        simulation = simulate(named_plan("zb_v", costs, devices, microbatches), costs)
        assert simulation.makespan == 6 * microbatches + devices - 1
        assert max(simulation.peak_in_flight) <= 2 * devices


def test_zb_v_is_as_fast_as_pytorch():
    rows = json.loads((DATA / "torch" / "expected.json").read_text())
    expected = next(row for row in rows if row["file"] == "zbvzerobubble_p4_v2_m8.csv")
    costs = table([(1, 1, 1)] * 8)
    simulation = simulate(named_plan("zb_v", costs, 4, 8), costs)
    assert simulation.makespan == expected["unit_cost_makespan"]
    assert max(simulation.peak_in_flight) <= max(expected["peak_inflight_chunk_activations"])


@pytest.mark.parametrize(
    ("homes", "microbatches", "gap"),
    [
        ((0, 1), 5, 0),
        ((0, 1, 2), 5, 0.03),
        ((0, 1, 2, 3), 6, 0.05),
        ((0, 1, 0, 1), 4, 0.03),
        ((0, 1, 1, 0), 4, 0.13),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_near_the_optimum(homes, microbatches, gap, seed):
    """Uneven stages, messages that take time, and room for some (stage, micro-batch) pairs on each device."""
    random = Random(f"{homes} {seed}")
    times = [tuple(random.randint(1, 9) for _ in range(3)) for _ in homes]
    latency, devices = random.randint(0, 2), 1 + max(homes)
    limit = len(homes) // devices + random.randint(1, devices)
    costs = table(times, latency)
    away = [here != there for here, there in pairwise(homes)] + [False]
    stages = [Work(*t, latency * far) for t, far in zip(times, away)]
    found = automatic(stages, homes, microbatches, [limit] * devices)
    simulation = timed(found.schedule, stages, homes, microbatches, latency)
    blank = blank_plan(costs, range(len(homes) + 1), homes, microbatches)
    least = best_schedule(blank, costs, [limit] * devices).makespan
    assert least <= simulation.makespan <= least * (1 + gap)


NUMBERS = st.integers(0, 9)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_complete_schedule_within_any_limit(data):
    """Room for one micro-batch is enough, on any placement."""
    devices = data.draw(st.integers(1, 4))
    more = data.draw(st.lists(st.integers(0, devices - 1), max_size=6))
    homes = data.draw(st.permutations([*range(devices), *more]))
    microbatches, latency = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([0, 0.1, 2, 20]))
    stages = []
    for stage, device in enumerate(homes):
        away = stage + 1 < len(homes) and homes[stage + 1] != device
        times = [data.draw(NUMBERS) / 2 for _ in range(3)]
        stages.append(Work(*times, latency * away, data.draw(NUMBERS) / 10, data.draw(NUMBERS) / 10))
    limits = []
    for device in range(devices):
        here = [work for stage, work in enumerate(stages) if homes[stage] == device]
        needed = sum(work.held for work in here) + max(0, *(work.kept - work.held for work in here))
        limits.append(needed + data.draw(st.integers(0, 3)) / 2)
    found = automatic(stages, homes, microbatches, limits)
    simulation = timed(found.schedule, stages, homes, microbatches, latency)
    assert simulation.makespan <= found.makespan + 1e-9
    assert all(peak <= limit + 1e-9 for peak, limit in zip(peaks(found.schedule, stages), limits))


def test_work_of_stages():
    held = {"stash_bytes": 4, "grad_stash_bytes": 2, "made_bytes": 1}
    cost = StageCost(1, 2, 3, 5, output_bytes=10, state_bytes=7, **held)
    line = works([cost, cost, cost], (0, 1, 1), Link(1, 5))
    assert line == (Work(1, 2, 3, 3, 4, 2), Work(1, 2, 3, 0, 4, 2), Work(1, 2, 3, 0, 4, 2))


def test_bad_input():
    with pytest.raises(ValueError, match=r"^device 1 may hold 1; a micro-batch needs 2$"):
        automatic([Work(1, 1, 1)] * 3, (0, 1, 1), 2, [1, 1])
    with pytest.raises(ValueError, match=r"^unknown goal 'speed'; known: makespan, span$"):
        automatic([Work(1, 1, 1)], (0,), 2, [1], goal="speed")
    with pytest.raises(
        ValueError, match=r"^5 pieces cannot fill 8 stages of schedule 'zb_v' on 4 devices; expected a piece"
    ):
        named_plan("zb_v", table([(1, 1, 1)] * 5), 4, 8)
