"""Judges a schedule that someone else wrote: python -m experiments.simulate --schedule=FILE.csv.

FILE.csv is in the grammar of PyTorch's pipelining, one row a device. With --plan=plan.json --costs=costs.json
it judges a plan instead. Prints makespan, bubble and what each device does, or a grid that marks the first
wrong action, and says why it is wrong.

The exit code is 0 for a valid schedule, 1 for a wrong one, and 2 where none was judged, since a flag is wrong
or a file cannot be read.
"""

import json
import re
import sys
from typing import NamedTuple, NoReturn

from absl import app, flags

from experiments import command_line
from jaxpipe.costs import table
from jaxpipe.planning import plan as plans
from jaxpipe.planning.interchange import Sheet, read_sheet, read_text, sheet_of
from jaxpipe.planning.judge import Unit, Verdict, judge

SCHEDULE = flags.DEFINE_string("schedule", None, "the CSV file of a schedule")
PLAN = flags.DEFINE_string("plan", None, "a plan in place of a schedule, such as the plan.json of a run")
COSTS = flags.DEFINE_string("costs", None, "a cost table such as the costs.json of a run")
TIMES = {
    "F": flags.DEFINE_float("F", None, "a number, the time of a forward (1)"),
    "I": flags.DEFINE_float("I", None, "a number, the time of an input gradient (1)"),
    "W": flags.DEFINE_float(
        "W", None, "a number, the time of a weight gradient (1); a full backward takes I + W"
    ),
    "comm": flags.DEFINE_float("comm", None, "a number, the one-way latency of a message (0)"),
}
PLACEMENT = flags.DEFINE_string(
    "stage_to_device", None, "the device of each stage, as in 0,1,1,0; by default the row it stands on"
)
MEMORY = flags.DEFINE_enum(
    "memory_model", None, ["padded", "ideal"], "how memory is counted with --costs (padded)"
)
JSON = flags.DEFINE_bool("json", False, "true or false; true prints one JSON object and nothing else")

NOT_JUDGED = 2
"""The exit code where nothing was judged."""


class Judged(NamedTuple):
    """A schedule and what it comes to.

    file: where it stands. sheet: None when the file is outside the grammar.
    unit: of its times. memory: peak bytes of every device, None without a cost table or when it is wrong.
    partition: how pieces came to their stages.
    """

    file: str
    sheet: Sheet | None
    verdict: Verdict
    unit: str = "unit"
    memory: tuple[float, ...] | None = None
    partition: str = "balanced"


def main(argv: list[str]) -> None:
    """Reads, judges and prints."""
    try:
        _check_flags(argv)
        judged = _judge_sheet() if PLAN.value is None else _judge_plan()
    except ValueError as error:
        _refuse(str(error), JSON.value)
    if JSON.value:
        _print_json(judged.verdict, judged.verdict.valid, judged.memory)
    else:
        _print(judged)
    sys.exit(0 if judged.verdict.valid else 1)


def parse(argv: list[str]) -> list[str]:
    """Parses the command line; what is wrong is said in one line, or as JSON where that is asked for."""
    try:
        return command_line.parse(argv)
    except SystemExit as stopped:
        if not isinstance(stopped.code, str):  # of --help
            raise
        as_json = any(re.fullmatch(r"--?json(=(true|t|1))?", argument, re.IGNORECASE) for argument in argv)
        _refuse(stopped.code.partition(": ")[2], as_json)


def _refuse(message: str, as_json: bool) -> NoReturn:
    """Ends the program where nothing was judged."""
    if as_json:
        _print_json(Verdict(message), None, None)
    else:
        print(f"simulate: {message}", file=sys.stderr)
    sys.exit(NOT_JUDGED)


