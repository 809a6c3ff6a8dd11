"""Why no plan fits: the least memory that one needs."""

from collections.abc import Sequence

from jaxpipe.planning.candidate import Candidate, Need, Space, need


def leanest(space: Space, candidates: Sequence[Candidate]) -> str:
    """One line on what the candidate that needs least needs with one micro-batch at a time on each device."""
    least: Need = min((need(space, candidate) for candidate in candidates), key=lambda found: found.total)
    return (
        f"memory limit of {_gigabytes(space.limit)} a device is too small: the leanest plan found needs at "
        f"least {_gigabytes(least.total)} on device {least.device}, {_gigabytes(least.state)} of it for "
        f"parameters, gradients and optimizer state and {_gigabytes(least.total - least.state)} for what one "
        "micro-batch stashes"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.4g} GB" if size >= 1e7 else f"{size:.4g} bytes"
