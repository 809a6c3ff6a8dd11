from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.simulator import simulate


def one_stage(row, *more, **sizes):
    """One stage with F, I and W of 1. more: (stash, grad stash) of further pieces, which take no time."""
    pieces = [PieceCost("a", "k", 1, 1, 1, **sizes)]
    pieces += [
        PieceCost(f"b{i}", "k", 0, 0, 0, stash_bytes=stash, grad_stash_bytes=gradient)
        for i, (stash, gradient) in enumerate(more)
    ]
    names, schedule = tuple(piece.name for piece in pieces), read_csv(row.replace(" ", ","))
    plan = Plan("p", 1, 2, names, (0, len(pieces)), (0,), ("none",) * len(pieces), schedule)
    return simulate(plan, CostTable("unit", tuple(pieces), state_factor=4))


def test_stash_lives_from_the_start_of_F_to_the_end_of_B():
    simulation = one_stage("0F0 0F1 0B0 0B1", param_bytes=100, stash_bytes=10, grad_stash_bytes=3)
    assert simulation.memory == (((0, 400), (0, 410), (1, 420), (4, 410), (6, 400)),)
    assert simulation.peak_bytes == (420,)


def test_I_frees_half_of_the_stash():
    """Zero-bubble schedules are published with 1 from F to I and 1/2 from I to W."""
    simulation = one_stage("0F0 0F1 0I0 0W0 0I1 0W1", stash_bytes=1, grad_stash_bytes=0.5)
    assert simulation.memory == (((0, 0), (0, 1), (1, 2), (3, 1.5), (4, 1), (5, 0.5), (6, 0)),)
    assert simulation.peak_bytes == (2,)
    # What I frees is gone before the next F begins.
    assert one_stage("0F0 0I0 0F1 0W0 0I1 0W1", stash_bytes=1, grad_stash_bytes=0.5).peak_bytes == (1.5,)


def test_I_makes_more_for_W():
    simulation = one_stage("0F0 0I0 0F1 0W0 0I1 0W1", stash_bytes=10, grad_stash_bytes=13)
    assert simulation.memory == (((0, 0), (0, 10), (1, 13), (2, 23), (4, 10), (4, 13), (6, 0)),)
    assert simulation.peak_bytes == (23,)


def test_unless_a_table_says_otherwise_the_stash_is_held_until_W():
    simulation = one_stage("0F0 0I0 0F1 0W0 0I1 0W1", stash_bytes=10)
    assert simulation.memory == (((0, 0), (0, 10), (2, 20), (4, 10), (6, 0)),)
    simulation = one_stage("0F0 0I0 0F1 0W0 0I1 0W1", stash_bytes=10, grad_stash_bytes=0)
    assert simulation.memory == (((0, 0), (0, 10), (2, 0), (2, 10), (5, 0)),)


def test_what_one_piece_frees_is_no_room_for_what_another_makes():
    """Both are there while I runs, though the stage holds 3 before and after."""
    simulation = one_stage("0F0 0I0 0W0 0F1 0B1", (1, 3), stash_bytes=2, grad_stash_bytes=0)
    assert simulation.memory == (((0, 0), (0, 3), (1, 5), (2, 3), (3, 0), (3, 3), (6, 0)),)
    assert simulation.peak_bytes == (5,)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_timelines_by_counting(data):
    """A piece holds its stash before I, what W needs after it, and the larger of both while I runs."""
    size, time = st.integers(0, 9), st.integers(1, 5)
    devices, microbatches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    pieces = [
        PieceCost(f"p{i}", "k", *(data.draw(time) for _ in "FIW"), *(data.draw(size) for _ in range(4)))
        for i in range(data.draw(st.integers(devices, 7)))
    ]
    costs = CostTable("unit", tuple(pieces), state_factor=3)
    name = data.draw(st.sampled_from(["gpipe", "gpipe_split", "1f1b", "1f1b_split", "zb_h1", "zb_h2"]))
    policies = {"k": data.draw(st.sampled_from(["none", "full"]))}
    plan = make_plan(costs, devices, microbatches, name, recompute=policies)
    simulation = simulate(plan, costs)
    for events, timeline in zip(simulation.events, simulation.memory):
        when = {event.action: event for event in events}
        own = {action.stage: plan.stage_pieces(action.stage) for action in when}
        state = sum(3 * costs.pieces[i].param_bytes for indices in own.values() for i in indices)

        def held(now, when=when, own=own):
            found = 0
            for action, forward in when.items():
                if action.phase != "F" or now < forward.start:
                    continue
                backward = when.get(action._replace(phase="B")) or when[action._replace(phase="I")]
                weight = when.get(action._replace(phase="W"))
                for i in own[action.stage]:
                    piece, full = costs.pieces[i], plan.recompute[i] == "full"
                    stash = (costs.pieces[i - 1].output_bytes if i else 0) if full else piece.stash_bytes
                    before, after = now < backward.end, weight and backward.start <= now < weight.end
                    found += max(stash * before, piece.grad_stash_bytes if after else 0)
            return found

        between = [event.start + 0.25 for event in events] + [event.end + 0.25 for event in events]
        for now in between:
            assert [bytes_ for since, bytes_ in timeline if since <= now][-1] == state + held(now)
        most = max(state + held(event.start + 0.25) for event in events)
        assert simulation.peak_bytes[events[0].device] == most


