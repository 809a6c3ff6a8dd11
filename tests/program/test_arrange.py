from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.simulator import simulate
from jaxpipe.program.arrange import arrange
from jaxpipe.program.instructions import expand
from jaxpipe.program.program import lower
from jaxpipe.program.recurrence import durations_by_tick, finish_times, makespan, ties
from jaxpipe.program.ticks import Channel, place
from jaxpipe.program.verify import verify
from tests.program.interpreter import interpret
from tests.program.toys import (
    named_plan,
    random_kinds,
    random_plan,
    random_styles,
    sequential,
    toy_specs,
)

FREE = Link()
RIGHT, LEFT = Channel("wide", 1), Channel("wide", -1)
randoms = st.integers(0, 2**32 - 1).map(Random)


def chain(blocks: int):
    """Embedding, blocks and head."""
    return toy_specs(["embed", *["block"] * blocks, "head"], ["residuals"] * (blocks + 2))


def costs_of(specs, times, link=FREE) -> CostTable:
    """times: (F, I, W) of every piece but the head, which has no F and no W of its own."""
    pieces = [PieceCost(s.name, s.kind, *t) for s, t in zip(specs, times, strict=True)]
    pieces[-1] = replace(pieces[-1], F=0.0, I=pieces[-1].total, W=0.0)
    return CostTable("unit", tuple(pieces), link)


def random_times(random: Random, count: int) -> list[tuple[float, float, float]]:
    return [tuple(random.choice([0.25, 1, 1.5, 4]) for _ in "FIW") for _ in range(count)]


@settings(deadline=None, max_examples=40)
@given(randoms, st.integers(1, 4))
def test_arranged_programs_compute_what_the_model_means(random, patterns):
    kinds = random_kinds(random)
    specs = toy_specs(kinds, random_styles(random, kinds))
    plan = random_plan(random, specs)
    program = lower(plan, specs, costs=costs_of(specs, random_times(random, len(specs))), patterns=patterns)
    assert 1 <= len(program.signature.patterns) <= patterns
    verify(program, specs)
    assert interpret(program, specs) == sequential(specs, plan.microbatches)


@settings(deadline=None, max_examples=60)
@given(randoms, st.integers(1, 3), st.sampled_from([0.0, 0.5]))
def test_never_sooner_than_the_dependencies_allow(random, patterns, latency):
    """In a chain of blocks tokens depend on each other just as the simulator's stages do.

    Not where the head is a stage of its own: its F is nothing, and only the simulator waits for its turn.
    """
    specs = chain(random.randint(1, 5))
    plan = random_plan(random, specs)
    assume(plan.stage_bounds[-2] < len(specs) - 1)
    costs = costs_of(specs, random_times(random, len(specs)), Link(latency=latency))
    arranged, _ = arrange(plan, specs, costs, patterns)
    assert arranged.makespan >= simulate(plan, costs).makespan - 1e-9
    for row in arranged.events():
        for before, after in pairwise(row):
            assert before.end <= after.start + 1e-9
    assert max(event.end for row in arranged.events() for event in row) <= arranged.makespan + 1e-9


def equal_stages(devices: int, microbatches: int, schedule: str, times: tuple[float, float, float]):
    """A plan, its pieces and costs: each stage takes `times`."""
    specs = chain(2 * devices - 2)
    plan = named_plan(specs, schedule, devices, microbatches)
    nothing = (0.0, 0.0, 0.0)
    halves = [nothing if i % 2 else times for i in range(1, 2 * devices - 1)]
    return plan, specs, costs_of(specs, [times, *halves, nothing])


def phases(arranged) -> set[str]:
    return {e.action.phase for row in arranged.events() for e in row}


def test_unit_times_without_costs():
    """Two micro-batches, F = 1 and B = 2: 1F1B takes (2 + 2 - 1) * 3 (worked through in full by hand)."""
    specs = chain(2)
    arranged, _ = arrange(named_plan(specs, "1f1b", 2, 2), specs)
    assert arranged.makespan == 9
    assert len(arranged.patterns) == 1


