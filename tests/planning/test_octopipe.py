import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning import octopipe as tuner
from jaxpipe.planning.engine import encode
from jaxpipe.planning.layers import even_layers, layer_starts
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.octopipe import octopipe
from jaxpipe.planning.octopipe_dispatch import POLICIES, one_microbatch
from jaxpipe.planning.octopipe_state import Problem, evaluate, idle_time, schedule
from jaxpipe.planning.plan import check
from jaxpipe.planning.schedules import one_f_one_b
from jaxpipe.planning.simulator import lower_bound, simulate
from jaxpipe.planning.stages import costs_of_stages

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "octopipe_published.json").read_text())
SMALL = {  # key, hidden size, vocabulary, layers, devices, of the smallest size
    "Gemma": ("GEMMA", "1536", "256000", 32, 4),
    "DeepSeek": ("DEEPSEEK", "2048", "131072", 16, 4),
    "Nemotron-H": ("NEMOTRONH", "1024", "131072", 28, 4),
}
FIRST_KIND = {"Gemma": lambda n: True, "DeepSeek": lambda n: n < 1, "Nemotron-H": lambda n: (n + 1) % 3 == 0}


def published_costs(model, length):
    """Costs of the smallest size of a model of the paper: a free embedding, layers of two kinds, a head."""
    key, hidden, vocabulary, layers, devices = SMALL[model]
    ratios = PUBLISHED["profiled_cost_ratios"][key][hidden][str(length)][vocabulary]
    pieces = [PieceCost("embed", "embed", 0, 0, 0)]
    for n in range(layers):
        kind = 0 if FIRST_KIND[model](n) else 3
        pieces.append(PieceCost(f"layer_{n}", "layer", *ratios[kind : kind + 3]))
    pieces.append(PieceCost("head", "head", *ratios[6:]))
    return CostTable("unit", tuple(pieces)), devices


def layers(*times, **table):
    return CostTable("unit", tuple(PieceCost(f"l{i}", "k", *t) for i, t in enumerate(times)), **table)


@st.composite
def problems(draw):
    """Small tables with memory and messages, devices and micro-batches."""
    numbers = st.integers(0, 9)
    pieces = tuple(
        PieceCost(f"l{i}", "k", *(draw(numbers) for _ in range(7))) for i in range(draw(st.integers(2, 8)))
    )
    link = Link(draw(st.integers(0, 2)), draw(st.sampled_from([1, 2, float("inf")])))
    costs = CostTable("unit", pieces, link, state_factor=draw(st.integers(0, 2)))
    return costs, draw(st.integers(1, min(4, len(pieces)))), draw(st.integers(1, 6))


def starts(costs, devices, microbatches):
    problem = Problem(costs, devices, microbatches)
    for each in range(1, (len(layer_starts(costs.pieces)) - 1) // devices + 1):
        homes = tuple(range(devices)) * each
        yield evaluate(problem, even_layers(costs.pieces, each * devices), homes, POLICIES[0])


@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("model", SMALL)
def test_published_cells(model, length):
    """On the smallest sizes the tuner gains at least what the paper measured over 1F1B."""
    costs, devices = published_costs(model, length)
    microbatches = 4 * devices
    plan = octopipe(costs, devices, microbatches)
    check(plan)
    time = simulate(plan, costs).makespan
    assert lower_bound(costs, devices, microbatches) <= time
    assert time <= min(start.makespan for start in starts(costs, devices, microbatches)) * (1 + 1e-9)
    measured = PUBLISHED["h200_data"][model][f"Seq_{length // 1024}k"]["Small"]
    usual = simulate(named_plan("s_1f1b", costs, devices, microbatches), costs).makespan
    assert usual / time > measured["OctoPipe"] / measured["S-1F1B"]
    assert octopipe(costs, devices, microbatches) == plan


@settings(max_examples=60, deadline=None)
@given(problems(), st.floats(0.1, 1))
def test_plans_keep_the_limit_and_are_no_slower_than_their_starts(problem, part):
    costs, devices, microbatches = problem
    free = simulate(octopipe(*problem), costs)
    for start in starts(*problem):
        assert free.makespan <= start.makespan * (1 + 1e-9)
    usual = simulate(named_plan("s_1f1b", *problem), costs)
    assert free.makespan <= usual.makespan * (1 + 1e-9)
    limit = max(1, int(part * max(free.peak_bytes)))
    tight = replace(costs, memory_limit_bytes=limit)
    try:
        plan = octopipe(tight, devices, microbatches)
    except ValueError as error:
        line = r"no plan .* tried fits: device \d+ needs at least (\d+) bytes; the limit is (\d+) bytes"
        needed, allowed = map(int, re.fullmatch(line, str(error)).groups())
        assert (allowed, needed > limit) == (limit, True)
        assert max(usual.peak_bytes) > limit
    else:
        check(plan)
        simulation = simulate(plan, tight)
        assert max(simulation.peak_bytes) <= limit
        if max(usual.peak_bytes) <= limit:
            assert simulation.makespan <= usual.makespan * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(POLICIES), st.integers(0, 20), st.data())
