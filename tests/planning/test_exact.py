"""The exact solver against brute force and optima that are known, and schedules by name against it."""

from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.named import NAMED, named_plan
from jaxpipe.planning.plan import Action, check
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.planning.simulator import simulate
from tests.planning.exact import best_plan, best_schedule, blank_plan, lower_bound, partitions


def table(times, latency=0, sizes=((1, 1),)):
    """A stage for each (F, I, W). Its pieces hold `sizes`: pairs of bytes from F to I and from I to W.

    By default bytes are micro-batches in flight. The first piece of a stage takes all of its time.
    """
    pieces = []
    for i, stage in enumerate(times):
        for j, (stash, grad_stash) in enumerate(sizes):
            own = (0, 0, 0) if j else stage
            pieces.append(PieceCost(f"p{i}.{j}", "k", *own, stash_bytes=stash, grad_stash_bytes=grad_stash))
    return CostTable("unit", tuple(pieces), Link(latency))


def random_table(random, stages, latency=0, sizes=((1, 1),)):
    times = [(random.randint(1, 9), random.randint(1, 9), random.randint(0, 9)) for _ in range(stages)]
    return table(times, latency, sizes)


def optimum(costs, places, microbatches, limits=None):
    """Makespan, with one piece a stage; the schedule found is proven to take it and to keep the limits."""
    blank = blank_plan(costs, range(len(costs.pieces) + 1), places, microbatches)
    return proven(best_schedule(blank, costs, limits), costs, limits)


def proven(found, costs, limits=None):
    check(found.plan)
    simulation = simulate(found.plan, costs)
    assert simulation.makespan == found.makespan >= lower_bound(found.plan, costs)
    assert limits is None or all(peak <= limit for peak, limit in zip(simulation.peak_bytes, limits))
    return found.makespan


def orders(stage, microbatches):
    """All orders of the F, I, W of one stage that put F before I before W."""
    actions = [Action(stage, phase, b) for b in range(microbatches) for phase in "FIW"]
    for order in permutations(actions):
        place = {action: i for i, action in enumerate(order)}
        if all(place[a._replace(phase="F")] <= place[a] for a in order if a.phase == "I") and all(
            place[a._replace(phase="I")] <= place[a] for a in order if a.phase == "W"
        ):
            yield order


ORDERS = [list(orders(stage, 2)) for stage in range(2)]


def brute_force(blank, costs, limits):
    """Two devices, two micro-batches: the least makespan over all orders on each that neither deadlock nor
    exceed."""
    best = None
    for rows in product(*ORDERS):
        try:
            simulation = simulate(replace(blank, schedule=rows), costs)
        except ValueError:
            continue
        if all(peak <= limit for peak, limit in zip(simulation.peak_bytes, limits)):
            best = min(best or simulation.makespan, simulation.makespan)
    return best


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ([(1, 1)], 1),  # W needs all of the stash
        ([(2, 1)], 2),  # I frees half of it
        ([(1, 2)], 2),  # I makes as much again
        ([(2, 0), (1, 3)], 5),  # one piece's I frees 2, the other's makes 2: both are there while I runs
    ],
)
@pytest.mark.parametrize("factors", [(3, 3), (1, 1.5), (1.5, 1), (2, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_equals_brute_force(seed, factors, sizes, most):
    """most: bytes that one micro-batch needs at once; factors: how many times that each device has."""
    costs = random_table(Random(f"{seed} {factors} {sizes}"), 2, latency=seed, sizes=sizes)
    blank = blank_plan(costs, range(0, 2 * len(sizes) + 1, len(sizes)), range(2), 2)
    limits = [int(factor * most) for factor in factors]
    found = proven(best_schedule(blank, costs, limits), costs, limits)
    assert found == brute_force(blank, costs, limits)
    limits[0] = most - 1
    assert best_schedule(blank, costs, limits) is brute_force(blank, costs, limits) is None


def test_nothing_fits():
    costs = table([(1, 1, 1)] * 2, sizes=[(1, 2)])
    blank = blank_plan(costs, (0, 1, 2), (0, 1), 2)
    assert best_schedule(blank, costs, (2, 1)) is None
    with_state = replace(costs, pieces=tuple(replace(p, param_bytes=5) for p in costs.pieces))
    assert best_schedule(blank, with_state, (6, 7)) is None
    assert best_schedule(blank, with_state, (4, 7)) is None
    assert proven(best_schedule(blank, with_state, (7, 7)), with_state, (7, 7)) == 2 * (4 + 1)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 5), (3, 4), (4, 4)])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2), (2, 2, 5)])
