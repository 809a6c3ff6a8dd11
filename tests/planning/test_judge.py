"""Schedules of others: times as published, and what is wrong with damaged ones."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning import rendezvous
from jaxpipe.planning.interchange import read_file, read_sheet
from jaxpipe.planning.judge import Unit, judge
from jaxpipe.planning.judge_memory import peak_bytes
from jaxpipe.planning.plan import Plan, check
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.planning.simulator import simulate

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
TORCH = json.loads((DATA / "torch" / "expected.json").read_text())
CASES = json.loads((DATA / "pytorch_lowering_cases.json").read_text())
COMMS = "pytorch_zb1p_2rank_2stagep_comms.csv"
(DEADLOCKS,) = (value for key, value in CASES.items() if key.startswith("real_deadlock"))


def text_of(schedule):
    return "\n".join(",".join(map(str, row)) for row in schedule)


def judged(*rows, **more):
    return judge(read_sheet("\n".join(row.replace(" ", ",") for row in rows)), **more)


@pytest.mark.parametrize("case", TORCH, ids=lambda case: case["file"])
def test_schedules_of_torch(case):
    verdict = judge(read_file(DATA / "torch" / case["file"]))
    assert verdict.valid
    assert verdict.makespan == case["unit_cost_makespan"]
    assert verdict.busy == (case["ideal_busy"],) * case["ranks"]
    assert verdict.bubble_fraction == pytest.approx(case["bubble_fraction"], abs=1e-6)
    assert list(verdict.peak_in_flight) == case["peak_inflight_chunk_activations"]
    assert (verdict.microbatches, verdict.chains) == (case["microbatches"], 1)
    assert len(verdict.stage_to_device) == case["stages"]
    assert verdict.floating == ()


@pytest.mark.parametrize(
    ("name", "makespan", "in_flight"),
    [
        ("pytorch_zb1p_2rank_2stagep_compute.csv", 49, 4),
        (COMMS, 49, 4),
        ("torchtitan_custom_schedule.csv", 50, 16),
    ],
)
def test_two_devices_with_two_stages_each(name, makespan, in_flight):
    verdict = judge(read_file(DATA / name), stage_to_device=(0, 1, 0, 1))
    assert verdict.valid
    assert (verdict.makespan, verdict.busy) == (makespan, (48, 48))
    assert verdict.bubble_fraction == pytest.approx(1 - 48 / makespan)
    assert verdict.peak_in_flight == (in_flight, in_flight)


def test_dualpipe_runs_half_of_the_microbatches_each_way():
    case = json.loads((DATA / "dualpipe_expected.json").read_text())[0]
    verdict = judge(read_file(DATA / case["file"]))
    assert verdict.valid
    assert verdict.makespan == case["unit_makespan"]
    assert verdict.busy == (case["busy"],) * case["ranks"]
    assert verdict.makespan - verdict.busy[0] == case["bubble"]
    assert list(verdict.peak_in_flight) == case["peak_inflight"]
    assert (verdict.chains, verdict.microbatches) == (2, case["microbatches"])
    assert verdict.stage_to_device == (0, 1, 2, 3, 3, 2, 1, 0)


def test_the_incomplete_schedule_of_torch():
    """1F1B of torch 2.14.1 for P = 4, M = 8, whose last rank starts at micro-batch 1."""
    assert "last rank = 3F1,3B0,3F2,...,3F8,3B7" in CASES["invalid_csv_must_reject"]
    rows = text_of(SCHEDULES["1f1b"](4, 8)).splitlines()
    rows[3] = ",".join(f"3F{m + 1},3B{m}" for m in range(8))
    verdict = judge(read_sheet("\n".join(rows)))
    assert verdict.error == "device 3, column 2: 3B0 is wrong: it needs 3F0, which is missing"
    assert verdict.places == ((3, 2),)
    assert (verdict.makespan, verdict.busy, verdict.peak_in_flight) == (None, None, None)


def plan_of(schedule, chunks=1):
    stages = 1 + max(action.stage for row in schedule for action in row)
    homes = {action.stage: device for device, row in enumerate(schedule) for action in row}
    return Plan(
        name="p",
        devices=len(schedule),
        microbatches=1 + max(action.microbatch for row in schedule for action in row),
        pieces=tuple(f"p{i}" for i in range(stages * chunks)),
        stage_bounds=tuple(range(0, stages * chunks + 1, chunks)),
        stage_to_device=tuple(homes[stage] for stage in range(stages)),
        recompute=("none",) * stages * chunks,
        schedule=schedule,
    )


SOURCES = {
    "1f1b": SCHEDULES["1f1b"](3, 5),
    "zb_h1": SCHEDULES["zb_h1"](4, 5),
    "zb1p": read_file(DATA / COMMS).schedule,
    "zbv": read_file(DATA / "torch" / "zbvzerobubble_p4_v2_m8.csv").schedule,
}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_simulator_agrees(data):
    """Two programs that share no code but the costs of stages."""
    plan = plan_of(SOURCES[data.draw(st.sampled_from(sorted(SOURCES)))])
    check(plan)
    pieces = [
        PieceCost(name, "k", *data.draw(st.tuples(*[st.integers(0, 9)] * 3)), output_bytes=i % 3)
        for i, name in enumerate(plan.pieces)
    ]
    costs = CostTable("unit", tuple(pieces), Link(data.draw(st.integers(0, 4)), 1))
    simulation, verdict = simulate(plan, costs), judge(read_sheet(text_of(plan.schedule)), costs)
    assert verdict.events == simulation.events
    assert verdict.busy == simulation.busy
    assert verdict.internal_bubble == pytest.approx(simulation.internal_bubble)
    assert verdict.internal_idle == simulation.internal_idle
    assert verdict.peak_in_flight == simulation.peak_in_flight
    assert verdict.bubble_fraction == simulation.bubble_fraction


def test_times_and_latency_of_a_chain():
    # F 0-2, message until 7, F 7-9, B 9-17, message until 22, B 22-30.
    verdict = judged("0F0 0B0", "1F0 1B0", costs=Unit(2, 5, 3, 5))
    assert verdict.makespan == 30
    assert verdict.busy == (10, 10)
    assert verdict.internal_idle == (20, 0)
    assert verdict.bubble_fraction == pytest.approx(1 - 20 / 60)
    # A W of its own: the message leaves after I.
    assert judged("0F0 0I0 0W0", "1F0 1I0 1W0", costs=Unit(2, 5, 3, 5)).makespan == 27


def test_a_pair_starts_with_both_inputs_and_ends_with_both_results():
    rows = ("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    # Device 1: F 1-2, pair 2-5, B 5-7. Device 0 gets 1B0 at 5, 1B1 at 7.
    verdict = judged(*rows)
    assert verdict.makespan == 9
    pair = verdict.events[1][1:3]
    assert [(str(e.action), e.start, e.end) for e in pair] == [("1F1", 2, 5), ("1B0", 2, 5)]
    assert verdict.busy == (6, 6)
    assert verdict.peak_in_flight == (2, 2)
    # Within a pair the backward may use its forward.
    assert judged("0F0 (0F1;0B0)OVERLAP_F_B 0B1 (0F2;0B2)OVERLAP_F_B").makespan == 9


def test_pieces_are_spread_over_the_stages():
    pieces = tuple(PieceCost(f"p{i}", "k", t, t, t, output_bytes=i) for i, t in enumerate((1, 1, 1, 3)))
    costs = CostTable("ms", pieces, Link(0, 1))
    # Best of 2 stages: pieces 0 to 2 and piece 3. Message of piece 2: 2 ms.
    verdict = judged("0F0 0B0", "1F0 1B0", costs=costs)
    assert verdict.busy == (9, 9)
    assert verdict.makespan == 3 + 2 + 3 + 6 + 2 + 6
    with pytest.raises(ValueError, match=r"^4 pieces cannot fill 5 stages of the schedule; expected a"):
        judged(*(f"{s}F0 {s}B0" for s in range(5)), costs=costs)


def test_both_directions_use_the_pieces_of_the_same_model():
    dualpipe = read_file(DATA / "dualpipe_p4_m8.csv")
    pieces = tuple(PieceCost(f"p{i}", "k", 1, 1, 1, param_bytes=10 << i, stash_bytes=1) for i in range(4))
    costs = CostTable("unit", pieces)
    verdict = judge(dualpipe, costs)
    assert verdict.makespan == 26
    # Devices s and 3 - s hold stages s and 3 - s, once for each direction; 5 in flight.
    held = [10 + 80, 20 + 40, 20 + 40, 10 + 80]
    assert peak_bytes(dualpipe, verdict, costs, "ideal") == tuple(size + 5 for size in held)
    # One kind: as many slots and registers as the fullest device, of the largest.
    assert peak_bytes(dualpipe, verdict, costs, "padded") == (2 * 80 + 5,) * 4
    with pytest.raises(ValueError, match="unknown memory model 'real'; known: ideal, padded"):
        peak_bytes(dualpipe, verdict, costs, "real")


def test_a_stage_may_run_on_several_devices():
    sheet = read_sheet("0F0,0F1,1F1,1B1,0B0,0B1\n1F0,1B0\n")
    verdict = judge(sheet)
    assert verdict.valid
    assert (verdict.stage_to_device, verdict.floating) == ((0, 1), (1,))
    # Device 0: F0 0-1, F1 1-2, 1F1 2-3, 1B1 3-5, then 0B0 (1B0 ended at 4) and 0B1.
    assert verdict.makespan == 9
    fixed = judge(sheet, stage_to_device=(0, 1))
    assert fixed.error == "device 0, column 3: 1F1 is wrong: it stands on device 0, its stage on 1"
    costs = CostTable("unit", (PieceCost("a", "k", 1, 1, 1), PieceCost("b", "k", 1, 1, 1, param_bytes=1)))
    with pytest.raises(ValueError, match="stage 1 runs on several devices and has parameters"):
        peak_bytes(sheet, judge(sheet, costs), costs, "ideal")


@pytest.mark.parametrize(
    ("rows", "error", "places"),
    [
        (
            ("0F0 0B0", "1F0 1F0 1B0"),
            "device 1, column 2: 1F0 is wrong: it stands twice, first at device 1, column 1",
            1,
        ),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1B0 1F1"),
            "device 1, column 3: 1B1 missing: stage 1 must run micro-batch 1",
            1,
        ),
        (("0F0 0B0 0F1 0B1", "1F0 1B0"), "device 1, end: 1F1 and 1B1 missing", 1),
        (("0F0 0F1 0I1 0I0 0W0",), "device 0, column 2: 0W1 missing", 1),
        (("0F0",), "device 0, column 1: 0B0 missing", 1),
        (("0B0 0F0",), "device 0, column 1: 0B0 is wrong: it stands before 0F0 at device 0, column 2", 1),
        (("0F0 0W0 0I0",), "column 2: 0W0 is wrong: it stands before 0I0 at device 0, column 3", 1),
        (("0F0 0W0",), "device 0, column 2: 0W0 is wrong: it needs 0I0, which is missing", 1),
        (
            ("0F0 0B0 0W0 0F1 0B1",),
            "column 3: 0W0 is wrong: it clashes with 0B0 at device 0, column 2; B is I and W",
            1,
        ),
        (("0F0 0I0 0B0",), "column 3: 0B0 is wrong: it clashes with 0I0 at device 0, column 2", 1),
        (("0F0", "0B0"), "device 1, column 1: 0B0 is wrong: it stands on device 1, but 0F0 on device 0", 1),
        (("0B0", "0F0"), "device 0, column 1: 0B0 is wrong: it needs 0F0, which stands on device 1", 1),
        (
            ("0F0 0B0", "2F0 2B0"),
            "column 1: 2F0 is wrong: stage 2 is unknown: they count from 0, and no cell is of stage 1",
            1,
        ),
        (
            ("0F0 0F2 0B0 0B2",),
            "0F2 is wrong: micro-batch 2 is unknown: they count from 0, and no cell is of ",
            1,
        ),
        (("1F0 1B0",), "column 1: 1F0 is wrong: stage 1 is unknown: they count from 0", 1),
        (("0UNSHARD",), "the schedule has no action", 0),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "device 0, column 2: deadlock: device 0 stops at 0B0 and waits for 1B0, which stands later on "
            "device 1; device 1 stops at 1F1 and waits for 0F1, which stands later on device 0",
            2,
        ),
        (
            ("1F0 0F0 1B0 0B0",),
            "column 1: deadlock: device 0 stops at 1F0 and waits for 0F0, which stands later on device 0",
            1,
        ),
    ],
)
def test_the_first_wrong_action(rows, error, places):
    verdict = judged(*rows)
    assert not verdict.valid
    assert error in verdict.error
    assert len(verdict.places) == places
    assert "\n" not in verdict.error


def test_a_deadlock_names_the_circle_and_not_who_waits_behind_it():
    rows = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1")
    verdict = judged(*rows)
    assert [place.device for place in verdict.places] == [0, 1]
    assert "device 2" not in verdict.error


def test_columns_are_those_of_the_file():
    verdict = judged("0F0,,0RESHARD,,0F2", "0UNSHARD")
    assert verdict.error.startswith("device 0, column 5: 0F2 is wrong: micro-batch 2 is unknown")
    with pytest.raises(
        ValueError, match="stage 1 is placed on device 2; the schedule has rows for devices 0"
    ):
        judged("0F0 0B0", "1F0 1B0", stage_to_device=(0, 2))
    for placement, stage in (((0, 1, 0), 2), ((0, 1, 1, 0), 2)):
        fewer = judged("0F0 0B0", "1F0 1B0", stage_to_device=placement)
        device = placement[stage]
        assert fewer.error == f"device {device}, end: stage 2 is placed on device {device} and has no action"
    gap = judged("0F0 0B0", "2F0 2B0", stage_to_device=(0, 1, 1))
    assert gap.error == "device 1, end: stage 1 is placed on device 1 and has no action"
    beyond = judged("0F0 0B0", "1F0 1B0", stage_to_device=(0,))
    assert (
        beyond.error == "device 1, column 1: 1F0 is wrong: stage 1 is unknown: the placement ends at stage 0"
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_damage_to_an_action_is_found(data):
    """Each action is needed once: left out, doubled or moved to another row, the schedule is wrong."""
    source = data.draw(st.sampled_from(["1f1b", "zb1p", "zbv"]))
    rows = [[str(action) for action in row] for row in SOURCES[source]]
    device = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.integers(0, len(rows[device]) - 1))
    damage = data.draw(st.sampled_from(["drop", "double", "move", "after"]))
    text = rows[device][column]
    if damage == "drop":
        del rows[device][column]
    elif damage == "double":
        other = data.draw(st.integers(0, len(rows) - 1))
        rows[other].insert(data.draw(st.integers(0, len(rows[other]))), text)
    elif damage == "move":
        del rows[device][column]
        rows[(device + 1) % len(rows)].append(text)
    else:  # a backward before its forward
        stage, _, microbatch = re.fullmatch(r"(\d+)(.)(\d+)", text).groups()
        forward = f"{stage}F{microbatch}"
        backward = next(t for t in rows[device] if re.fullmatch(rf"{stage}[BI]{microbatch}", t))
        rows[device].remove(forward)
        rows[device].insert(rows[device].index(backward) + 1, forward)
    verdict = judge(read_sheet("\n".join(map(",".join, rows))))
    assert not verdict.valid
    assert verdict.places
    assert verdict.makespan is None


@pytest.mark.parametrize("case", DEADLOCKS, ids=lambda case: case["rank0"])
def test_messages_that_deadlock_on_gpus(case):
    """pytorch/pytorch#172668: both ranks stop at a send that the other cannot receive yet."""
    sheet = read_sheet(f"{case['rank0']}\n{case['rank1']}")
    fault = rendezvous.deadlock(sheet)
    stops = re.findall(r"\d+SEND_[FB]\d+", case["cycle"])
    first = next(text for text in stops if text in case["rank0"])
    second = next(text for text in stops if text in case["rank1"])
    assert f"device 0 stops at {first} and waits for" in fault.error
    assert f"device 1 stops at {second} and waits for" in fault.error


