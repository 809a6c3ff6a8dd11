from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.planning.plan import Action
from jaxpipe.program.instructions import expand
from jaxpipe.program.ticks import Channel, place
from tests.program.toys import named_plan, random_program, toy_plan, toy_specs


def placed(plan, specs):
    rows = expand(plan, specs)
    return rows, place(plan, rows, specs)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1).map(Random))
def test_actions_run_as_early_as_order_and_messages_allow(random):
    plan, specs, _ = random_program(random)
    rows, timetable = placed(plan, specs)
    arrived = {(m.source + m.channel.offset, m.token): m.tick for m in timetable.messages}
    made = {}
    for d, row in enumerate(rows):
        for tick, action in zip(timetable.ticks[d], row, strict=True):
            made |= {(d, t): tick for x in action for t in x.outputs}
    for m in timetable.messages:  # nothing is sent before the tick after the one that made it
        assert m.tick > made[m.source, m.token]
    for d, row in enumerate(rows):
        earliest = 0
        for tick, action in zip(timetable.ticks[d], row):
            own = {t for x in action for t in x.outputs}
            needs = {t for x in action for t in x.inputs} - own
            ready = [made[d, t] if (d, t) in made else arrived[d, t] for t in needs]
            assert tick == max([earliest, *(r + 1 for r in ready)])
            earliest = tick + 1
    assert timetable.length == 1 + max(max(ticks, default=0) for ticks in timetable.ticks)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1).map(Random))
def test_a_channel_carries_one_message_a_tick_in_the_order_of_making(random):
    plan, specs, _ = random_program(random)
    rows, timetable = placed(plan, specs)
    made = {
        (d, t): tick
        for d, row in enumerate(rows)
        for tick, action in zip(timetable.ticks[d], row)
        for x in action
        for t in x.outputs
    }
    queues = {}
    for m in timetable.messages:
        queues.setdefault((m.source, m.channel), []).append(m)
    for queue in queues.values():
        before = -1
        for m in sorted(queue, key=lambda m: m.tick):
            assert m.tick == max(before, made[m.source, m.token]) + 1
            before = m.tick
        order = [made[m.source, m.token] for m in queue]
        assert order == sorted(order)
    targets = [(m.source + m.channel.offset, m.token) for m in timetable.messages]
    assert len(set(targets)) == len(targets)


def test_1f1b_ticks_by_hand():
    """A value made in tick t is sent in t + 1 and read from t + 2 on."""
    specs = toy_specs(("embed", "block", "block", "head"), ["residuals"] * 4)
    plan = named_plan(specs, "1f1b", 2, 2)  # 0F0 0F1 0B0 0B1 and 1F0 1B0 1F1 1B1
    _, timetable = placed(plan, specs)
    assert timetable.ticks == [[0, 1, 5, 7], [2, 3, 4, 5]]
    sent = [(m.tick, m.source, m.channel, m.token) for m in timetable.messages]
    there, back = Channel("wide", 1), Channel("wide", -1)
    assert sent == [
        (1, 0, there, ("value", 1, "x", 0)),
        (2, 0, there, ("value", 1, "x", 1)),
        (4, 1, back, ("cotangent", 2, "x", 0)),
        (6, 1, back, ("cotangent", 2, "x", 1)),
    ]


def test_a_value_goes_to_every_device_that_reads_it():
    specs = toy_specs(("embed", "pre", "core", "post", "head"), ["residuals"] * 5)
    plan = named_plan(specs, "gpipe", 5, 1)
    _, timetable = placed(plan, specs)
    x = [m.channel.offset for m in timetable.messages if m.token == ("value", 0, "x", 0)]
    assert sorted(x) == [1, 3]


def test_deadlock_says_who_waits_for_what():
    specs = toy_specs(("embed", "block", "block", "head"), ["residuals"] * 4)
    rows = (("0F0", "0B0", "0F1", "0B1"), ("1F1", "1F0", "1B0", "1B1"))
    schedule = tuple(tuple(map(Action.parse, row)) for row in rows)
    plan = toy_plan(specs, (0, 2, 4), (0, 1), 2, 2, schedule)
    message = (
        "the schedule deadlocks: "
        "device 0 waits in 0B0 for the cotangent x of piece '2/block', micro-batch 0; "
        "device 1 waits in 1F1 for the value x of piece '1/block', micro-batch 1"
    )
    with pytest.raises(ValueError) as error:
        placed(plan, specs)
    assert str(error.value) == message
