"""What plans come to when costs are not quite as predicted: as data, as a table, in report.json."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from jaxpipe.planning.perturb import LEAST, spreads
from jaxpipe.reports.plan_report import TUNED, Judged, best
from jaxpipe.reports.units import format_duration

DRAWS = 400
"""Draws of cost errors."""

TIE = 1e-9
"""Makespans closer than this are equal: sums in another order differ in their last digits."""


def perturb(
    judged: Mapping[str, Judged], spread: float, seed: int, tell: Callable[[str], None] = lambda name: None
) -> dict | None:
    """Draws cost errors for all valid plans, see `spreads`, and sums them up; None where no plan is valid.

    tell: is called with every plan's name when its draws are done.

    Returns:
      a JSON object: "spread", "draws", "seed", and what `summary` returns, beside the tuned plan or, where
        there is none, the best one.
    """
    valid = {name: found for name, found in judged.items() if not found.fault}
    if not valid:
        return None
    plans = {name: (found.plan, found.costs) for name, found in valid.items()}
    drawn = spreads(plans, spread, DRAWS, seed, tell)
    planned = {name: found.simulation.makespan for name, found in valid.items()}
    reference = TUNED if TUNED in valid else best(valid)
    return {"spread": spread, "draws": DRAWS, "seed": seed} | summary(planned, drawn, reference)


def summary(planned: Mapping[str, float], drawn: Mapping[str, np.ndarray], reference: str) -> dict:
    """Every plan's makespans in a few numbers, beside those of the plan named `reference`.

    Returns:
      a JSON object. "reference": the name. "plans": by name, the fastest as planned first, "makespan" without
        errors, "median", "p5" and "p95" (percentiles) with them, "beaten", the share of draws in which the
        reference is faster; it is null for the reference itself.
    """
    return {
        "reference": reference,
        "plans": {
            name: {
                "makespan": planned[name],
                "median": float(np.median(drawn[name])),
                "p5": float(np.quantile(drawn[name], 0.05)),
                "p95": float(np.quantile(drawn[name], 0.95)),
                "beaten": None if name == reference else _beaten(drawn[name], drawn[reference]),
            }
            for name in sorted(planned, key=planned.get)
        },
    }


def _beaten(own: np.ndarray, other: np.ndarray) -> float:
    return float(np.mean(other < own * (1 - TIE)))


def perturbed_table(perturbed: dict, unit: str) -> Table:
    """The plans of `perturb` side by side. unit: of their times, as in cost tables."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("plan", overflow="fold")
    for name in ("makespan", "median", "5%", "95%", "beaten"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, entry in perturbed["plans"].items():
        times = (format_duration(entry[key], unit) for key in ("makespan", "median", "p5", "p95"))
        share, reference = entry["beaten"], name == perturbed["reference"]
        table.add_row(
            f"{'>' if reference else ' '} {name}",
            *times,
            "-" if share is None else f"{share:.1%}",
            style="bold" if reference else "",
        )
    return table


def perturbed_legend(perturbed: dict) -> list[str]:
    """Lines below the table: what the error is, and what the columns hold."""
    spread, draws, reference = (perturbed[key] for key in ("spread", "draws", "reference"))
    return [
        f"perturbed: in each of {draws} draws the F, I and W of every piece are each multiplied by",
        f"an independent factor, 1 + {spread:g} × a standard normal number, at least {LEAST:g};",
        "the draws are the same for all plans; the order of actions and messages stay",
        f"median, 5%, 95%: of the makespan; beaten: share of draws in which {reference} is faster",
    ]


def add_to_report(folder: Path, perturbed: dict) -> None:
    """Puts the object of `perturb` into report.json, under "perturbed"."""
    path = folder / "report.json"
    data = json.loads(path.read_text()) | {"perturbed": perturbed}
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