def test_dispatch_is_simulated_as_it_is_and_fits_wherever_a_microbatch_does(problem, policy, spare, data):
    costs, devices, microbatches = problem
    stages = data.draw(st.integers(1, len(costs.pieces)))
    bounds = even_layers(costs.pieces, stages)
    homes = tuple(data.draw(st.integers(0, devices - 1)) for _ in range(stages))
    costed = costs_of_stages(costs, bounds, ("none",) * len(costs.pieces))
    state = np.bincount(homes, [stage.state_bytes for stage in costed], devices)
    least = int((state + one_microbatch(costed, homes, devices, policy)).max())
    costs = replace(costs, memory_limit_bytes=least + spare)
    found = evaluate(Problem(costs, devices, microbatches), bounds, homes, policy)
    assert found.over == 0
    plan = replace(
        named_plan("s_1f1b", costs, devices, microbatches),
        stage_bounds=bounds,
        stage_to_device=homes,
        schedule=schedule(found.rows),
    )
    check(plan)
    simulation = simulate(plan, costs)
    assert simulation.makespan == found.makespan
    assert simulation.peak_bytes == pytest.approx(tuple(found.needed_D))
    idle, boundary = idle_time(found)
    for device, row in enumerate(simulation.events):
        ends = row[0].start + found.makespan - row[-1].end if row else found.makespan
        assert boundary[device] == pytest.approx(ends)
        assert idle[device] == pytest.approx(found.makespan - simulation.busy[device])


def test_by_hand():
    """Three layers, F, I and W of 1 each, on two devices: 2 and 1, in the time of the four layers' work, 12.

    Device 0: both F 0-4; the gradients come at 4 and 6; both I 4-8, both W 8-12. Device 1: F 2-3, I 3-4,
    F 4-5, I 5-6, both W 6-8. S-1F1B takes 13, since its device 1 runs W before the first gradient goes, at 5.
    """
    costs = layers(*[(1, 1, 1)] * 3)
    plan = octopipe(costs, 2, 2)
    assert (plan.stage_bounds, plan.stage_to_device) == ((0, 2, 3), (0, 1))
    assert [" ".join(map(str, row)) for row in plan.schedule] == [
        "0F0 0F1 0I0 0I1 0W0 0W1",
        "1F0 1I0 1F1 1I1 1W0 1W1",
    ]
    assert simulate(plan, costs).makespan == 12
    assert simulate(named_plan("s_1f1b", costs, 2, 2), costs).makespan == 13


def test_bottleneck_and_partition_by_hand():
    """Six layers of 3 and a head of 6, cut into 9 and 15: device 1 idles less by 6 a micro-batch."""
    costs = CostTable("unit", (*layers(*[(1, 1, 1)] * 6).pieces, PieceCost("head", "head", 2, 2, 2)))
    problem = Problem(costs, 2, 4)
    state = evaluate(problem, (0, 3, 7), (0, 1), POLICIES[0])
    assert np.ptp(idle_time(state)[0]) == 4 * 6
    assert tuner.bottleneck(problem, state) == "partition"
    assert [other.bounds for other in tuner.partitions(problem, state)] == [(0, 4, 7), (0, 2, 7)]
    level = evaluate(problem, (0, 4, 7), (0, 1), POLICIES[0])
    assert np.ptp(idle_time(level)[0]) == 0
    # Device 1 idles while the first F runs on device 0, 4, and at the end; in between both are busy.
    assert tuner.bottleneck(problem, level) == "placement"
    tuned = tuner.tune(problem, state)
    assert (tuned.bounds, tuned.homes) == ((0, 4, 7), (0, 1))
    assert tuned.makespan <= level.makespan


def test_a_stage_goes_where_least_is_done():
    """Loads of 6, 1, 1 and 2 in turn make 7 and 3; 6 and 4 is best, by moving the 1 that stands by the 6."""
    costs = layers((2, 2, 2), (1, 0, 0), (1, 0, 0), (2, 0, 0))
    problem = Problem(costs, 2, 4)
    state = evaluate(problem, (0, 1, 2, 3, 4), (0, 1, 0, 1), POLICIES[0])
    first = next(tuner.placements(problem, state))
    assert first.homes == (0, 1, 1, 1)
    every = [other.homes for other in tuner.placements(problem, state)]
    assert len(set(every)) == len(every) == 4 + 4  # swaps of each stage on one with each on the other; moves
    assert all(set(homes) == {0, 1} for homes in every)


def test_edits_advance_an_action_into_idle_time():
    """1F1B whose device 0 waits for a slow stage 1: its next F may go before the B that it waits for."""
    costs = layers((1, 1, 0), (4, 4, 0))
    state = evaluate(Problem(costs, 2, 4), (0, 1, 2), (0, 1), POLICIES[-1], encode(one_f_one_b(2, 4)))
    assert [str(action) for action in schedule(state.rows)[0]] == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3".split()
    rows = [" ".join(map(str, schedule(edit)[0])) for edit in tuner._edits(state)]
    assert "0F0 0F1 0F2 0B0 0B1 0F3 0B2 0B3" in rows


def test_costs_of_nothing_and_a_single_device():
    assert simulate(octopipe(layers(*[(0, 0, 0)] * 4), 2, 3), layers(*[(0, 0, 0)] * 4)).makespan == 0
    costs = layers((1, 2, 3), (3, 2, 1))
    assert simulate(octopipe(costs, 1, 5), costs).makespan == 5 * 12


def test_what_fits_nowhere_gets_one_line():
    """By hand: two layers with 10 bytes of state and 5 of stash, one a device, with one micro-batch each."""
    pieces = tuple(
        PieceCost(f"l{i}", "k", 1, 1, 1, param_bytes=10, stash_bytes=5, grad_stash_bytes=5) for i in range(2)
    )
    costs = CostTable("unit", pieces, memory_limit_bytes=15)
    assert simulate(octopipe(costs, 2, 4), costs).peak_bytes == (15, 15)
    line = "no plan that octopipe tried fits: device 0 needs at least 15 bytes; the limit is 14 bytes"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        octopipe(replace(costs, memory_limit_bytes=14), 2, 4)
    with pytest.raises(ValueError, match="2 layers cannot fill 3 devices"):
        octopipe(costs, 3, 4)
