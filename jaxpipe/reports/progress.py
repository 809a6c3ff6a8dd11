"""Lines about a search that is under way, and its end when time is up."""

import time
from collections.abc import Callable

from rich.console import Console

from jaxpipe.reports.units import format_duration, format_time

INTERVAL = 2.0
"""Seconds between lines."""


def search_progress(
    console: Console, evaluations: int, seconds: float, unit: str
) -> Callable[[int, float], bool]:
    """A function for `planning.tune`: says now and then how far the search is, and ends it after `seconds`.

    evaluations: how many the search makes at most. unit: of the makespan, as in cost tables.
    """
    began = last = time.perf_counter()

    def go_on(made: int, makespan: float) -> bool:
        nonlocal last
        now = time.perf_counter()
        if now - last > INTERVAL:
            last = now
            left = min((now - began) * (evaluations - made) / made, began + seconds - now)
            best = "none fits yet" if makespan == float("inf") else format_duration(makespan, unit)
            console.out(
                f"{now - began:6.1f} s  tuned: {made} of {evaluations} schedules, best {best}, "
                f"{format_time(max(left, 0.0))} left",
                highlight=False,
            )
        return now - began < seconds

    return go_on