def test_1f1b_is_the_best_in_its_own_memory(p, m, times):
    """The last device holds one micro-batch: its last I ends after (p - 1) F, m - 1 whole micro-batches, F
    and I; then p - 1 I and a W follow on the way to device 0. arXiv 2401.10241, section 2: bubble
    (p - 1)(F + I + W) with B whole; less W when I hands its gradient on first."""
    f, i, w = times
    costs, limits = table([times] * p), [min(p - s, m) for s in range(p)]
    expected = m * (f + i + w) + (p - 1) * (f + i)
    assert optimum(costs, range(p), m, limits) == expected
    assert simulate(named_plan("1f1b_split", costs, p, m), costs).makespan == expected


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (4, 7)])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 3, 2), (3, 4, 2)])
def test_zero_bubble_with_the_memory_of_h2(p, m, times):
    """With 2p - 1 in flight and as many micro-batches nothing is lost but the fill (arXiv 2401.10241,
    section 2.1): no device pauses, and the last one starts after p - 1 F; or, where I is longer than W
    by more than W can fill, after all F and I of the last device p - 1 I and a W are left."""
    f, i, w = times
    found = optimum(table([times] * p), range(p), m, [2 * p - 1] * p)
    assert found == (p - 1) * f + max(m * (f + i + w), m * (f + i) + (p - 1) * i + w)


@pytest.mark.parametrize(("p", "m", "latency"), [(2, 3, 0), (3, 2, 0), (3, 4, 2)])
def test_one_micro_batch_at_a_time(p, m, latency):
    """Device 0 may hold one: a micro-batch goes to the end and back, and its W on device 0 follows."""
    costs = table([(2, 3, 4)] * p, latency)
    assert optimum(costs, range(p), m, [1] + [m] * (p - 1)) == m * (p * 5 + 2 * (p - 1) * latency + 4)


def test_one_device_is_never_idle():
    assert optimum(table([(1, 2, 3), (4, 5, 6)]), (0, 0), 3, [2]) == 3 * 21


def test_a_v_brings_the_last_stage_back_to_device_0():
    """One micro-batch, without latency between the stages of one device."""
    costs = table([(1, 2, 9), (3, 4, 1), (5, 6, 1), (7, 8, 1)], latency=10)
    assert optimum(costs, (0, 1, 1, 0), 1) == 1 + 10 + 3 + 5 + 10 + 7 + 8 + 10 + 6 + 4 + 10 + 2 + 9


# In HelixPipe the micro-batches of an attention run on several devices, so they are not alike.
STAY = [name for name in NAMED if not name.startswith("helix")]


@pytest.mark.parametrize(
    ("name", "devices", "least"), [(n, 2, 2) for n in STAY] + [(n, 3, 6) for n in SCHEDULES]
)
def test_no_schedule_by_name_beats_the_optimum(name, devices, least):
    """On uneven pieces, with as much memory on each device as the schedule takes."""
    costs = random_table(Random(f"{name} {devices}"), 8, latency=devices - 2)
    step, least = NAMED[name].step(devices), max(least, NAMED[name].least(devices))
    plan = named_plan(name, costs, devices, step * -(-least // step))
    simulation = simulate(plan, costs)
    found = best_schedule(plan, costs, [int(peak) for peak in simulation.peak_bytes])
    assert proven(found, costs, simulation.peak_bytes) <= simulation.makespan


@pytest.mark.parametrize(
    ("pieces", "places", "microbatches"),
    [(8, (0, 1), 4), (8, (0, 1, 2), 4), (7, (0, 1, 2, 3), 4), (6, (0, 1, 1, 0), 3)],
)
@pytest.mark.parametrize("seed", range(2))
def test_best_partition(pieces, places, microbatches, seed):
    """Every partition solved on its own has the same least makespan, in the memory of 1F1B."""
    costs = random_table(Random(f"{pieces} {places} {seed}"), pieces)
    plans, limits = list(partitions(costs, places, microbatches)), [pieces] * (1 + max(places))
    every = [best_schedule(plan, costs, limits) for plan in plans]
    assert len({plan.stage_bounds for plan in plans}) == len(plans)
    least = min(found.makespan for found in every if found)
    assert proven(best_plan(plans, costs, limits), costs, limits) == least


def test_the_same_schedule_every_time():
    costs = random_table(Random(0), 3)
    blank = blank_plan(costs, range(4), range(3), 5)
    assert best_schedule(blank, costs) == best_schedule(blank, costs)


def test_below():
    costs = table([(1, 1, 1)] * 2)
    blank = blank_plan(costs, range(3), range(2), 3)
    assert best_schedule(blank, costs).makespan == 10
    assert best_schedule(blank, costs, below=11).makespan == 10
    assert best_schedule(blank, costs, below=10) is None
    # Under the bound without memory, but out of reach with one micro-batch at a time.
    assert best_schedule(blank, costs, (1, 1), below=12) is None


@pytest.mark.parametrize(
    ("times", "latency", "message"),
    [
        ((1, 0.5, 1), 0, "I of stage 0 takes 0.5; expected an integer of at least 1"),
        ((0, 1, 1), 0, "F of stage 0 takes 0; expected an integer of at least 1"),
        ((1, 1, 1), 0.5, "a message from stage 0 to 1 takes 0.5; expected an integer"),
    ],
)
def test_what_it_does_not_take(times, latency, message):
    costs = table([times, (1, 1, 1)], latency)
    with pytest.raises(ValueError, match=message):
        best_schedule(blank_plan(costs, range(3), range(2), 2), costs)
