from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.engine import NEVER, SENDS, connect, encode, run
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.plan import PHASES, Action, Plan
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.planning.simulator import simulate


def needs(action, stages):
    """What an action reads, each as the set of actions that may make it."""
    s, phase, m = action
    if phase == "F":
        return [{Action(s - 1, "F", m)}] if s else []
    if phase == "W":
        return [{Action(s, "I", m)}]
    gradient = [{Action(s + 1, "I", m), Action(s + 1, "B", m)}] if s + 1 < stages else []
    return [{Action(s, "F", m)}, *gradient]


def longest_paths(schedule, times, message, sends):
    """Slow reference: start and end of every action and message; CycleError when the schedule deadlocks.

    A message is a node (from, to). times: (F, I, W) by stage; message: time over each boundary of stages.
    """
    place = {action: device for device, row in enumerate(schedule) for action in row}
    before = {b: a for row in schedule for a, b in pairwise(row)}
    graph, duration = {}, {}
    for action in place:
        graph[action] = {before[action]} if action in before else set()
        f, i, w = times[action.stage]
        duration[action] = {"F": f, "I": i, "W": w, "B": i + w}[action.phase]
    for action, device in place.items():
        for makers in needs(action, len(times)):
            (made,) = makers & set(place)
            if place[made] == device:
                graph[action].add(made)
                continue
            node = (made, action)
            graph[node] = {made}
            graph[action].add(node)
            duration[node] = message[min(made.stage, action.stage)]
            if sends == "rendezvous":
                if action in before:
                    graph[node].add(before[action])
                for after, sender in before.items():
                    if sender == made:
                        graph[after].add(node)
    start, end = {}, {}
    for node in TopologicalSorter(graph).static_order():
        start[node] = max((end[other] for other in graph[node]), default=0)
        end[node] = start[node] + duration[node]
    return start, end


@st.composite
def cases(draw):
    """(schedule, times, message, plan, costs): any placement, one device a (stage, micro-batch), I and W
    apart or not; rows in any order that dependencies allow, or shuffled further so that many deadlock."""
    stages, devices, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    pairs = [(s, m) for s in range(stages) for m in range(microbatches)]
    moving = draw(st.booleans())
    homes = draw(st.lists(st.integers(0, devices - 1), min_size=len(pairs), max_size=len(pairs)))
    home = {pair: homes[pairs.index(pair) if moving else pair[0]] for pair in pairs}
    left = [Action(s, "F", m) for s, m in pairs]
    for s, m in pairs:
        left += [Action(s, p, m) for p in draw(st.sampled_from(["B", "IW"]))]
    rows, done = [[] for _ in range(devices)], set()
    random = draw(st.randoms(use_true_random=False))
    while left:
        ready = [a for a in left if all(makers & done for makers in needs(a, stages))]
        action = random.choice(ready)
        left.remove(action)
        done.add(action)
        rows[home[action.stage, action.microbatch]].append(action)
    if draw(st.booleans()):
        row = random.choice(rows)
        if len(row) > 1:
            at = random.randrange(len(row) - 1)
            row[at], row[at + 1] = row[at + 1], row[at]
    schedule = tuple(map(tuple, rows))
    times = [draw(st.tuples(*[st.integers(0, 9)] * 3)) for _ in range(stages)]
    size, latency = [draw(st.integers(0, 5)) for _ in range(stages)], draw(st.integers(0, 3))
    names = tuple(f"p{i}" for i in range(stages))
    pieces = tuple(PieceCost(n, "k", *t, output_bytes=10 * b) for n, t, b in zip(names, times, size))
    costs = CostTable("unit", pieces, Link(latency, 10))
    plan = Plan(
        "p", devices, microbatches, names, tuple(range(stages + 1)), tuple(home[s, 0] for s in range(stages)),
        ("none",) * stages, schedule,
    )  # fmt: skip
    return schedule, times, [latency + b for b in size], plan, costs


@pytest.mark.parametrize("sends", SENDS)
@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_times_are_those_of_longest_paths(case, sends):
    schedule, times, message, plan, costs = case
    try:
        start, end = longest_paths(schedule, times, message, sends)
    except CycleError:
        with pytest.raises(ValueError, match="deadlocks: device"):
            simulate(plan, costs, sends)
        return
    simulation = simulate(plan, costs, sends)
    found = {event.action: (event.start, event.end) for row in simulation.events for event in row}
    assert found == {a: (start[a], end[a]) for row in schedule for a in row}


@pytest.mark.parametrize("sends", SENDS)
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_terms_are_what_each_unit_of_time_is_spent_on(case, sends):
    schedule, times, message, plan, costs = case
    try:
        start, end = longest_paths(schedule, times, message, sends)
    except CycleError:
        return
    makespan = max(end.values())
    arriving = {node[1]: node for node in end if not isinstance(node, Action)}
    for row, terms in zip(schedule, simulate(plan, costs, sends).terms):
        spent = Counter()
        for now in range(makespan):
            following = [a for a in row if end[a] > now]
            if following and start[following[0]] <= now:
                spent["compute"] += 1
            elif following and (node := arriving.get(following[0])) and start[node] <= now < end[node]:
                spent["waiting"] += 1
            else:
                spent["bubble"] += 1
        communication = sum(end[arriving[a]] - start[arriving[a]] for a in row if a in arriving)
        assert terms == (
            spent["compute"],
            communication,
            communication - spent["waiting"],
            spent["bubble"],
        )
        assert terms.compute + terms.communication + terms.bubble - terms.overlap == makespan


def test_the_reference_by_hand():
    schedule = read_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n")
    times, message = [(1, 1, 1)] * 2, [0, 0]
    assert longest_paths(schedule, times, message, "buffered")[1][Action(0, "B", 1)] == 12
    with pytest.raises(CycleError):
        longest_paths(schedule, times, message, "rendezvous")


def unit_costs(stages, latency=0.0):
    durations = np.array([[1.0, 1.0, 1.0, 2.0]] * stages)
    return durations, np.array([latency] * (stages - 1) + [0.0])


def test_links_serve_several_costs():
    rows = encode(SCHEDULES["1f1b"](3, 6))
    links = connect(rows, 3, 6)
    for factor in (1, 5):
        durations, messages = unit_costs(3)
        _, end = run(rows, links, factor * durations, messages)
        assert end.max() == factor * 3 * (6 + 3 - 1)


def test_rows_name_their_actions():
    schedule = read_csv("0F0,0B0\n\n1F0,1I0,1W0\n")
    rows = encode(schedule)
    assert [rows.where(a) for a in range(5)] == rows.device().tolist() == [0, 0, 2, 2, 2]
    assert [rows.action(a) for a in range(5)] == [a for row in schedule for a in row]
    assert [PHASES[p] for p in rows.phase] == list("FBFIW")


def test_what_never_runs_has_no_end():
    rows = encode(read_csv("0F0,0B0\n1B0,1F0\n"))
    _, end = run(rows, connect(rows, 2, 1), *unit_costs(2))
    assert end.tolist() == [1, NEVER, NEVER, NEVER]


def test_bad_arguments():
    rows = encode(read_csv("0F0,0B0\n1F2,1B2\n"))
    with pytest.raises(ValueError, match="unknown way of sending 'posted'; known: buffered, rendezvous"):
        connect(rows, 2, 3, "posted")
    with pytest.raises(ValueError, match="action 1F2 on device 1: stages go from 0 to 0"):
        connect(rows, 1, 3)
    with pytest.raises(ValueError, match="action 1F2 on device 1: micro-batches go from 0 to 1"):
        connect(rows, 2, 2)