@pytest.mark.parametrize("case", CASES["send_recv"], ids=lambda case: case["name"])
def test_messages_as_torch_orders_them(case):
    lowered = judge(read_sheet("\n".join(case["comms"])))
    assert lowered.valid
    assert lowered == judge(read_sheet("\n".join(case["compute"])))


@pytest.mark.parametrize("case", CASES["merge_bw"], ids=str)
def test_merging_i_and_w_changes_no_time_on_one_device(case):
    split, merged = (judge(read_sheet(case[name])) for name in ("in", "expect"))
    assert split.makespan == merged.makespan == 9
    assert split.peak_in_flight == merged.peak_in_flight == (3,)


@pytest.mark.parametrize("rows", ["in", "out"])
def test_a_receive_before_what_brings_it_about(rows):
    """Torch's pass for deferring receives leaves a gradient's receive before the activation's send."""
    (case,) = CASES["defer_recv"]
    error = judge(read_sheet("\n".join(case[rows]))).error
    assert "device 0 stops at 0RECV_B0 and waits for 1SEND_B0" in error
    assert "device 1 stops at 1RECV_F0 and waits for 0SEND_F0" in error


def test_damaged_messages():
    text = (DATA / COMMS).read_text()
    assert judge(read_sheet(text)).valid

    def error(old, new):
        assert old in text
        return judge(read_sheet(text.replace(old, new, 1))).error

    assert error("0F0,0SEND_F0,", "0SEND_F0,0F0,").endswith(
        "0SEND_F0 is wrong: it stands before what it sends, 0F0"
    )
    assert error("1RECV_F0,1F0,", "1F0,1RECV_F0,").endswith(
        "1F0 is wrong: it stands before 1RECV_F0, whose message it needs"
    )
    assert error("1RECV_F1,", "").endswith("0SEND_F1 waits for 1RECV_F1, which is missing")
    assert error("0SEND_F1,", "").endswith("1RECV_F1 waits for 0SEND_F1, which is missing")
    assert error("1RECV_F1,", "1RECV_F1,1RECV_F1,").endswith(
        "1RECV_F1 is wrong: it stands twice, first at device 1, column 4"
    )
    assert error("0SEND_F0,2RECV_F0,0F1,0SEND_F1,", "2RECV_F0,0SEND_F0,0F1,0SEND_F1,") == (
        "device 0, column 2: deadlock: device 0 stops at 2RECV_F0 and waits for 1SEND_F0, which stands later "
        "on device 1; device 1 stops at 1RECV_F0 and waits for 0SEND_F0, which stands later on device 0"
    )


def test_judging_needs_neither_jax_nor_numba():
    code = "import sys, jaxpipe.planning.judge; print([m for m in ('jax', 'numba') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout == "[]\n"
