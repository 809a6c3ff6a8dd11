import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.plan import Plan, check
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.planning.simulator import lower_bound, simulate

DATA = Path(__file__).parent.parent / "data"
EXPECTED = {row["file"]: row for row in json.loads((DATA / "torch" / "expected.json").read_text())}
READABLE = [name for name in EXPECTED if not name.startswith("dualpipe")]


FREE = Link()


def table(times, link=FREE, unit="unit"):
    """One piece for each (F, I, W)."""
    return CostTable(unit, tuple(PieceCost(f"p{i}", "k", *t) for i, t in enumerate(times)), link)


def plan_of(schedule, name="p"):
    """The plan of a schedule with one piece a stage; each stage is where its actions stand."""
    home = {action.stage: device for device, row in enumerate(schedule) for action in row}
    stages, microbatches = len(home), 1 + max(action.microbatch for row in schedule for action in row)
    pieces = tuple(f"p{i}" for i in range(stages))
    devices = tuple(home[stage] for stage in range(stages))
    none = ("none",) * stages
    return Plan(name, len(schedule), microbatches, pieces, tuple(range(stages + 1)), devices, none, schedule)


def rows(*texts):
    return plan_of(read_csv("\n".join(text.replace(" ", ",") for text in texts)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 2), (4, 8), (4, 3), (8, 1), (5, 17)])
def test_equal_stages_have_the_closed_form(name, p, m):
    forward, backward = 3, 5
    simulation = simulate(make_plan(table([(forward, 3, 2)] * p), p, m, name), table([(forward, 3, 2)] * p))
    assert simulation.makespan == (m + p - 1) * (forward + backward)
    assert simulation.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert simulation.busy == (m * (forward + backward),) * p
    in_flight = [m if name == "gpipe" else min(p - i, m) for i in range(p)]
    assert list(simulation.peak_in_flight) == in_flight


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 16), (8, 11)])
def test_apart_i_and_w_shorten_the_bubble_as_published(p, m):
    """arXiv 2401.10241: ZB-H1 has a bubble of (p - 1)(F + I - W) at the peak memory of 1F1B; with W right
    after I, each gradient waits only for the I of the stages after it."""
    costs, work = table([(3, 3, 2)] * p), m * 8
    split, h1 = (simulate(make_plan(costs, p, m, name), costs) for name in ("1f1b_split", "zb_h1"))
    assert split.makespan == work + (p - 1) * (3 + 3)
    assert split.peak_in_flight == tuple(range(p, 0, -1))
    assert h1.makespan == work + (p - 1) * (3 + 3 - 2)
    assert max(h1.peak_in_flight) == p


def test_internal_bubble_leaves_out_the_ends():
    costs = table([(1, 1, 1)] * 3)
    simulation = simulate(make_plan(costs, 3, 3), costs)
    # Device s starts s forwards (1 each) after time 0 and ends s backwards (2 each) before the end.
    assert simulation.makespan == 15
    assert simulation.internal_idle == (15 - 9, 12 - 9, 9 - 9)
    assert simulation.internal_bubble == pytest.approx(9 / (3 * simulation.makespan))


@pytest.mark.parametrize("name", READABLE)
def test_pytorch_schedules(name):
    expected = EXPECTED[name]
    plan = plan_of(read_csv((DATA / "torch" / name).read_text()))
    check(plan)
    simulation = simulate(plan, table([(1, 1, 1)] * plan.stages))
    assert simulation.makespan == expected["unit_cost_makespan"]
    assert simulation.busy == (expected["ideal_busy"],) * plan.devices
    assert simulation.bubble_fraction == pytest.approx(expected["bubble_fraction"], abs=1e-6)
    assert list(simulation.peak_in_flight) == expected["peak_inflight_chunk_activations"]


@pytest.mark.parametrize(
    ("name", "makespan", "in_flight"),
    [
        ("pytorch_zb1p_2rank_2stagep_compute.csv", 49, (4, 4)),
        ("torchtitan_custom_schedule.csv", 50, (16, 16)),
    ],
)
def test_two_devices_with_two_stages_each(name, makespan, in_flight):
    plan = plan_of(read_csv((DATA / name).read_text()))
    check(plan)
    simulation = simulate(plan, table([(1, 1, 1)] * 4))
    assert simulation.makespan == makespan
    assert simulation.busy == (48, 48)
    assert simulation.peak_in_flight == in_flight


