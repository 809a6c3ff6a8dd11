"""The command `python -m experiments.plan`, as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpipe.costs import table
from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning import plan as plans
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.named import NAMED
from jaxpipe.planning.simulator import simulate

ROOT = Path(__file__).parents[2]
COSTS = CostTable("ms", tuple(PieceCost(f"p{i}", "k", 1, 1, 1, stash_bytes=10**9) for i in range(4)))
CONFIG_FILE = """
from ml_collections import ConfigDict

from jaxpipe.training.config import to_json
from tests.training.runs import tiny_config

def get_config():
    return ConfigDict(to_json(tiny_config("nowhere", mesh={"stage": 2}, plan={"chip": "h200"})))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where costs.json and a configuration file lie."""
    folder = tmp_path_factory.mktemp("plan")
    table.save(COSTS, folder / "costs.json")
    (folder / "config.py").write_text(CONFIG_FILE)
    return folder


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.plan", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def of_costs(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return run(f"--costs={folder / 'costs.json'}", "--devices=4", f"--workdir={folder / 'out'}", *arguments)


def report(folder: Path) -> dict:
    return json.loads((folder / "out" / "report.json").read_text())


def test_some_schedules(folder):
    done = of_costs(folder, "--microbatches=8", "--schedules=1f1b,gpipe,zb_h1", "--tune=")
    assert (done.returncode, done.stderr) == (0, "")
    found = report(folder)
    assert (found["devices"], found["microbatches"], found["unit"]) == (4, 8, "ms")
    assert found["lower_bound"] == 24
    assert found["memory_model"] == "padded"
    # With F = I = W = 1: (m + p - 1) * 3, and m * 3 + (p - 1)(F + I - W). On ticks GPipe and ZB-H1
    # wait for nobody; 1F1B, in which a short F meets a long B, is slower.
    times = {name: entry["makespan"] for name, entry in found["plans"].items()}
    assert times == {"1f1b": 33, "gpipe": 33, "zb_h1": 27}
    on_ticks = {name: entry["tick_makespan"] for name, entry in found["plans"].items()}
    assert (on_ticks["gpipe"], on_ticks["zb_h1"]) == (33, 27)
    assert on_ticks["1f1b"] > 33
    # The best is written, and is what the report says it is.
    plan = plans.load(folder / "out" / "plan.json")
    assert plan.name == "zb_h1"
    assert simulate(plan, COSTS).makespan == 27
    assert read_csv((folder / "out" / "schedule.csv").read_text()) == plan.schedule
    assert "costs.json, zb_h1" in (folder / "out" / "gantt.svg").read_text()
    assert json.loads((folder / "out" / "trace.json").read_text())["traceEvents"]
    assert "lower bound: 24.0 ms" in done.stdout
    assert [line[0] for line in done.stdout.splitlines() if "zb_h1 " in line][:1] == [">"]


def test_every_schedule_has_a_plan_or_a_reason(folder):
    done = of_costs(folder, "--microbatches=6", "--tune=")
    assert (done.returncode, done.stderr) == (0, "")
    found = report(folder)
    assert set(found["plans"]) | set(found["refused"]) == set(NAMED)
    assert not set(found["plans"]) & set(found["refused"])
    # 6 is no multiple of 4 devices, and these 4 pieces make no 8 stages and have no attention.
    assert "takes multiples of 4 micro-batches, not 6" in found["refused"]["interleaved_1f1b"]
    for name in ("hanayo", "helix_naive"):
        assert f"no plan for {name}: {found['refused'][name]}" in done.stdout


def test_the_limit_decides_what_is_valid_and_show_what_is_written(folder):
    arguments = ("--microbatches=8", "--schedules=gpipe,1f1b", "--tune=")
    done = of_costs(folder, *arguments, "--memory_limit_gb=5")
    assert (done.returncode, done.stderr) == (0, "")
    # GPipe keeps 8 micro-batches of 1 GB, 1F1B 4.
    assert {name: entry["valid"] for name, entry in report(folder)["plans"].items()} == {
        "gpipe": False,
        "1f1b": True,
    }
    assert plans.load(folder / "out" / "plan.json").name == "1f1b"
    assert "memory limit 4.66 GiB" in (folder / "out" / "gantt.svg").read_text()
    done = of_costs(folder, *arguments, "--memory_limit_gb=5", "--show=gpipe", "--memory_model=ideal")
    assert done.returncode == 0
    assert done.stderr == (
        "plan: --show is 'gpipe', which does not fit: its fullest device holds 7.45 GiB, 1.6 times the limit "
        "of 4.66 GiB\n"
    )
    assert plans.load(folder / "out" / "plan.json").name == "gpipe"
    assert report(folder)["memory_model"] == "ideal"
    done = of_costs(folder, *arguments, "--memory_limit_gb=1")
    assert done.returncode == 1
    assert done.stderr == (
        "plan: no plan is valid, so only report.json is written; the reasons stand above\n"
    )
    assert "not valid, above the memory limit: gpipe, 1f1b" in done.stdout
    assert [path.name for path in (folder / "out").iterdir()] == ["report.json"]


def test_the_search_adds_a_plan(folder):
    arguments = ("--microbatches=8", "--schedules=1f1b,zb_h1", "--budget_evals=300")
    done = of_costs(folder, *arguments, "--memory_model=ideal", "--memory_limit_gb=4")
    assert (done.returncode, done.stderr) == (0, "")
    plans_found = report(folder)["plans"]
    tuned = plans_found["tuned"]
    # No schedule of equal stages with as many micro-batches in flight as stages beats ZB-H1's 27 by more
    # than the bubble, 3; the bound is 24.
    assert 24 <= tuned["makespan"] <= plans_found["zb_h1"]["makespan"] == 27
    assert tuned["valid"]
    assert tuned["peak_bytes"] <= 4e9
    done = of_costs(folder, *arguments, "--show=tuned", "--tune=partition")
    assert (done.returncode, done.stderr) == (0, "")
    plan = plans.load(folder / "out" / "plan.json")
    # Only the partition is tuned, which is even here already: 1F1B with one stage a device.
    assert (plan.stage_bounds, plan.stage_to_device) == ((0, 1, 2, 3, 4), (0, 1, 2, 3))


def test_plans_under_cost_errors(folder):
    arguments = (
        "--microbatches=8",
        "--schedules=1f1b,zb_h1",
        "--budget_evals=50",
        "--perturb=0.05",
        "--seed=1",
    )
    done = of_costs(folder, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    found = report(folder)
    perturbed = found["perturbed"]
    assert [perturbed[key] for key in ("spread", "draws", "seed", "reference")] == [0.05, 400, 1, "tuned"]
    assert set(perturbed["plans"]) == set(found["plans"]) == {"1f1b", "zb_h1", "tuned"}
    for name, entry in perturbed["plans"].items():
        assert entry["makespan"] == found["plans"][name]["makespan"]
    assert perturbed["plans"]["1f1b"]["beaten"] > 0.99  # 33 to at most 27
    assert "share of draws in which tuned is faster" in done.stdout
    assert of_costs(folder, *arguments).stdout.split("memory:")[1:] == done.stdout.split("memory:")[1:]
    done = of_costs(folder, "--microbatches=8", "--schedules=1f1b,zb_h1", "--tune=", "--perturb=1e-9")
    assert report(folder)["perturbed"]["reference"] == "zb_h1"
    assert report(folder)["perturbed"]["plans"]["1f1b"]["beaten"] == 1
    of_costs(folder, "--microbatches=8", "--schedules=1f1b", "--tune=")
    assert "perturbed" not in report(folder)


def test_a_limit_that_no_plan_keeps(folder):
    arguments = ("--microbatches=8", "--schedules=1f1b", "--memory_model=ideal", "--budget_evals=20")
    done = of_costs(folder, *arguments, "--memory_limit_gb=0.5")
    assert done.returncode == 1
    assert "no plan for tuned: memory limit of 0.5 GB a device is too small: the leanest plan" in done.stdout
    assert "needs at least 1 GB on device 0, 0 bytes of it for parameters" in done.stdout
    assert of_costs(folder, *arguments, "--memory_limit_gb=1").returncode == 0


def test_head_shards_are_pieces(folder):
    head = PieceCost("head", "head", 3, 3, 3, stash_bytes=10**9)
    costs = CostTable("ms", (*COSTS.pieces[:3], head))
    table.save(costs, folder / "head.json")
    arguments = ("--microbatches=8", "--devices=4", f"--workdir={folder / 'out'}", "--schedules=1f1b")
    done = run(f"--costs={folder / 'head.json'}", *arguments, "--tune=partition,placement,schedule,head")
    assert (done.returncode, done.stderr) == (0, "")
    # Whole, the head alone takes 8 * 9 = 72; split it leaves 8 * 18 / 4 = 36 at least.
    assert 36 <= report(folder)["plans"]["tuned"]["makespan"] < 60
    plan = plans.load(folder / "out" / "plan.json")
    costs = table.load(folder / "out" / "costs.json")
    assert plan.pieces == tuple(piece.name for piece in costs.pieces)
    assert plan.pieces[3] == "head/0"
    assert simulate(plan, costs).makespan == pytest.approx(report(folder)["plans"]["tuned"]["makespan"])


def test_a_cost_table_needs_no_jax(folder):
    arguments = [f"--costs={folder / 'costs.json'}", "--devices=4", "--microbatches=4", "--schedules=1f1b"]
    arguments += ["--budget_evals=10"]
    code = (
        "import sys\n"
        f"sys.argv = {['plan', *arguments, f'--workdir={folder / "out"}']}\n"
        "from absl import app\n"
        "from experiments import plan\n"
        "try:\n"
        "    app.run(plan.main, flags_parser=plan.parse)\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_configuration_in_place_of_costs(folder):
    config, workdir = f"--config={folder / 'config.py'}", f"--workdir={folder / 'out'}"
    names = "--schedules=1f1b,helix_naive"
    done = run(config, workdir, names, "--config.batch.microbatches=2", "--budget_evals=50")
    assert (done.returncode, done.stderr) == (0, "")
    found = report(folder)
    assert (found["devices"], found["microbatches"], found["unit"]) == (2, 2, "s")
    assert found["memory_limit_bytes"] == 151_397_597_184  # of an H200
    assert all(entry["tick_makespan"] >= entry["makespan"] * 0.999 for entry in found["plans"].values())
    assert "helix_naive " in done.stdout
    done = run(config, workdir, names, "--devices=4")
    assert done.returncode == 1
    assert done.stderr == "plan: --devices stands beside --config; expected --config.mesh.stage=4\n"
    done = run(config, workdir, "--config.mesh.stage=0")
    assert done.returncode == 1
    assert done.stderr == "plan: field 'mesh.stage' is 0; expected at least 1\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--schedules=1f1b,zbh1",), "unknown schedule 'zbh1'; known: gpipe, gpipe_split, 1f1b,"),
        (
            ("--schedules=1f1b,interleaved_1f1b",),
            "schedule 'interleaved_1f1b' on 4 devices takes multiples of 4 micro-batches, not 6",
        ),
        (("--schedules=",), "--schedules is empty; expected names of schedules with commas between them"),
        (("--schedules=1f1b", "--show=gpipe"), "--show is 'gpipe'; expected one of --schedules, 1f1b"),
        (("--show=1f2b",), "unknown schedule '1f2b'; known: gpipe,"),
        (
            ("--tune=partition,speed",),
            "--tune: cannot tune 'speed'; known: partition, placement, schedule, recompute, attention, head",
        ),
        (
            ("--budget_evals=0",),
            "--budget_evals is '0'; expected a number of schedules that the search tries",
        ),
        (("--budget_s=0",), "--budget_s is 0; expected a number of seconds, more than 0"),
        (("--show=tuned", "--tune="), "--show is 'tuned' and --tune is empty; expected something to tune"),
        (("--perturb=-0.1",), "--perturb is -0.1; expected the standard deviation of random cost errors"),
        (("--perturb=0",), "--perturb is 0; expected the standard deviation of random cost errors"),
        (("--perturb=nan",), "--perturb is nan; expected the standard deviation of random cost errors"),
        (("--perturb=1",), "--perturb is 1; expected the standard deviation of random cost errors"),
        (("--perturb=",), "--perturb is ''; expected the standard deviation of random cost errors"),
        (("--memory_limit_gb=0",), "--memory_limit_gb is 0.0; expected the memory of a device in 10^9 bytes"),
        (("--memory_limit_gb=1e300",), "--memory_limit_gb is 1e+300; expected the memory of a device"),
        (("--costs=",), "--costs is empty; expected a cost table such as the costs.json of a run"),
        (("--seed=2147483648",), "--seed is '2147483648'; expected a number from 0 to 2^31 - 1"),
        (("--memory_limit_gb=nan",), "--memory_limit_gb is nan; expected the memory of a device"),
        (("--memory_limit_gb=much",), "--memory_limit_gb is 'much'; expected the memory of a device"),
        (("--memory_model=real",), "--memory_model is 'real'; expected <padded|ideal>: what one program"),
        (("--devices=0",), "--devices is '0'; expected a number of pipeline devices, at least 1"),
        (("--devices=5",), "4 pieces cannot fill 5 devices; expected a piece for each at least"),
        (
            ("--microbatches=100000000",),
            "100000000 micro-batches on 4 devices are too many to plan; expected at most 131,072 pairs",
        ),
        (
            ("--schedule=1f1b",),
            "unknown flag --schedule; did you mean --schedules? known: --budget_evals, --budget_s, --config,",
        ),
        (("1f1b",), "unexpected argument '1f1b'; flags start with --"),
        (("--workdir=",), "--workdir is missing; expected the folder to write to"),
        (("--workdir={}/costs.json/a",), "cannot write to --workdir {}/costs.json/a: Not a directory"),
        (("--costs={}/none.json",), "cannot read {}/none.json: No such file or directory"),
        (
            ("--costs={}/other.json",),
            "{}/other.json: field 'format' is 'jaxpipe-costs/0'; expected 'jaxpipe-",
        ),
        (("--costs={}/nan.json",), "{}/nan.json: pieces[2].W is nan; expected a number from 0 to 1e+30"),
    ],
)
def test_mistakes_get_one_line(folder, arguments, message):
    text = json.dumps(table.to_json(COSTS))
    (folder / "other.json").write_text(text.replace("costs/1", "costs/0"))
    data = table.to_json(COSTS)
    data["pieces"][2]["W"] = float("nan")
    (folder / "nan.json").write_text(json.dumps(data))
    done = of_costs(folder, "--microbatches=6", *(argument.format(folder) for argument in arguments))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("plan: ")
    assert message.format(folder) in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "neither --costs nor --config is given; expected one of them, as in --costs=costs.json"),
        (("--costs=costs.json",), "--devices is missing; expected a number of pipeline devices, at least 1"),
        (("--costs=c.json", "--devices=2"), "--microbatches is missing; expected a number of micro-batches"),
        (
            ("--costs=c.json", "--config=experiments/configs/llama_tiny.py"),
            "both --costs and --config are given",
        ),
        (("--config=none.py",), "--config is 'none.py', which is no file; expected one such as"),
    ],
)
def test_costs_or_a_configuration(arguments, message):
    done = run(*arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"plan: {message}")
