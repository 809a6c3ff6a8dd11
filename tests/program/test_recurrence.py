from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.planning.plan import Action, Event
from jaxpipe.program.recurrence import durations_by_tick, finish_times, makespan, tick_events, ties
from jaxpipe.program.ticks import Channel, Timetable

RIGHT, LEFT = Channel("wide", 1), Channel("wide", -1)


def longest_path(durations, patterns, pattern) -> list[list[float]]:
    """done by its definition, one (device, tick) at a time; patterns hold (source, target, time)."""
    known = {}

    def done(d: int, t: int) -> float:
        if t < 0:
            return 0.0
        if (d, t) not in known:
            ends = [done(d, t - 1) + durations[d][t]]
            for source, target, time in patterns[pattern[t]]:
                if d in (source, target):
                    ends.append(max(done(source, t - 1), done(target, t - 1)) + time)
            known[d, t] = max(ends)
        return known[d, t]

    return [[done(d, t) for t in range(len(pattern))] for d in range(len(durations))]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1).map(Random))
def test_equals_the_definition(random):
    devices, ticks = random.randint(1, 4), random.randint(0, 8)
    durations = [[random.choice([0, 0, 1, 2, 3.5]) for _ in range(ticks)] for _ in range(devices)]
    channels = [Channel("wide", offset) for offset in (1, -1, 2)]
    times = [random.choice([0, 0.5, 4]) for _ in channels]
    valid = [(c, d) for c, x in enumerate(channels) for d in range(devices) if 0 <= d + x.offset < devices]
    chosen = [{pair for pair in valid if random.random() < 0.5} for _ in range(3)]
    patterns = [[(d, d + channels[c].offset, times[c]) for c, d in pairs] for pairs in chosen]
    pattern = [random.randrange(3) for _ in range(ticks)]
    tied = [ties(frozenset(pairs), channels, times) for pairs in chosen]
    found = finish_times(np.array(durations, float).reshape(devices, ticks), tied, pattern)
    assert found.tolist() == longest_path(durations, patterns, pattern)


def test_three_ticks_by_hand():
    """The receiver waits for the message, the sender too; without a permute nobody waits."""
    tied = [ties(frozenset(), [RIGHT], [0.5]), ties(frozenset({(0, 0)}), [RIGHT], [0.5])]
    done = finish_times(np.array([[1.0, 2, 0], [0, 1, 3]]), tied, [1, 0, 1])
    # Tick 2 starts at 3 and 1.5: the message arrives at 3.5, after device 0 and before device 1 is done.
    assert done.tolist() == [[1, 3, 3.5], [0.5, 1.5, 4.5]]
    assert makespan(done) == 4.5


def test_idle_devices_hold_up_those_they_are_tied_to():
    """Device 1 computes for 5 in tick 0; device 0, which idles, may enter tick 1 but not leave it before."""
    durations = np.array([[0.0, 0, 1], [5, 0, 0]])
    both = frozenset({(0, 0), (1, 1)})
    tied = finish_times(durations, [ties(both, [RIGHT, LEFT], [0, 0])], [0, 0, 0])
    free = finish_times(durations, [ties(frozenset(), [RIGHT, LEFT], [0, 0])], [0, 0, 0])
    assert tied[0].tolist() == [0, 5, 6]
    assert free[0].tolist() == [0, 0, 1]


def test_events_of_several_actions_in_a_tick_follow_each_other():
    f, w, b = (Action.parse(text) for text in ("0F1", "0W0", "1B0"))
    timetable = Timetable([[1], [0, 2]], [], 3)
    work = [[[(w, 0.25), (f, 1.0)]], [[(b, 2.0)], [(b, 1.0)]]]
    assert durations_by_tick(timetable, work).tolist() == [[0, 1.25, 0], [2, 0, 1]]
    done = np.array([[0.5, 2.0, 2.0], [2.0, 2.0, 3.0]])
    assert tick_events(timetable, work, done) == (
        (Event(0, w, 0.5, 0.75), Event(0, f, 0.75, 1.75)),
        (Event(1, b, 0.0, 2.0), Event(1, b, 2.0, 3.0)),
    )


def test_a_program_without_ticks_takes_no_time():
    assert makespan(finish_times(np.zeros((2, 0)), [], [])) == pytest.approx(0)