def test_every_tick_pays_for_the_permutes_of_its_pattern():
    """One micro-batch through two devices. A message takes 0.5 + 8 / 4 = 2.5, F 2 and 1, B 4 and 5."""
    specs = [replace(spec, bytes={"wide": 8}) for spec in chain(2)]
    plan = named_plan(specs, "gpipe", 2, 1)
    costs = costs_of(specs, [(1, 1, 1)] * 4, Link(0.5, 4))
    exact, _ = arrange(plan, specs, costs, 8)
    assert exact.makespan == 2 + 2.5 + 1 + 5 + 2.5 + 4
    full, _ = arrange(plan, specs, costs)
    # F of 2 and F of 1 both wait for a permute of the tick, which nobody needs.
    assert full.makespan == 2.5 + 2.5 + 2.5 + 5 + 2.5 + 4


def test_i_and_w_are_fused_where_that_is_faster():
    """On stage 0 of ZB-H1 they are neighbours; with a tick for W, device 1 waits there for the long I."""
    plan, specs, costs = equal_stages(2, 6, "zb_h1", (1, 1.67, 0.22))
    arranged, _ = arrange(plan, specs, costs)
    assert arranged.makespan == pytest.approx(simulate(plan, costs).makespan)
    assert phases(arranged) == {"F", "I", "W", "B"}
    # Not so when W is long: then its tick lets the gradient go on before.
    plan, specs, costs = equal_stages(2, 6, "1f1b_split", (1, 1, 1))
    arranged, _ = arrange(plan, specs, costs)
    assert arranged.makespan == pytest.approx(simulate(plan, costs).makespan)
    assert phases(arranged) == {"F", "I", "W"}


def test_a_short_w_shares_the_tick_of_the_next_f():
    plan, specs, costs = equal_stages(4, 10, "zb_h1", (1, 1.67, 0.22))
    arranged, _ = arrange(plan, specs, costs)
    together = {tuple(a.phase for a, _ in tick) for row in arranged.work for tick in row}
    assert ("W", "F") in together
    assert arranged.makespan < 1.1 * simulate(plan, costs).makespan


def test_uneven_stages_are_placed_by_a_clock():
    """On the earliest ticks 1F1B waits in every tick for the longer of F and B."""
    times = [(1.1, 1.1, 1.1), (0.9, 0.9, 0.9), (0.85, 0.85, 0.85), (0.8, 0.8, 0.8)]
    specs = chain(6)
    plan = named_plan(specs, "1f1b", 4, 16)
    costs = costs_of(specs, [x for t in times for x in (t, (0.0, 0.0, 0.0))])
    work = [[[(e.action, e.end - e.start)] for e in row] for row in simulate(plan, costs).events]
    soonest = place(plan, expand(plan, specs), specs)
    both = ties(frozenset({(c, d) for c in (0, 1) for d in range(c, c + 3)}), [RIGHT, LEFT], [0, 0])
    done = finish_times(durations_by_tick(soonest, work), [both], [0] * soonest.length)
    arranged, _ = arrange(plan, specs, costs)
    assert arranged.makespan < 0.95 * makespan(done)


def test_more_patterns_are_never_slower():
    plan, specs, costs = equal_stages(4, 8, "1f1b", (1, 1, 1))
    spans = [arrange(plan, specs, costs, patterns)[0].makespan for patterns in (1, 2, 4, 20)]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] == pytest.approx(simulate(plan, costs).makespan)  # each tick its own


def test_errors():
    plan, specs, costs = equal_stages(2, 2, "1f1b", (1, 1, 1))
    with pytest.raises(ValueError, match="patterns is 0; expected at least 1"):
        arrange(plan, specs, costs, 0)
    with pytest.raises(ValueError, match="piece 0 is 'other' in the table and '0/embed' in the plan"):
        arrange(
            plan, specs, replace(costs, pieces=(replace(costs.pieces[0], name="other"), *costs.pieces[1:]))
        )
