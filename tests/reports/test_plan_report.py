import json
from dataclasses import replace

import pytest
from rich.console import Console

from jaxpipe.costs.table import LARGEST, CostTable, Link, PieceCost
from jaxpipe.planning import plan as plans
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.named import named_plan
from jaxpipe.reports.plan_report import (
    FILES,
    best,
    heading,
    judge,
    make_judged,
    make_problem,
    misfit,
    remarks,
    report_table,
    to_json,
    write_plan,
    write_report,
)

COSTS = CostTable("ms", tuple(PieceCost(f"p{i}", "k", 1, 1, 1, stash_bytes=1 << 20) for i in range(4)))
HELIX = CostTable(
    "ms",
    tuple(PieceCost(kind, kind, 1, 1, 0) for kind in ("attention_pre", "attention_core", "attention_post")),
    Link(0.5),
)


def problem(costs=COSTS, limit=None, model="ideal", devices=4, microbatches=8):
    return make_problem(costs, devices, microbatches, limit, model)


def ticks(plan, costs):
    """Stands in for the program: each name a time of its own."""
    return {"gpipe": 34.0, "1f1b": 39.0}.get(plan.name, 50.0)


def judged(names, found):
    return {name: make_judged(name, found, ticks) for name in names}


def test_what_the_report_says():
    found = problem()
    report = to_json(found, judged(["gpipe", "1f1b"], found), {"helix_naive": "no attention"})
    assert {k: v for k, v in report.items() if k not in ("plans", "refused")} == {
        "devices": 4,
        "microbatches": 8,
        "unit": "ms",
        "lower_bound": 8 * 3,  # as much on each device as on any
        "memory_limit_bytes": None,
        "memory_model": "ideal",
    }
    gpipe, one = report["plans"]["gpipe"], report["plans"]["1f1b"]
    times = {"makespan", "tick_makespan", "search_seconds"}
    assert set(gpipe) == times | {"bubble_fraction", "internal_bubble", "peak_stash", "peak_bytes", "valid"}
    # (m + p - 1) * 3, of which (p - 1) * 3 idle. Device d of GPipe waits 3 (p - 1 - d) between F and B.
    assert gpipe["makespan"] == one["makespan"] == 33
    assert gpipe["bubble_fraction"] == pytest.approx(3 / 11)
    assert gpipe["internal_bubble"] == pytest.approx((9 + 6 + 3) / (4 * 33))
    assert (gpipe["tick_makespan"], one["tick_makespan"]) == (34, 39)
    assert (gpipe["peak_stash"], one["peak_stash"]) == (8, 4)
    assert (gpipe["peak_bytes"], one["peak_bytes"]) == (8 << 20, 4 << 20)
    assert gpipe["valid"] is one["valid"] is True
    assert 0 < gpipe["search_seconds"] < 10
    assert report["refused"] == {"helix_naive": "no attention"}


def test_the_largest_piece_bounds_the_time_where_it_is_more_than_a_share():
    pieces = (*COSTS.pieces[:3], PieceCost("head", "head", 3, 4, 5))
    assert problem(CostTable("s", pieces)).lower_bound == 8 * 12


def test_the_best_is_the_fastest_that_fits():
    found = problem()
    assert best(judged(["1f1b", "gpipe"], found)) == "gpipe"  # as fast as 1F1B, and faster on ticks
    assert best(judged(["1f1b", "gpipe", "zb_h1"], found)) == "zb_h1"
    small = problem(limit=5 << 20)
    some = judged(["gpipe", "1f1b"], small)
    assert [one.fault for one in some.values()] == ["above the memory limit", ""]
    assert best(some) == "1f1b"
    assert remarks(small, some, {}) == ["not valid, above the memory limit: gpipe"]
    assert best(judged(["gpipe", "1f1b"], problem(limit=1))) is None
    assert misfit(some["1f1b"], small) == ""
    holds = "its fullest device holds 8.00 MiB, 1.6 times the limit of 5.00 MiB"
    assert misfit(some["gpipe"], small) == f"does not fit: {holds}"


def test_the_limit_of_the_table_counts_unless_another_is_given():
    limited = replace(COSTS, memory_limit_bytes=5 << 20)
    assert problem(limited).memory_limit_bytes == 5 << 20
    assert problem(limited, limit=9 << 20).memory_limit_bytes == 9 << 20
    assert heading(problem(limited))[-1] == "memory limit: 5.00 MiB a device"


def test_plans_are_made_for_the_limit():
    one = judged(["adapipe"], problem(limit=None))["adapipe"]
    limit = 0.8 * max(one.simulation.peak_bytes)
    by_flag = judged(["adapipe"], problem(limit=limit))["adapipe"]
    by_table = judged(["adapipe"], problem(replace(COSTS, memory_limit_bytes=limit)))["adapipe"]
    assert by_flag.plan == by_table.plan
    assert "full" in by_flag.plan.recompute
    assert not by_flag.fault