def relaxed_end(plan, times, latency):
    """Naive reference: raise the end of every action until all constraints hold."""
    place = {action: device for device, row in enumerate(plan.schedule) for action in row}
    duration = {
        a: {"F": f, "I": i, "W": w, "B": i + w}[a.phase] for a in place for f, i, w in [times[a.stage]]
    }
    before = {action: [] for action in place}
    for row in plan.schedule:
        for first, second in pairwise(row):
            before[second].append((first, 0))
    for action, device in place.items():
        for other, source in place.items():
            gap = 0 if device == source else latency
            if other.microbatch != action.microbatch:
                continue
            step = other.stage - action.stage
            if (
                (action.phase == "F" and other.phase == "F" and step == -1)
                or (action.phase in "IB" and other.phase == "F" and step == 0)
                or (action.phase in "IB" and other.phase in "IB" and step == 1)
                or (action.phase == "W" and other.phase == "I" and step == 0)
            ):
                before[action].append((other, gap))
    end = dict(duration)
    for _ in range(len(place)):
        old = dict(end)
        for action, needs in before.items():
            start = max((end[other] + gap for other, gap in needs), default=0)
            end[action] = start + duration[action]
        if end == old:
            return end
    raise AssertionError("no fixed point")


SOURCES = {
    "gpipe": SCHEDULES["gpipe"](3, 4),
    "1f1b": SCHEDULES["1f1b"](4, 5),
    "zb1p": read_csv((DATA / "pytorch_zb1p_2rank_2stagep_compute.csv").read_text()),
    "zbv": read_csv((DATA / "torch" / "zbvzerobubble_p4_v2_m8.csv").read_text()),
}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_times_equal_a_naive_relaxation(data):
    plan = plan_of(SOURCES[data.draw(st.sampled_from(sorted(SOURCES)))])
    times = [data.draw(st.tuples(*[st.integers(0, 9)] * 3)) for _ in range(plan.stages)]
    latency = data.draw(st.integers(0, 5))
    simulation = simulate(plan, table(times, Link(latency)))
    end = {event.action: event.end for row in simulation.events for event in row}
    assert end == relaxed_end(plan, times, latency)
    assert [[event.action for event in row] for row in simulation.events] == [list(r) for r in plan.schedule]
    costs = table(times)
    assert simulation.makespan >= lower_bound(costs, plan.devices, plan.microbatches)


def test_messages_take_the_bytes_of_the_last_piece_of_a_stage_both_ways():
    pieces = (
        PieceCost("a", "k", 1, 1, 1, output_bytes=1000),
        PieceCost("b", "k", 1, 1, 1, output_bytes=20),
        PieceCost("c", "k", 1, 1, 1, output_bytes=1000),
    )
    plan = replace(rows("0F0 0B0", "1F0 1B0"), pieces=("a", "b", "c"), stage_bounds=(0, 2, 3))
    plan = replace(plan, recompute=("none",) * 3)
    first, second = simulate(plan, CostTable("unit", pieces, Link(3, 10))).events
    # F 0-2, message 3 + 20 / 10 = 5, F 7-8, B 8-10, message 5, B 15-19.
    assert [(e.start, e.end) for e in first] == [(0, 2), (15, 19)]
    assert [(e.start, e.end) for e in second] == [(7, 8), (8, 10)]


def test_stages_of_one_device_exchange_values_without_a_message():
    plan = rows("0F0 1F0 1B0 0B0")
    assert simulate(plan, table([(1, 1, 1)] * 2, Link(latency=100))).makespan == 6


def test_a_last_stage_whose_forward_takes_no_time():
    costs = table([(1, 1, 1), (0, 2, 1)])
    simulation = simulate(make_plan(costs, 2, 3), costs)
    assert simulation.peak_in_flight == (2, 1)
    # Device 1 works from 1 on: 3 x 3, and the last backward of device 0 follows.
    assert simulation.makespan == 1 + 3 * 3 + 2
    nothing = table([(0, 0, 0)] * 2)
    assert simulate(make_plan(nothing, 2, 2), nothing).bubble_fraction == 0.0


def test_a_device_without_actions_is_idle():
    plan = replace(rows("0F0 0B0"), devices=2, schedule=(*rows("0F0 0B0").schedule, ()))
    simulation = simulate(plan, table([(1, 1, 1)]))
    assert simulation.busy == (3, 0)
    assert (simulation.internal_idle, simulation.internal_bubble) == ((0, 0), 0)
    assert simulation.bubble_fraction == 0.5


def test_deadlock_names_every_blocked_device():
    plan = rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1")
    with pytest.raises(ValueError) as error:
        simulate(plan, table([(1, 1, 1)] * 3))
    assert str(error.value) == (
        "the schedule of plan 'p' deadlocks: device 0 stops at 0B0, which waits for 1B0 of device 1; "
        "device 1 stops at 1F1, which waits for 0F1 of device 0; "
        "device 2 stops at 2F1, which waits for 1F1 of device 1"
    )


def test_deadlock_names_what_nobody_makes():
    with pytest.raises(ValueError, match="device 1 stops at 1F0, which waits for 0F0, which no device runs"):
        simulate(rows("0F1 0B1", "1F0 1B0 1F1 1B1"), table([(1, 1, 1)] * 2))


def test_what_a_stage_keeps_does_not_travel():
    plan = rows("0F0 0I0", "0W0")
    with pytest.raises(ValueError, match="0W0 stands on device 1 but reads what 0I0 left on device 0"):
        simulate(plan, table([(1, 1, 1)]))
    with pytest.raises(ValueError, match="device 0 runs 0B0 after 0I0 of device 0 has run"):
        simulate(rows("0F0 0I0 0B0"), table([(1, 1, 1)]))


