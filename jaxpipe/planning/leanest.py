"""The plan that needs least memory: the last resort of a search, and why nothing fits if it does not."""

import math
from collections.abc import Iterable

from jaxpipe.planning.candidate import Candidate, Need, Space, need


def leanest(candidates: Iterable[tuple[Space, Candidate]]) -> tuple[Space, Candidate, Need]:
    """The candidate that needs least with one micro-batch at a time on each device, and what it needs."""
    needs = ((space, candidate, need(space, candidate)) for space, candidate in candidates)
    return min(needs, key=lambda found: found[2].total)


def too_small(limit: float, least: Need) -> str:
    """One line on what the leanest candidate needs."""
    return (
        f"memory limit of {_gigabytes(limit)} a device is too small: the leanest plan found needs at "
        f"least {_gigabytes(_up(least.total))} on device {least.device}, {_gigabytes(least.state)} of it for "
        f"parameters, gradients and optimizer state and {_gigabytes(least.total - least.state)} for what one "
        "micro-batch stashes"
    )


def _up(size: float) -> float:
    """Rounded up to four digits, so that the figure that is named is enough."""
    digit = 10.0 ** (math.floor(math.log10(size)) - 3) if size else 1.0
    return math.ceil(size / digit - 1e-9) * digit


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.4g} GB" if size >= 1e7 else f"{size:.4g} bytes"
