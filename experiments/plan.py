"""Makes plans by the names of their schedules, searches for a better one, and compares them.

    python -m experiments.plan --costs=costs.json --devices=8 --microbatches=32 --workdir=DIR \\
        --schedules=s_1f1b,zb_h1 [--tune=partition,placement,schedule,recompute,attention,head] \\
        [--memory_limit_gb=80] [--memory_model=padded] [--budget_evals=1000] [--budget_s=10] [--seed=0] \\
        [--perturb=0.05] [--show=zb_h1]

With --config=FILE in place of --costs, --devices and --microbatches, the costs are those predicted for the
configuration's model and chip; fields are overridden as in --config.mesh.stage=8. Without --schedules all are
compared that take these numbers. The row `tuned` is what the search finds; fewer words tune only what they
name, --tune= searches nothing. The search ends after --budget_evals schedules, and finds the same again with
the same --seed, or earlier after --budget_s seconds. --perturb=0.05 says what becomes of valid plans when
costs are off by 5%, one standard deviation, in 400 draws with --seed. DIR gets report.json ("perturbed" is
described in `reports.perturb_report`) and, of the fastest valid plan or the one to show, plan.json,
schedule.csv, gantt.svg and trace.json.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

from experiments import command_line
from experiments.command_line import stop

COSTS = flags.DEFINE_string("costs", None, "a cost table such as the costs.json of a run")
DEVICES = flags.DEFINE_integer("devices", None, "a number of pipeline devices, at least 1", lower_bound=1)
MICROBATCHES = flags.DEFINE_integer(
    "microbatches", None, "a number of micro-batches, at least 1", lower_bound=1
)
SCHEDULES = flags.DEFINE_list("schedules", None, "names of schedules with commas between them, none for all")
TUNE = flags.DEFINE_list(
    "tune",
    "partition,placement,schedule,recompute,attention",
    "words with commas between them from partition, placement, schedule, recompute, attention, head; "
    "nothing to search nothing",
)
EVALUATIONS = flags.DEFINE_integer(
    "budget_evals",
    None,
    "a number of schedules that the search tries, at least 1; by default some seconds' worth",
    lower_bound=1,
)
SECONDS = flags.DEFINE_float(
    "budget_s", float("inf"), "a number of seconds, more than 0, after which the search ends early"
)
SEED = flags.DEFINE_integer(
    "seed",
    0,
    "a number from 0 to 2^31 - 1: the chance in the search and in cost errors",
    lower_bound=0,
    upper_bound=2**31 - 1,
)
PERTURB = flags.DEFINE_float(
    "perturb",
    None,
    "the standard deviation of random cost errors, more than 0 and less than 1; without it there are none",
)
WORKDIR = flags.DEFINE_string("workdir", None, "the folder to write to; made if missing")
LIMIT = flags.DEFINE_float(
    "memory_limit_gb",
    None,
    "the memory of a device in 10^9 bytes, more than 0 and at most 1e21; by default what the costs say",
)
MEMORY = flags.DEFINE_enum(
    "memory_model",
    "padded",
    ["padded", "ideal"],
    "what one program for all devices allocates, or what each device uses",
)
SHOW = flags.DEFINE_string(
    "show", None, "the schedule whose plan is written; by default the fastest valid one"
)

PATIENCE = 1.0
"""Seconds after which a line says which schedule took them."""


def main(argv: list[str]) -> None:
    """Reads, plans, prints, writes."""
    if len(argv) > 1:
        stop(f"unexpected argument {argv[1]!r}; flags start with --")
    _check_flags()
    workdir = _open(WORKDIR.value)
    # Only now, so that mistakes in flags are answered at once.
    from rich.console import Console

    from jaxpipe.costs.table import save
    from jaxpipe.reports import plan_report

    console = Console()
    try:
        problem, ticks, title = _from_config() if _config_given() else _from_costs()
        judged, refused = _judge_all(problem, ticks, console)
        if TUNE.value:
            _search(problem, ticks, judged, refused, console)
        shown = _shown(judged)
        for line in plan_report.heading(problem):
            console.out(line, highlight=False)
        console.print()
        console.print(plan_report.report_table(problem, judged, shown))
        console.print()
        for line in (*plan_report.legend(problem), "", *plan_report.remarks(problem, judged, refused)):
            console.out(line, highlight=False)
        plan_report.write_report(workdir, problem, judged, refused)
        if PERTURB.value is not None:
            _perturb(problem, judged, workdir, console)
        if _config_given() or (shown is not None and judged[shown].costs != problem.costs):
            save(problem.costs if shown is None else judged[shown].costs, workdir / "costs.json")
        left_out = []
        if shown is None:
            for name in plan_report.FILES:  # those of an earlier report
                (workdir / name).unlink(missing_ok=True)
        else:
            left_out = plan_report.write_plan(workdir, judged[shown], problem, title)
    except ValueError as error:
        stop(str(error))
    except OSError as error:
        stop(f"cannot write to --workdir {workdir}: {error.strerror}")
    for line in left_out:
        console.out(line, highlight=False)
    written = "report.json" + (f", and of {shown} the plan, its picture and trace" if shown else "")
    console.out(f"{workdir}: {written}", highlight=False)
    if SHOW.value and (reason := plan_report.misfit(judged[shown], problem)):
        print(f"plan: --show is {shown!r}, which {reason}", file=sys.stderr)
    if shown is None:
        stop("no plan is valid, so only report.json is written; the reasons stand above")


def parse(argv: list[str]) -> list[str]:
    """Parses the command line; exits with one line when a flag is missing, unknown or has a wrong value."""
    if any(re.match(r"--?(no)?config\b", argument) for argument in argv[1:]):
        from experiments import flags as with_config  # imports JAX

        with_config.define_config()
        return with_config.parse(argv)
    return command_line.parse(argv, others=["config"])


def _config_given() -> bool:
    return "config" in flags.FLAGS


def _check_flags() -> None:
    numbers = {
        "devices": (DEVICES.value, "mesh.stage"),
        "microbatches": (MICROBATCHES.value, "batch.microbatches"),
    }
    if _config_given() == (COSTS.value is not None):
        found = "both --costs and --config are" if _config_given() else "neither --costs nor --config is"
        stop(f"{found} given; expected one of them, as in --costs=costs.json")
    for name, (value, field) in numbers.items():
        if _config_given() and value is not None:
            stop(f"--{name} stands beside --config; expected --config.{field}={value}")
        if not _config_given() and value is None:
            stop(f"--{name} is missing; expected {flags.FLAGS[name].help}")
    for flag in (COSTS, SCHEDULES):
        if flag.value in ("", []):
            stop(f"--{flag.name} is empty; expected {flags.FLAGS[flag.name].help}")
    _check_tuning()
    if LIMIT.value is not None and not 0 < LIMIT.value <= 1e21:
        stop(f"--memory_limit_gb is {LIMIT.value}; expected {flags.FLAGS['memory_limit_gb'].help}")
    if PERTURB.value is not None and not 0 < PERTURB.value < 1:
        stop(f"--perturb is {PERTURB.value:g}; expected {flags.FLAGS['perturb'].help}")
    if not WORKDIR.value:
        stop(f"--workdir is missing; expected {flags.FLAGS['workdir'].help}")


def _check_tuning() -> None:
    from jaxpipe.planning.tune import check_words

    try:
        check_words(TUNE.value)
    except ValueError as error:
        stop(f"--tune: {error}")
    if "head" in TUNE.value and _config_given():
        stop("--tune names head beside --config; expected it beside --costs, as models have no shards yet")
    if not SECONDS.value > 0:
        stop(f"--budget_s is {SECONDS.value:g}; expected {flags.FLAGS['budget_s'].help}")
    if SHOW.value == "tuned" and not TUNE.value:
        stop("--show is 'tuned' and --tune is empty; expected something to tune")


def _open(folder: str) -> Path:
    """The folder, made and tried before minutes of planning."""
    workdir = Path(folder)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        stop(f"cannot write to --workdir {folder}: {error.strerror}")
    return workdir


def _from_costs():
    """The problem of the flags, a function from a plan to its time on ticks, and a title."""
    from jaxpipe.costs.table import load
    from jaxpipe.program.arrange import arrange
    from jaxpipe.program.from_costs import specs_from_costs
    from jaxpipe.reports.plan_report import make_problem

    costs = load(COSTS.value)

    def ticks(plan, costs):
        return arrange(plan, specs_from_costs(costs), costs)[0].makespan

    problem = make_problem(costs, DEVICES.value, MICROBATCHES.value, _limit_bytes(), MEMORY.value)
    return problem, ticks, Path(COSTS.value).name


def _from_config():
    """The same from a configuration; the model is traced, nothing is computed."""
    from experiments.flags import resolve

    config = resolve(flags.FLAGS["config"].value)
    import jax

    from jaxpipe.models.code import abstract_mesh
    from jaxpipe.reports.plan_report import make_problem
    from jaxpipe.runtime.mesh import ask_for_virtual_devices, make_mesh
    from jaxpipe.training.prepare import build_model, price, tick_times

    sizes = config.mesh
    axes = sizes.stage, sizes.data, sizes.model
    # GPUs that may be here are of no use.
    jax.config.update("jax_platforms", "cpu")
    if config.plan.chip == "cpu":
        # Code for CPUs stashes more than code for accelerators, which a mesh without devices stands for.
        ask_for_virtual_devices(sizes.stage * sizes.data * sizes.model)
        mesh = make_mesh(*axes).abstract_mesh
    else:
        mesh = abstract_mesh(*axes)
    model = build_model(config)
    costs = price(config, model, mesh)
    problem = make_problem(costs, sizes.stage, config.batch.microbatches, _limit_bytes(), MEMORY.value)
    return problem, tick_times(config, model, mesh), f"{model.name} on {config.plan.chip}"


def _limit_bytes() -> float | None:
    return None if LIMIT.value is None else LIMIT.value * 1e9


def _judge_all(problem, ticks, console):
    """(name -> judged plan, name -> why there is none). Of schedules asked for, all must be there."""
    from jaxpipe.planning.named import NAMED, check_numbers
    from jaxpipe.reports.plan_report import TUNED, make_judged

    asked = SCHEDULES.value is not None
    names = list(dict.fromkeys(SCHEDULES.value)) if asked else list(NAMED)
    named_show = None if SHOW.value == TUNED else SHOW.value
    for name in [*(names if asked else []), *([] if named_show is None else [named_show])]:
        check_numbers(name, problem.devices, problem.microbatches)
    if named_show is not None and named_show not in names:
        raise ValueError(f"--show is {SHOW.value!r}; expected one of --schedules, {', '.join(names)}")
    judged, refused = {}, {}
    for name in names:
        began = time.perf_counter()
        try:
            judged[name] = make_judged(name, problem, ticks)
        except ValueError as error:
            if asked or name == SHOW.value:
                raise
            refused[name] = str(error)
        if (seconds := time.perf_counter() - began) > PATIENCE:
            console.out(f"{seconds:6.1f} s  {name}", highlight=False)
    return judged, refused


def _search(problem, ticks, judged, refused, console) -> None:
    """Adds the plan that the search finds, or why there is none."""
    from jaxpipe.planning.tune import usual_evaluations
    from jaxpipe.planning.warm import warm_search
    from jaxpipe.reports.plan_report import TUNED, make_tuned
    from jaxpipe.reports.progress import search_progress

    evaluations = EVALUATIONS.value or usual_evaluations(problem.devices, problem.microbatches)
    warm_search()
    go_on = search_progress(console, evaluations, SECONDS.value, problem.costs.unit)
    given = [found.plan for found in judged.values() if not found.fault]
    words = tuple(dict.fromkeys(TUNE.value))
    try:
        judged[TUNED] = make_tuned(problem, ticks, words, evaluations, SEED.value, given, go_on)
    except ValueError as error:
        if SHOW.value == TUNED:
            raise
        refused[TUNED] = str(error)


def _perturb(problem, judged, workdir, console) -> None:
    """Prints and writes what valid plans come to under random cost errors."""
    from jaxpipe.reports import perturb_report

    began = last = time.perf_counter()

    def tell(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > PATIENCE:
            last = now
            console.out(f"{now - began:6.1f} s  cost errors: {name}", highlight=False)

    if perturbed := perturb_report.perturb(judged, PERTURB.value, SEED.value, tell):
        console.print()
        console.print(perturb_report.perturbed_table(perturbed, problem.costs.unit))
        console.print()
        for line in perturb_report.perturbed_legend(perturbed):
            console.out(line, highlight=False)
        perturb_report.add_to_report(workdir, perturbed)


def _shown(judged) -> str | None:
    """The schedule whose plan is written."""
    from jaxpipe.reports.plan_report import best

    if SHOW.value is None:
        return best(judged)
    if judged[SHOW.value].simulation is None:
        raise ValueError(f"--show is {SHOW.value!r}, which cannot run: {judged[SHOW.value].fault}")
    return SHOW.value


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
