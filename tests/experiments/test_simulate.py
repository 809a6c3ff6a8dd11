"""The command `python -m experiments.simulate`, as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpipe.costs import table
from jaxpipe.costs.table import CostTable, Link, PieceCost
from jaxpipe.planning import plan as plans
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.simulator import simulate

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
ZB1P = f"--schedule={DATA / 'pytorch_zb1p_2rank_2stagep_compute.csv'}"


def run(*arguments):
    command = [sys.executable, "-m", "experiments.simulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B1,1B0,1F1\n")
    return path


def test_one_json_object_and_nothing_else():
    result = run(ZB1P, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    verdict = json.loads(result.stdout)
    assert verdict == {
        "makespan": 49,
        "bubble_fraction": pytest.approx(1 - 48 / 49),
        "internal_bubble": pytest.approx(1 / (2 * 49)),
        "internal_idle": [1, 0],
        "busy": [48, 48],
        "peak_inflight": [4, 4],
        "valid": True,
        "error": None,
    }


def test_times_and_placement_by_flags(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    times = ("--F=2", "--I=5", "--W=3", "--comm=5")
    result = run(f"--schedule={path}", *times, "--stage_to_device=0,1", "--json")
    # F 0-2, message until 7, F 7-9, B 9-17, message until 22, B 22-30.
    assert json.loads(result.stdout)["makespan"] == 30
    result = run(f"--schedule={path}", "--stage_to_device=1,0", "--json")
    assert result.returncode == 1
    error = "device 0, column 1: 0F0 is wrong: it stands on device 0, its stage on 1"
    assert json.loads(result.stdout)["error"] == error


def test_a_cost_table(tmp_path):
    pieces = [PieceCost(f"p{i}", "k", 1, 2, 3, param_bytes=100, stash_bytes=8) for i in range(4)]
    pieces[3] = PieceCost("head", "head", 2, 2, 2, param_bytes=300, stash_bytes=1)
    table.save(CostTable("ms", tuple(pieces), Link(1)), tmp_path / "costs.json")
    (tmp_path / "a.csv").write_text("0F0,0B0\n1F0,1B0\n")
    arguments = (f"--schedule={tmp_path / 'a.csv'}", f"--costs={tmp_path / 'costs.json'}")
    ideal = json.loads(run(*arguments, "--memory_model=ideal", "--json").stdout)
    # Two pieces a stage: forwards 2 and 3, backwards 10 and 9, two messages of 1.
    assert ideal["makespan"] == 2 + 1 + 3 + 9 + 1 + 10
    assert ideal["peak_bytes"] == [2 * 100 + 2 * 8, 100 + 300 + 8 + 1]
    padded = json.loads(run(*arguments, "--json").stdout)
    assert padded["peak_bytes"] == [2 * 100 + 300 + 2 * 8 + 1] * 2
    text = run(*arguments).stdout
    assert "makespan 26.0 ms, bubble" in text
    assert "\n4 pieces on 2 stages, balanced: 0-1, 2-3\n" in text
    assert ideal["stage_bounds"] == padded["stage_bounds"] == [0, 2, 4]
    assert text.count("517 B") == 2


def test_a_wrong_cost_table_says_nothing_about_the_schedule(tmp_path):
    path = tmp_path / "costs.json"
    table.save(CostTable("ms", (PieceCost("p", "k", 1, 1, 1),)), path)
    (tmp_path / "a.csv").write_text("0F0,0B0\n1F0,1B0\n")
    result = run(f"--schedule={tmp_path / 'a.csv'}", f"--costs={path}", "--json")
    assert (result.returncode, result.stderr) == (2, "")
    verdict = json.loads(result.stdout)
    assert verdict["valid"] is None
    assert (
        verdict["error"] == "1 piece cannot fill 2 stages of the schedule; expected a piece for each at least"
    )


def test_a_plan(tmp_path):
    """Attention floats: its stages have micro-batches on both devices."""
    kinds = ["pre", "attention_core", "post", "pre", "attention_core", "post"]
    pieces = [PieceCost(f"{i}", kind, 1, 1, 1, stash_bytes=8) for i, kind in enumerate(kinds)]
    costs = CostTable("ms", tuple(pieces))
    table.save(costs, tmp_path / "costs.json")
    plan = named_plan("helix_naive", costs, 2, 4)
    plans.save(plan, tmp_path / "plan.json")
    arguments = (f"--plan={tmp_path / 'plan.json'}", f"--costs={tmp_path / 'costs.json'}")
    result = run(*arguments, "--memory_model=ideal", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    expected = simulate(plan, costs)
    assert json.loads(result.stdout) == {
        "makespan": expected.makespan,
        "bubble_fraction": expected.bubble_fraction,
        "internal_bubble": expected.internal_bubble,
        "internal_idle": list(expected.internal_idle),
        "busy": list(expected.busy),
        "peak_inflight": list(expected.peak_in_flight),
        "valid": True,
        "error": None,
        "peak_bytes": list(expected.peak_bytes),
        "stage_bounds": [0, 1, 2, 4, 5, 6],
    }
    text = run(*arguments).stdout
    assert text.startswith("valid: 2 devices, 5 stages, 4 micro-batches\nmakespan ")
    assert "6 pieces on 5 stages, as planned: 0, 1, 2-3, 4, 5\non several devices: stages 1 3\n" in text


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"format": "jaxpipe-plan/2"}, 2, "field 'format' is 'jaxpipe-plan/2'; expected 'jaxpipe-plan/1'"),
        ({"pieces": ["p", "x"]}, 2, "differ: piece 1 is 'q' in the table and 'x' in the plan"),
        ({"schedule": ["0F0 0B0", "1B0 1F0"]}, 1, "action 1B0 on device 1 stands before 1F0"),
        ({"schedule": ["0B0 0F0 1F0 1B0", ""]}, 1, "action 0B0 on device 0 stands before 0F0"),
        ({"schedule": ["0F0 0B0 1F0 1B0", ""]}, 1, "action 1F0 stands on device 0; stage 1 is on device 1"),
        (
            {"stage_to_device": [0, 0], "schedule": ["0F0 0B0 1F0 1B0", ""]},
            1,
            "deadlocks: device 0 stops at 0B0",
        ),
        ({"stage_bounds": []}, 1, "stage_bounds [] must start at 0 and end at 2, the number of pieces"),
    ],
)
def test_a_wrong_plan_is_one_line(tmp_path, change, code, message):
    costs = CostTable("ms", (PieceCost("p", "k", 1, 1, 1), PieceCost("q", "k", 1, 1, 1)))
    table.save(costs, tmp_path / "costs.json")
    plan = plans.to_json(named_plan("1f1b", costs, 2, 1))
    (tmp_path / "plan.json").write_text(json.dumps(plan | change))
    arguments = (f"--plan={tmp_path / 'plan.json'}", f"--costs={tmp_path / 'costs.json'}")
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    as_json = run(*arguments, "--json")
    assert (as_json.returncode, as_json.stderr) == (code, "")
    assert json.loads(as_json.stdout)["valid"] is {1: False, 2: None}[code]
    assert message in json.loads(as_json.stdout)["error"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read {}: No such file or directory"),
        ("[" * 100_000, "{} is nested too deeply; expected a plan as JSON"),
        ("{", "{} is not JSON (Expecting property name"),
        ("[]", "{}: a plan must be a JSON object, not list"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, text, message):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    table.save(CostTable("ms", (PieceCost("p", "k", 1, 1, 1),)), tmp_path / "costs.json")
    result = run(f"--plan={path}", f"--costs={tmp_path / 'costs.json'}")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"simulate: {message.format(path)}")
    assert result.stderr.count("\n") == 1


def test_the_words_for_people():
    result = run(f"--schedule={DATA / 'dualpipe_p4_m8.csv'}")
    assert (result.returncode, result.stderr) == (0, "")
    assert "valid: 4 devices, 8 stages, 8 micro-batches\nmakespan 26.0, bubble 7.69%\n" in result.stdout


def test_a_wrong_schedule_is_shown_and_explained(wrong):
    result = run(f"--schedule={wrong}")
    assert result.returncode == 1
    error = (
        "device 1, column 2: 1B1 is wrong: it stands before 1F1 at device 1, column 4, whose result it needs"
    )
    assert result.stderr == f"simulate: {wrong}: {error}\n"
    assert "device 1   1F0 >1B1< 1B0  1F1" in result.stdout
    result = run(f"--schedule={wrong}", "--json")
    assert (result.returncode, result.stderr) == (1, "")
    verdict = json.loads(result.stdout)
    assert (verdict.pop("valid"), verdict.pop("error")) == (False, error)
    assert set(verdict.values()) == {None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--schedule is missing; expected the CSV file of a schedule"),
        (["--schedule"], "--schedule is missing; expected the CSV file of a schedule"),
        (["--schedule=nowhere.csv"], "nowhere.csv: No such file or directory; expected a schedule as CSV"),
        ([ZB1P, "stray"], "unexpected argument 'stray'; flags start with --"),
        ([ZB1P, "--cost=x"], "unknown flag --cost; did you mean --costs? known: "),
        ([ZB1P, "--F=x"], "--F is 'x'; expected a number, the time of a forward (1)"),
        (["--schedule="], "--schedule is empty; expected the CSV file of a schedule"),
        ([ZB1P, "--costs="], "--costs is empty; expected a cost table such as the costs.json of a run"),
        ([ZB1P, "--F=nan"], "--F is nan; expected a number from 0 to 1e+30"),
        ([ZB1P, "--comm=-1"], "--comm is -1.0; expected a number from 0 to 1e+30"),
        ([ZB1P, "--costs=x", "--W=1"], "--W stands beside --costs; expected one of the two"),
        ([ZB1P, "--costs=nowhere.json"], "cannot read nowhere.json: No such file or directory"),
        ([ZB1P, "--memory_model=ideal"], "--memory_model stands without --costs"),
        (
            [ZB1P, "--costs=x", "--memory_model=x"],
            "--memory_model is 'x'; expected <padded|ideal>: how memory",
        ),
        ([ZB1P, "--stage_to_device=0,x"], "--stage_to_device is '0,x'; expected the device of each stage"),
        ([ZB1P, "--stage_to_device=0,1,0,2"], "stage 3 is placed on device 2; the schedule has rows for"),
        ([ZB1P, "--plan=x", "--costs=x"], "--plan stands beside --schedule; expected one of the two"),
        (["--plan=x"], "--plan stands without --costs, the cost table that it was made for"),
        (["--plan=x", "--costs=x", "--stage_to_device=0"], "--stage_to_device stands beside --plan"),
        (["--plan=x", "--costs=x", "--F=1"], "--F stands beside --costs"),
        (
            ["--schedule=a/plan.json"],
            "--schedule is 'a/plan.json'; expected a CSV file, or for a plan --plan=a/",
        ),
        ([ZB1P, "--json=3"], "--json is '3'; expected true or false"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"simulate: {message}")
    assert result.stderr.count("\n") == 1
    if "--json=3" not in arguments:
        as_json = run("--json", *arguments)
        assert (as_json.returncode, as_json.stderr) == (2, "")
        verdict = json.loads(as_json.stdout)
        assert (verdict.pop("valid"), verdict.pop("error")) == (None, result.stderr[len("simulate: ") : -1])
        assert set(verdict.values()) == {None}


def test_a_schedule_without_actions(tmp_path):
    (tmp_path / "a.csv").write_text(",,\n,,\n")
    result = run(f"--schedule={tmp_path / 'a.csv'}")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"simulate: {tmp_path / 'a.csv'}: the schedule has no action\n"


def test_a_malformed_file_as_json(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("0F0,oops\n")
    result = run(f"--schedule={path}", "--json")
    assert (result.returncode, result.stderr) == (1, "")
    verdict = json.loads(result.stdout)
    assert verdict["valid"] is False
    assert verdict["error"].startswith("line 1 (device 0), column 2: 'oops' is not an action")


def test_starting_imports_neither_jax_nor_numba():
    code = "import sys, experiments.simulate; print([m for m in ('jax', 'numba') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout == "[]\n"