def test_padded_memory_is_the_same_on_all_devices():
    pieces = (replace(COSTS.pieces[0], param_bytes=100), replace(COSTS.pieces[1], param_bytes=10))
    costs = CostTable("s", tuple(replace(p, stash_bytes=0, kind=p.name) for p in pieces))
    sizes = {
        model: make_judged("gpipe", problem(costs, model=model, devices=2), ticks).simulation.peak_bytes
        for model in ("ideal", "padded")
    }
    assert sizes == {"ideal": (100, 10), "padded": (110, 110)}


def test_a_schedule_that_deadlocks_is_not_valid(tmp_path):
    found = problem(CostTable("ms", COSTS.pieces[:2]), devices=2, microbatches=2)
    plan = named_plan("1f1b", found.costs, 2, 2)
    schedule = read_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")  # each begins with what the other ends with
    stuck = judge(replace(plan, schedule=schedule), 0.5, found, ticks)
    assert "deadlocks: device 0 stops at 0B0" in stuck.fault
    results = {"1f1b": stuck}
    assert best(results) is None
    write_report(tmp_path, found, results, {})
    entry = json.loads((tmp_path / "report.json").read_text())["plans"]["1f1b"]
    assert entry.pop("search_seconds") == 0.5
    assert entry.pop("valid") is False
    assert set(entry.values()) == {None}
    assert remarks(found, results, {})[0].startswith("1f1b cannot run: ")
    assert "1f1b" in printed(report_table(found, results, None))[2]


def printed(table):
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_table_fits_80_columns_and_ranks():
    found = problem(limit=5 << 20)
    some = judged(["gpipe", "1f1b", "zb_h1", "s_1f1b"], found)
    some["helix_two_fold_recompute"] = some.pop("s_1f1b")  # the longest of all names
    lines = printed(report_table(found, some, "zb_h1"))
    assert max(map(len, lines)) <= 80
    names = [line.replace(">", " ").split()[0] for line in lines[2:6]]
    assert names == ["zb_h1", "1f1b", "helix_two_fold_recompute", "gpipe"]  # what does not fit comes last
    assert [line[0] for line in lines[2:6]] == [">", " ", " ", " "]
    # 27 = 8 * 3 + (p - 1)(F + I - W), against 24; 4 * 27 - 96 = 12 idle.
    assert " ".join(lines[2].split()[1:4]) == "zb_h1 27.0 ms"
    assert lines[2].split()[6] == "11.1%"
    assert lines[2].endswith("1.125")


@pytest.mark.parametrize("unit", ["s", "unit"])
def test_columns_stay_aligned_whatever_the_costs(unit):
    pieces = (PieceCost(f"p{i}", "k", *[LARGEST] * 3, *[LARGEST] * 2) for i in range(4))
    found = problem(CostTable(unit, tuple(pieces)))
    some = {name: make_judged(name, found, lambda plan, costs: 1e34) for name in ("gpipe", "zb_h1")}
    lines = printed(report_table(found, some, "zb_h1"))
    assert len(lines) == 4
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= 80
    assert "e+" in lines[2]


def test_costs_of_nothing_have_no_ratio():
    found = problem(CostTable("unit", tuple(PieceCost(f"p{i}", "k", 0, 0, 0) for i in range(4))))
    assert printed(report_table(found, judged(["gpipe"], found), "gpipe"))[2].endswith(" -")


def test_files_of_a_plan(tmp_path):
    found = problem()
    one = make_judged("zb_h1", found, ticks)
    assert write_plan(tmp_path, one, found, "costs.json") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    assert plans.load(tmp_path / "plan.json") == one.plan
    assert read_csv((tmp_path / "schedule.csv").read_text()) == one.plan.schedule
    assert "costs.json, zb_h1" in (tmp_path / "gantt.svg").read_text()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 8 * 3


def test_a_schedule_that_csv_cannot_express_has_none(tmp_path):
    (tmp_path / "schedule.csv").write_text("0F0,0B0\n")  # of an earlier plan
    found = problem(HELIX, devices=2, microbatches=2)
    one = make_judged("helix_naive", found, ticks)
    (line,) = write_plan(tmp_path, one, found, "costs.json")
    assert line.startswith("no schedule.csv: stage 1 runs on devices 0 and 1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gantt.svg", "plan.json", "trace.json"]
    assert "url(#attention)" in (tmp_path / "gantt.svg").read_text()
    # The condition under which messages are hidden: attention takes 1 ms, a message 0.5 ms.
    (line,) = remarks(found, {"helix_naive": one}, {})
    assert "t_attention >= t_message to hide its messages, which holds: 1 >= 0.5 ms" in line