def test_a_stash_is_free_before_the_next_action_begins():
    assert one_stage("0F0 0B0 0F1 0B1", stash_bytes=10).peak_bytes == (10,)


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_pipeline_memory_is_state_plus_stash_in_flight(schedule, held):
    sizes = {"param_bytes": 1000, "stash_bytes": 10, "output_bytes": 1}
    costs = CostTable(
        "unit", tuple(PieceCost(f"p{i}", "k", 1, 1, 1, **sizes) for i in range(8)), state_factor=2
    )
    peaks = simulate(make_plan(costs, 4, 8, schedule), costs).peak_bytes
    assert peaks == tuple(2 * 2000 + 20 * count for count in held)
    # With recompute each piece keeps only its input; the first piece has none.
    peaks = simulate(make_plan(costs, 4, 8, schedule, recompute="full"), costs).peak_bytes
    assert peaks == tuple(4000 + (1 if device == 0 else 2) * n for device, n in enumerate(held))


def padded(plan, costs):
    simulation = simulate(plan, costs, memory_model="padded")
    assert simulation.memory == simulate(plan, costs).memory
    assert len(set(simulation.peak_bytes)) == 1
    return simulation.peak_bytes[0]


def two_stages(schedule, *, pieces, bounds, recompute=None, factor=2):
    """A plan and costs of two stages on two devices with 2 micro-batches."""
    costs = CostTable("unit", pieces, state_factor=factor)
    names, policies = tuple(p.name for p in pieces), recompute or ("none",) * len(pieces)
    return Plan("p", 2, 2, names, bounds, (0, 1), policies, read_csv(schedule)), costs


ONE_F_ONE_B = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_padded_devices_have_slots_and_registers_of_every_kind():
    a = {"param_bytes": 100, "stash_bytes": 10}
    pieces = (
        PieceCost("a0", "a", 1, 1, 1, **a),
        PieceCost("a1", "a", 1, 1, 1, **a),
        PieceCost("b0", "b", 1, 1, 1, param_bytes=50, stash_bytes=4),
    )
    plan, costs = two_stages(ONE_F_ONE_B, pieces=pieces, bounds=(0, 2, 3))
    # Two slots of a and one of b; device 0 stashes both pieces of 2 micro-batches, device 1 one of 1.
    assert padded(plan, costs) == 2 * (2 * 100 + 50) + 4 * 10 + 4
    assert simulate(plan, costs).peak_bytes == (2 * 200 + 40, 2 * 50 + 4)


def test_padded_pieces_of_a_kind_take_the_largest():
    pieces = (
        PieceCost("a0", "a", 1, 1, 1, param_bytes=100, stash_bytes=10),
        PieceCost("a1", "a", 1, 1, 1, param_bytes=30, stash_bytes=25),
    )
    plan, costs = two_stages(ONE_F_ONE_B, pieces=pieces, bounds=(0, 1, 2), factor=1)
    assert padded(plan, costs) == 100 + 2 * 25


def test_padded_counts_what_I_makes_for_W_apart():
    pieces = (
        PieceCost("a0", "a", 1, 1, 1, stash_bytes=10, grad_stash_bytes=13),
        PieceCost("b0", "b", 1, 1, 1, stash_bytes=100, grad_stash_bytes=107),
    )
    schedule = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    plan, costs = two_stages(schedule, pieces=pieces, bounds=(0, 1, 2))
    # a: 2 between F and W, 1 between I and W; b: 2 and 2.
    assert padded(plan, costs) == 2 * 10 + 3 + 2 * 100 + 2 * 7


def test_padded_counts_what_I_frees_apart():
    pieces = (
        PieceCost("a0", "a", 1, 1, 1, stash_bytes=10, grad_stash_bytes=4),
        PieceCost("b0", "b", 1, 1, 1, stash_bytes=100, grad_stash_bytes=70),
    )
    schedule = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    plan, costs = two_stages(schedule, pieces=pieces, bounds=(0, 1, 2))
    # a: 2 between F and W, 2 between F and I; b: 2 and 1.
    assert padded(plan, costs) == 2 * 4 + 2 * 6 + 2 * 70 + 30


