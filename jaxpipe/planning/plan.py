"""Plans: partition, placement, recompute policy and schedule as plain data."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FORMAT = "jaxpipe-plan/1"
PHASES = ("F", "I", "W", "B")
POLICIES = ("none", "full")


class Action(NamedTuple):
    """One entry of a schedule, written `{stage}{phase}{microbatch}` as in PyTorch's pipelining.

    phase: F forward, I input gradient, W weight gradient, B both gradients at once.
    """

    stage: int
    phase: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Raises ValueError when `text` is not an action."""
        match = re.fullmatch(r"(\d+)([FIWB])(\d+)", text.strip())
        if not match:
            raise ValueError(f"{text!r} is not an action; expected stage, one of F I W B, micro-batch, as in 0F3")
        return cls(int(match[1]), match[2], int(match[3]))


Schedule = tuple[tuple[Action, ...], ...]
"""One row a device: its actions in order."""


@dataclass(frozen=True)
class Plan:
    """Everything that the executor needs to know beside the model.

    pieces: names of the model's pieces, in order.
    stage_bounds: stage s holds pieces[stage_bounds[s]:stage_bounds[s + 1]].
    stage_to_device: the device that holds each stage.
    recompute: policy of each piece, "none" (stash residuals) or "full" (stash inputs only).
    """

    name: str
    devices: int
    microbatches: int
    pieces: tuple[str, ...]
    stage_bounds: tuple[int, ...]
    stage_to_device: tuple[int, ...]
    recompute: tuple[str, ...]
    schedule: Schedule

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_bounds) - 1

    def stage_pieces(self, stage: int) -> range:
        """Indices of the pieces in a stage."""
        return range(self.stage_bounds[stage], self.stage_bounds[stage + 1])
