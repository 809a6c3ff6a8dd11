import json

import numpy as np
import pytest
from rich.console import Console

from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning.head_split import split_vocabulary
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.perturb import spreads
from jaxpipe.reports.perturb_report import (
    DRAWS,
    add_to_report,
    perturb,
    perturbed_legend,
    perturbed_table,
    summary,
)
from jaxpipe.reports.plan_report import TUNED, judge, make_judged, make_problem

KINDS = {"attention_pre": (1, 1, 1), "attention_core": (3, 6, 0), "attention_post": (2, 2, 2)}
COSTS = CostTable(
    "ms",
    (
        *(
            PieceCost(f"{layer}/{k}", k, *times, stash_bytes=5)
            for layer in range(4)
            for k, times in KINDS.items()
        ),
        PieceCost("head", "head", 4, 4, 4, stash_bytes=5),
    ),
    Link(0.1),
)
PROBLEM = make_problem(COSTS, 2, 4, None, "ideal")
NAMES = ("gpipe", "s_1f1b", "zb_h1", "helix_naive", "helix_two_fold_recompute", "mist", "octopipe")


def ticks(plan, costs):
    """Stands in for the program."""
    return 0.0


@pytest.fixture(scope="module")
def judged():
    return {name: make_judged(name, PROBLEM, ticks) for name in NAMES}


def test_numbers_of_given_draws():
    drawn = {"slow": np.arange(101.0), "fast": np.full(101, 49.5), "same": np.full(101, 49.5 * (1 + 1e-12))}
    found = summary({"slow": 60.0, "fast": 49.0, "same": 49.5}, drawn, "fast")
    assert found["reference"] == "fast"
    assert list(found["plans"]) == ["fast", "same", "slow"]
    # Of 0 to 100 those from 50 on are slower than 49.5, 51 of 101.
    slow = {"makespan": 60, "median": 50, "p5": 5, "p95": 95, "beaten": pytest.approx(51 / 101)}
    assert found["plans"]["slow"] == slow
    assert found["plans"]["same"]["beaten"] == 0  # a tie but for rounding
    assert found["plans"]["fast"]["beaten"] is None


def test_a_tiny_error_leaves_the_makespans(judged):
    found = perturb(judged, 1e-9, 0)
    assert {k: found[k] for k in ("spread", "draws", "seed")} == {"spread": 1e-9, "draws": DRAWS, "seed": 0}
    assert set(found["plans"]) == set(NAMES)
    fastest = found["plans"][found["reference"]]["makespan"]
    for name, entry in found["plans"].items():
        assert entry["makespan"] == judged[name].simulation.makespan
        for key in ("median", "p5", "p95"):
            assert entry[key] == pytest.approx(entry["makespan"], rel=1e-7)
        if entry["makespan"] > fastest * 1.001:
            assert entry["beaten"] == 1


def test_an_error_spreads_the_makespans_by_less_than_itself(judged):
    """A makespan is a sum over several pieces, whose factors are independent."""
    for entry in perturb(judged, 0.05, 0)["plans"].values():
        assert entry["p5"] < entry["median"] < entry["p95"]
        # Of one normal number 3.29 deviations lie between the two percentiles.
        assert entry["p95"] - entry["p5"] < 3.29 * 0.05 * entry["median"]


def test_the_seed_decides(judged):
    assert perturb(judged, 0.05, 3) == perturb(judged, 0.05, 3)
    assert perturb(judged, 0.05, 3)["plans"] != perturb(judged, 0.05, 4)["plans"]


def test_what_is_tuned_is_the_reference_with_costs_of_its_own(judged):
    """Here split over both devices, the head is one piece in the draws."""
    split = split_vocabulary(COSTS, 2)
    plan = named_plan("zb_h1", split, 2, 4)
    tuned = judge(plan, 0.0, PROBLEM._replace(costs=split), ticks)
    names = []
    found = perturb({**judged, TUNED: tuned}, 0.05, 0, names.append)
    assert found["reference"] == TUNED
    assert names == [*NAMES, TUNED]
    drawn = spreads({"gpipe": (judged["gpipe"].plan, COSTS), TUNED: (plan, split)}, 0.05, DRAWS, 0)
    entry = found["plans"]["gpipe"]
    assert entry["beaten"] == np.mean(drawn[TUNED] < drawn["gpipe"]) == 1
    assert entry["median"] == np.median(drawn["gpipe"])


def test_plans_that_are_not_valid_are_left_out(judged):
    found = perturb({**judged, "zb_h1": judged["zb_h1"]._replace(simulation=None, fault="deadlock")}, 0.05, 0)
    assert set(found["plans"]) == set(NAMES) - {"zb_h1"}
    assert perturb({"gpipe": judged["gpipe"]._replace(fault="above the memory limit")}, 0.05, 0) is None


def test_what_is_printed_and_written(judged, tmp_path):
    found = perturb({name: judged[name] for name in ("gpipe", "zb_h1")}, 0.05, 0)
    console = Console(width=80, record=True)
    console.print(perturbed_table(found, "ms"))
    head, _, first, second = console.export_text().rstrip().splitlines()
    assert head.split() == ["plan", "makespan", "median", "5%", "95%", "beaten"]
    assert first.split()[:2] == [">", "zb_h1"]
    assert first.split()[-1] == "-"
    assert second.split()[0] == "gpipe"
    assert second.split()[-1] == "100.0%"
    text = "\n".join(perturbed_legend(found))
    assert "400 draws the F, I and W of every piece are each multiplied by" in text
    assert "1 + 0.05 × a standard normal number, at least 0.1" in text
    assert "zb_h1 is faster" in text
    (tmp_path / "report.json").write_text('{"unit": "ms"}')
    add_to_report(tmp_path, found)
    assert json.loads((tmp_path / "report.json").read_text()) == {"unit": "ms", "perturbed": found}