def _check_flags(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}; flags start with --")
    for flag in (SCHEDULE, PLAN, COSTS):
        if flag.value == "":
            raise ValueError(f"--{flag.name} is empty; expected {flags.FLAGS[flag.name].help}")
    if SCHEDULE.value is None and PLAN.value is None:
        raise ValueError("--schedule is missing; expected the CSV file of a schedule, or --plan and --costs")
    if SCHEDULE.value is not None and PLAN.value is not None:
        raise ValueError("--plan stands beside --schedule; expected one of the two")
    if SCHEDULE.value is not None and SCHEDULE.value.lower().endswith(".json"):
        raise ValueError(
            f"--schedule is {SCHEDULE.value!r}; expected a CSV file, or for a plan "
            f"--plan={SCHEDULE.value} --costs=costs.json"
        )
    if PLAN.value is not None and COSTS.value is None:
        raise ValueError("--plan stands without --costs, the cost table that it was made for")
    if PLAN.value is not None and PLACEMENT.value is not None:
        raise ValueError("--stage_to_device stands beside --plan, which says where its stages are")
    given = next((name for name, flag in TIMES.items() if flag.value is not None), None)
    if COSTS.value is not None and given:
        raise ValueError(f"--{given} stands beside --costs; expected one of the two")
    if COSTS.value is None and MEMORY.value is not None:
        raise ValueError("--memory_model stands without --costs, which tells what takes memory")


def _judge_sheet() -> Judged:
    placement, costs = _placement(), _unit() if COSTS.value is None else table.load(COSTS.value)
    text = read_text(SCHEDULE.value)
    try:
        sheet = read_sheet(text)
    except ValueError as error:
        return Judged(SCHEDULE.value, None, Verdict(str(error)))
    verdict, memory = judge(sheet, costs, placement), None
    if isinstance(costs, Unit):
        return Judged(SCHEDULE.value, sheet, verdict)
    if verdict.valid:
        # Only here, since it starts Numba, which takes as long as all the rest.
        from jaxpipe.planning.judge_memory import peak_bytes

        memory = peak_bytes(sheet, verdict, costs, MEMORY.value or "padded")
    return Judged(SCHEDULE.value, sheet, verdict, costs.unit, memory)


def _judge_plan() -> Judged:
    costs, plan = table.load(COSTS.value), plans.load(PLAN.value)
    from jaxpipe.planning.judge_plan import judge_plan  # starts Numba

    verdict, memory = judge_plan(plan, costs, MEMORY.value or "padded")
    return Judged(PLAN.value, sheet_of(plan.schedule), verdict, costs.unit, memory, "as planned")


def _unit() -> Unit:
    """The times from the flags, those left out as in `Unit`."""
    given = {name: flag.value for name, flag in TIMES.items() if flag.value is not None}
    for name, value in given.items():
        if not 0 <= value <= table.LARGEST:
            raise ValueError(f"--{name} is {value}; expected a number from 0 to {table.LARGEST:g}")
    return Unit(**given)


def _placement() -> tuple[int, ...] | None:
    if PLACEMENT.value is None:
        return None
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", PLACEMENT.value, re.ASCII):
        raise ValueError(
            f"--stage_to_device is {PLACEMENT.value!r}; expected the device of each stage, as in 0,1,1,0"
        )
    return tuple(map(int, PLACEMENT.value.split(",")))


def _print_json(verdict: Verdict, valid: bool | None, memory: tuple[float, ...] | None) -> None:
    """One object; what does not apply is null, or left out where it takes a cost table.

    valid: None where nothing was judged.
    """
    result = {
        "makespan": verdict.makespan,
        "bubble_fraction": verdict.bubble_fraction,
        "internal_bubble": verdict.internal_bubble,
        "internal_idle": verdict.internal_idle,
        "busy": verdict.busy,
        "peak_inflight": verdict.peak_in_flight,
        "valid": valid,
        "error": verdict.error,
    }
    with_costs = {} if memory is None else {"peak_bytes": memory, "stage_bounds": verdict.stage_bounds}
    print(json.dumps(result | with_costs))


def _print(judged: Judged) -> None:
    from rich.console import Console

    from jaxpipe.reports.schedule_grid import schedule_grid, verdict_lines, verdict_table

    console, (_, sheet, verdict, unit, memory, partition) = Console(), judged
    if not verdict.valid:
        if verdict.places:
            console.print(schedule_grid(sheet, verdict.places, console.width))
        command_line.stop(f"{judged.file}: {verdict.error}")
    for line in verdict_lines(sheet, verdict, unit, partition):
        console.out(line, highlight=False)
    console.print(verdict_table(verdict, unit, memory))


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