def test_padded_inputs_are_one_class_whether_W_needs_them_or_not():
    pieces = (
        PieceCost("a", "a", 1, 1, 0, output_bytes=30),
        PieceCost("b", "b", 1, 1, 0, stash_bytes=50, grad_stash_bytes=0, output_bytes=30),
        PieceCost("c", "c", 1, 1, 1, stash_bytes=50, grad_stash_bytes=35, output_bytes=30),
    )
    schedule = "0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    plan, costs = two_stages(schedule, pieces=pieces, bounds=(0, 1, 3), recompute=("none", "full", "full"))
    # Of inputs there are most while I of micro-batch 1 runs: c's of both and b's; c's I makes 5, twice.
    assert padded(plan, costs) == 3 * 30 + 2 * 5


def test_padded_recompute_stashes_inputs_of_equal_bytes_in_one_class():
    sizes = {"stash_bytes": 1000, "output_bytes": 30}
    pieces = (
        PieceCost("a0", "a", 1, 1, 1, **sizes),
        PieceCost("b0", "b", 1, 1, 1, **sizes),
        PieceCost("a1", "a", 1, 1, 1, **sizes),
        PieceCost("b1", "b", 1, 1, 1, **sizes),
    )
    plan, costs = two_stages(ONE_F_ONE_B, pieces=pieces, bounds=(0, 2, 4), recompute=("full",) * 4)
    # Device 0 keeps b0's input for 2 micro-batches, device 1 two inputs for one; a0 reads the batch.
    assert padded(plan, costs) == 2 * 30
    plan, costs = two_stages(
        ONE_F_ONE_B, pieces=pieces, bounds=(0, 2, 4), recompute=("none", "full", "full", "full")
    )
    assert padded(plan, costs) == 2 * 30 + 2 * 1000


def test_padded_equals_ideal_where_devices_are_alike():
    sizes = {"param_bytes": 7, "stash_bytes": 5, "output_bytes": 3}
    costs = CostTable("unit", tuple(PieceCost(f"p{i}", "k", 1, 1, 1, **sizes) for i in range(4)))
    plan = make_plan(costs, 4, 6, "gpipe")
    assert simulate(plan, costs).peak_bytes == (padded(plan, costs),) * 4
    plan = make_plan(costs, 4, 6, "1f1b")  # only the first device is full
    assert simulate(plan, costs).peak_bytes[0] == padded(plan, costs) > simulate(plan, costs).peak_bytes[1]


def counted(plan, costs):
    """Padded bytes by counting, action by action, what is alive."""
    most = {}

    def see(alive):
        for key, number in Counter(alive).items():
            most[key] = max(most.get(key, 0), number)

    bytes_of, parts = {}, {}
    for i, (piece, policy) in enumerate(zip(costs.pieces, plan.recompute)):
        stash = piece.stash_bytes
        if policy == "full":
            stash = costs.pieces[i - 1].output_bytes if i else 0
        kept = min(stash, piece.grad_stash_bytes)
        sizes = {"kept": kept, "freed": stash - kept, "made": piece.grad_stash_bytes - kept}
        for part, size in sizes.items():
            message = policy == "full" and part != "made"
            key = ("input", size) if message else (piece.kind, policy, part)
            bytes_of[key] = max(bytes_of.get(key, 0), size)
            parts[i, part] = key
        state = costs.state_factor * piece.param_bytes
        bytes_of["param", piece.kind] = max(bytes_of.get(("param", piece.kind), 0), state)
    for device, row in enumerate(plan.schedule):
        see(
            ("param", costs.pieces[i].kind)
            for stage, home in enumerate(plan.stage_to_device)
            if home == device
            for i in plan.stage_pieces(stage)
        )
        alive = {}
        for stage, phase, microbatch in row:
            born = {"F": ("kept", "freed"), "I": ("made",)}.get(phase, ())
            dies = {"I": ("freed",), "W": ("kept", "made"), "B": ("kept", "freed")}.get(phase, ())
            for i in plan.stage_pieces(stage):
                alive |= {(i, microbatch, part): parts[i, part] for part in born}
            see(alive.values())
            for i in plan.stage_pieces(stage):
                for part in dies:
                    del alive[i, microbatch, part]
        assert not alive
    return sum(number * bytes_of[key] for key, number in most.items())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_padded_bytes_by_counting(data):
    number = st.integers(0, 9)
    devices, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    pieces = []
    for i in range(data.draw(st.integers(devices, 8))):
        kind, sizes = data.draw(st.sampled_from("abc")), [data.draw(number) for _ in range(4)]
        pieces.append(PieceCost(f"p{i}", kind, *[data.draw(number) for _ in range(3)], *sizes))
    costs = CostTable("unit", tuple(pieces), state_factor=3)
    policies = {kind: data.draw(st.sampled_from(["none", "full"])) for kind in {p.kind for p in pieces}}
    name = data.draw(st.sampled_from(["gpipe", "1f1b", "1f1b_split", "zb_h1"]))
    plan = make_plan(costs, devices, microbatches, name, recompute=policies)
    assert padded(plan, costs) == counted(plan, costs)
    assert padded(plan, costs) >= max(simulate(plan, costs).peak_bytes)
