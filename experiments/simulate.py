"""Judges a schedule that someone else wrote: python -m experiments.simulate --schedule=FILE.csv.

FILE.csv is in the grammar of PyTorch's pipelining, one row a device. Prints makespan, bubble and what each
device does, or a grid that marks the first wrong action, and says why it is wrong; then the exit code is 1.
"""

import json
import re
import sys

from absl import app, flags

from experiments.command_line import parse, stop
from jaxpipe.costs import table
from jaxpipe.costs.table import CostTable
from jaxpipe.planning.interchange import Sheet, read_file
from jaxpipe.planning.judge import Unit, Verdict, judge

SCHEDULE = flags.DEFINE_string("schedule", None, "the CSV file of a schedule", required=True)
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


def main(argv: list[str]) -> None:
    """Reads, judges and prints."""
    if len(argv) > 1:
        stop(f"unexpected argument {argv[1]!r}; flags start with --")
    costs, placement = _costs(), _placement()
    try:
        if COSTS.value is not None:
            costs = table.load(COSTS.value)
        sheet = read_file(SCHEDULE.value)
        verdict, memory = judge(sheet, costs, placement), None
        if verdict.valid and isinstance(costs, CostTable):
            # Only here, since it starts Numba, which takes as long as all the rest.
            from jaxpipe.planning.judge_memory import peak_bytes

            memory = peak_bytes(sheet, verdict, costs, MEMORY.value or "padded")
    except ValueError as error:
        if JSON.value:
            _print_json(Verdict(str(error)), None)
            sys.exit(1)
        stop(str(error))
    if JSON.value:
        _print_json(verdict, memory)
        sys.exit(0 if verdict.valid else 1)
    _print(sheet, verdict, costs, memory)


def _costs() -> Unit:
    """The times from the flags, those left out as in `Unit`."""
    given = {name: flag.value for name, flag in TIMES.items() if flag.value is not None}
    if COSTS.value is not None and given:
        stop(f"--{next(iter(given))} stands beside --costs; expected one of the two")
    if COSTS.value is None and MEMORY.value is not None:
        stop("--memory_model stands without --costs, which tells what takes memory")
    for name, value in given.items():
        if not 0 <= value <= table.LARGEST:
            stop(f"--{name} is {value}; expected a number from 0 to {table.LARGEST:g}")
    return Unit(**given)


def _placement() -> tuple[int, ...] | None:
    if PLACEMENT.value is None:
        return None
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", PLACEMENT.value, re.ASCII):
        stop(f"--stage_to_device is {PLACEMENT.value!r}; expected the device of each stage, as in 0,1,1,0")
    return tuple(map(int, PLACEMENT.value.split(",")))


def _print_json(verdict: Verdict, memory: tuple[float, ...] | None) -> None:
    result = {
        "makespan": verdict.makespan,
        "bubble_fraction": verdict.bubble_fraction,
        "internal_bubble": verdict.internal_bubble,
        "busy": verdict.busy,
        "peak_inflight": verdict.peak_in_flight,
        "valid": verdict.valid,
        "error": verdict.error,
    }
    print(json.dumps(result | ({} if memory is None else {"peak_bytes": memory})))


def _print(sheet: Sheet, verdict: Verdict, costs: CostTable | Unit, memory: tuple[float, ...] | None) -> None:
    from rich.console import Console

    from jaxpipe.reports.schedule_grid import schedule_grid, verdict_lines, verdict_table

    console = Console()
    if not verdict.valid:
        if verdict.places:
            console.print(schedule_grid(sheet, verdict.places, console.width))
        stop(f"{SCHEDULE.value}: {verdict.error}")
    unit = costs.unit if isinstance(costs, CostTable) else "unit"
    for line in verdict_lines(sheet, verdict, unit):
        console.out(line, highlight=False)
    console.print(verdict_table(verdict, unit, memory))


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