def test_lower_bound():
    costs = table([(1, 1, 1), (2, 3, 4), (1, 1, 2)])
    assert lower_bound(costs, 1, 10) == 160
    assert lower_bound(costs, 4, 10) == 90


def test_attention_that_may_run_anywhere_does_not_bound():
    """One long core: HelixPipe spreads its micro-batches, and takes less than all of them on one device."""
    kinds = [("embed", 1), ("attention_pre", 1), ("attention_core", 20), ("attention_post", 1), ("head", 1)]
    pieces = tuple(PieceCost(kind, kind, time, time, 0) for kind, time in kinds)
    costs = CostTable("unit", pieces)
    assert lower_bound(costs, 2, 4) == 4 * 48 / 2
    found = simulate(named_plan("helix_naive", costs, 2, 4), costs).makespan
    assert 4 * 48 / 2 <= found < 4 * 40
    held = CostTable("unit", tuple(replace(p, param_bytes=1) for p in pieces))
    assert lower_bound(held, 2, 4) == 4 * 40


TWO = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"  # 1F1B


def test_buffered_sends_by_hand():
    simulation = simulate(rows(*TWO), table([(1, 1, 1)] * 2, Link(latency=1)))
    # 1F1 would be there at 3; 1B0, made at 5, and 1B1, made at 8, arrive a unit later.
    assert [(e.start, e.end) for e in simulation.events[0]] == [(0, 1), (1, 2), (6, 8), (9, 11)]
    assert [(e.start, e.end) for e in simulation.events[1]] == [(2, 3), (3, 5), (5, 6), (6, 8)]
    # Device 0 waits a unit for either gradient. Device 1 waits for 0F0, but computes while 0F1 travels.
    assert simulation.terms == ((6, 2, 0, 3), (6, 2, 1, 4))


def test_rendezvous_sends_by_hand():
    simulation = simulate(rows(*TWO), table([(1, 1, 1)] * 2, Link(latency=1)), "rendezvous")
    # 0F0 is received from 1 to 2. 0F1 ends at 3, but device 1 takes it after 1B0, from 5 to 6, while it sends
    # the gradient of 1B0 to device 0; 1B1 ends at 9.
    assert [(e.start, e.end) for e in simulation.events[0]] == [(0, 1), (2, 3), (6, 8), (10, 12)]
    assert [(e.start, e.end) for e in simulation.events[1]] == [(2, 3), (3, 5), (6, 7), (7, 9)]
    assert simulation.terms == ((6, 2, 0, 4), (6, 2, 0, 4))


def test_rendezvous_without_receiver_in_time_deadlocks():
    plan, costs = rows("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0"), table([(1, 1, 1)] * 2)
    assert simulate(plan, costs).makespan == 12
    with pytest.raises(ValueError) as error:
        simulate(plan, costs, "rendezvous")
    assert str(error.value) == (
        "the schedule of plan 'p' deadlocks: "
        "device 0 stops at 0F1, which waits for 0F0 to be received by device 1, as 1F0 after 1B1; "
        "device 1 stops at 1F1, which waits for 0F1 of device 0"
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_rendezvous_costs_nothing_where_devices_meet_at_every_step(name):
    costs = table([(1, 1, 1)] * 4)
    plan = make_plan(costs, 4, 8, name)
    assert simulate(plan, costs, "rendezvous").makespan == simulate(plan, costs).makespan == 3 * (8 + 4 - 1)


def test_rendezvous_makes_zb_h1_wait():
    """The neighbour posts its receive only after the W that ZB-H1 puts between."""
    costs = table([(1, 1, 1)] * 4)
    plan = make_plan(costs, 4, 8, "zb_h1")
    assert simulate(plan, costs, "rendezvous").makespan > simulate(plan, costs).makespan


def test_unknown_words_get_the_known_ones():
    plan, costs = rows("0F0 0B0"), table([(1, 1, 1)])
    with pytest.raises(ValueError, match="unknown way of sending 'x'; known: buffered, rendezvous"):
        simulate(plan, costs, "x")
    with pytest.raises(ValueError, match="unknown memory model 'x'; known: ideal, padded"):
        simulate(plan, costs, memory_model="x")


def test_deadlock_names_values_that_nobody_makes_by_what_would_make_them():
    costs = table([(1, 1, 1)] * 2)
    with pytest.raises(ValueError, match="device 0 stops at 0B0, which waits for 1B0, which no device runs"):
        simulate(rows("0F0 0B0", "1F0"), costs)
    with pytest.raises(ValueError, match="device 0 stops at 0B0, which waits for 0F0, which no device runs"):
        simulate(rows("0B0"), table([(1, 1, 1)]))
    with pytest.raises(ValueError, match="device 0 stops at 0W0, which waits for 0B0, which no device runs"):
        simulate(rows("0F0 0W0"), table([(1, 1, 1)]))
