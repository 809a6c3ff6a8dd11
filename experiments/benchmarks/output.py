"""What the benchmarks have in common: how they begin, spreads, tables and --json."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from absl import flags, logging
from rich import box
from rich.table import Table

JSON = flags.DEFINE_string("json", None, "file to write the results to as JSON")


class Spread(NamedTuple):
    """Quartiles of repeated measurements, in their unit."""

    lower: float
    median: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.lower:.3g} to {self.upper:.3g})"


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of `values`, interpolated linearly."""
    return Spread(*(float(q) for q in np.quantile(values, (0.25, 0.5, 0.75))))


def begin(argv: list[str], devices: int) -> None:
    """Refuses arguments that are no flags, quiets the log and asks for virtual CPU devices."""
    if len(argv) > 1:
        sys.exit(f"{Path(argv[0]).name}: unexpected argument {argv[1]!r}; flags start with --")
    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_num_cpu_devices", devices)


def make_table(title: str, *columns: str) -> Table:
    """An empty table, the first column of names, that fits 80 columns unless its words do not."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def write_results(results: dict) -> None:
    """Writes `results`, with the versions and the host they were measured on, where --json says."""
    if JSON.value is None:
        return
    host = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
    }
    Path(JSON.value).write_text(json.dumps(results | {"host": host}, indent=1) + "\n")
