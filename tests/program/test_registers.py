from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.program.arrange import arrange
from jaxpipe.program.instructions import expand, token_class
from jaxpipe.program.program import bucket
from jaxpipe.program.registers import allocate
from jaxpipe.program.ticks import place
from tests.program.toys import named_plan, random_program, toy_specs


def most_alive(rows, timetable, specs) -> dict[str, int]:
    """Class -> most tokens alive at once on any device, by walking through what each device does."""
    most = Counter()
    for d, row in enumerate(rows):
        actions = dict(zip(timetable.ticks[d], row))
        events = []  # (tokens read, tokens written), in order
        for tick in range(timetable.length):
            sent = [m.token for m in timetable.messages if (m.source, m.tick) == (d, tick)]
            here = [m for m in timetable.messages if (m.source + m.channel.offset, m.tick) == (d, tick)]
            events.append((sent, []))
            events += [(x.inputs, x.outputs) for x in actions.get(tick, ())]
            events.append(([], [m.token for m in here]))
        last = {t: n for n, (read, _) in enumerate(events) for t in read}
        alive = set()
        for n, (_, written) in enumerate(events):
            alive = {t for t in alive if last[t] > n} | set(written)
            for name, count in Counter(token_class(specs, t) for t in alive).items():
                most[name] = max(most[name], count)
            alive -= {t for t in written if t not in last}
    return dict(most)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1).map(Random))
def test_counts_are_the_most_tokens_alive_at_once(random):
    plan, specs, program = random_program(random)
    rows = expand(plan, specs)
    timetable = place(plan, rows, specs)
    soonest = allocate(rows, timetable, specs).counts
    assert soonest == most_alive(rows, timetable, specs)
    arranged, allocation = arrange(plan, specs)
    assert allocation.counts == most_alive(arranged.rows, arranged.timetable, specs)
    assert allocation.counts == {n: min(c, soonest[n]) for n, c in allocation.counts.items()}  # no more
    rounded = {name: bucket(count, 8) for name, count in allocation.counts.items()}
    assert dict(program.signature.registers) == rounded


def test_1f1b_holds_fewer_microbatches_than_gpipe():
    """Device d of P keeps P - d micro-batches (arXiv 2104.04473, section 2.2.1), with GPipe all 12."""
    specs = toy_specs(["embed"] + ["block"] * 6 + ["head"], ["residuals"] * 8)
    blocks_by_device = (1, 2, 2, 1)
    in_flight = {"1f1b": (4, 3, 2, 1), "gpipe": (12, 12, 12, 12)}
    for name, microbatches in in_flight.items():
        plan = named_plan(specs, name, 4, 12)
        rows = expand(plan, specs)
        counts = allocate(rows, place(plan, rows, specs), specs).counts
        held = max(b * m for b, m in zip(blocks_by_device, microbatches))
        assert counts["block/residuals/residuals"] == held, name
