"""Plans: partition, placement, recompute policy and schedule as plain data."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
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
            raise ValueError(
                f"{text!r} is not an action; expected stage, one of F I W B, micro-batch, as in 0F3"
            )
        return cls(int(match[1]), match[2], int(match[3]))


Schedule = tuple[tuple[Action, ...], ...]
"""One row a device: its actions in order."""


class Event(NamedTuple):
    """One action in time, predicted or measured; `start` and `end` in one unit, from the step's start."""

    device: int
    action: Action
    start: float
    end: float


def internal_idle(events: Sequence[Sequence[Event]], busy: Sequence[float]) -> tuple[float, ...]:
    """Of each device, the idle time between the start of its first event and the end of its last."""
    return tuple(row[-1].end - row[0].start - used if row else 0.0 for row, used in zip(events, busy))


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


def to_json(plan: Plan) -> dict:
    """The plan as a JSON object; every schedule row becomes one string such as "0F0 0F1 0B0"."""
    data = {"format": FORMAT}
    for field in fields(Plan):
        value = getattr(plan, field.name)
        data[field.name] = list(value) if isinstance(value, tuple) else value
    data["schedule"] = [" ".join(map(str, row)) for row in plan.schedule]
    return data


def from_json(data: dict) -> Plan:
    """The inverse of `to_json`. Only the types are looked at; `check` tells whether the plan is right.

    Raises:
      ValueError: naming the field that is missing, unknown or of a wrong type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"a plan must be a JSON object, not {type(data).__name__}")
    if data.get("format") != FORMAT:
        raise ValueError(f"field 'format' is {data.get('format')!r}; expected {FORMAT!r}")
    known = [field.name for field in fields(Plan)]
    if unknown := sorted(set(data) - {"format", *known}):
        raise ValueError(f"unknown fields {unknown} in a plan; known: {known}")
    if missing := [name for name in known if name not in data]:
        raise ValueError(f"missing fields {missing} in a plan")
    for name, kind in (("name", str), ("devices", int), ("microbatches", int)):
        _typed(name, data[name], kind)
    lists = {"pieces": str, "stage_bounds": int, "stage_to_device": int, "recompute": str, "schedule": str}
    for name, kind in lists.items():
        _typed(name, data[name], list)
        for i, value in enumerate(data[name]):
            _typed(f"{name}[{i}]", value, kind)
    values = {name: tuple(data[name]) if name in lists else data[name] for name in known}
    values["schedule"] = tuple(_parse_row(f"schedule[{i}]", row) for i, row in enumerate(data["schedule"]))
    return Plan(**values)


def _typed(where: str, value, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"field {where!r} is {value!r}; expected {kind.__name__}")


def _parse_row(where: str, text: str) -> tuple[Action, ...]:
    try:
        return tuple(map(Action.parse, text.split()))
    except ValueError as error:
        raise ValueError(f"field {where!r}: {error}") from error


def save(plan: Plan, path: Path | str) -> None:
    """Writes the plan as JSON."""
    Path(path).write_text(json.dumps(to_json(plan), indent=1) + "\n")


def load(path: Path | str) -> Plan:
    """Reads a plan that `save` (or anybody else) wrote; call `check` before you trust it.

    Raises:
      ValueError: naming the file, and the field that is wrong; also where there is no such file.
    """
    try:
        return from_json(json.loads(Path(path).read_text("utf-8-sig")))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply; expected a plan as JSON") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check(plan: Plan, floating_stages: Collection[int] = ()) -> None:
    """Proves that a plan is complete and well formed; deadlocks are found by `simulator.simulate`.

    floating_stages: stages without parameters, whose micro-batches may run on any device (as the
      attention of HelixPipe, arXiv 2507.00394, does). One micro-batch still stays on one device.

    Raises:
      ValueError: one line naming the field or action that is wrong and what would be right.
    """
    _check_partition(plan)
    if len(plan.schedule) != plan.devices:
        raise ValueError(
            f"schedule has {len(plan.schedule)} rows; expected one for each of {plan.devices} devices"
        )
    found: dict[tuple[int, int], dict[str, int]] = {}
    for device, row in enumerate(plan.schedule):
        for action in row:
            _check_action(plan, device, action, found.setdefault((action.stage, action.microbatch), {}))
            home = plan.stage_to_device[action.stage]
            if device != home and action.stage not in floating_stages:
                raise ValueError(
                    f"action {action} stands on device {device}; stage {action.stage} is on device {home}"
                )
    for stage in range(plan.stages):
        for microbatch in range(plan.microbatches):
            phases = set(found.get((stage, microbatch), ()))
            if phases == {"F", "B"} or phases == {"F", "I", "W"}:
                continue
            missing = {"F"} - phases or ({"I", "W"} - phases if phases & {"I", "W"} else {"B"})
            names = ", ".join(str(Action(stage, phase, microbatch)) for phase in sorted(missing))
            raise ValueError(
                f"schedule lacks {names}; each stage runs every micro-batch by F and B or F, I, W"
            )


def _check_partition(plan: Plan) -> None:
    """The part of `check` that concerns everything but the schedule."""
    for name in ("devices", "microbatches"):
        if getattr(plan, name) < 1:
            raise ValueError(f"{name} is {getattr(plan, name)}; expected at least 1")
    bounds, count = plan.stage_bounds, len(plan.pieces)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != count:
        raise ValueError(
            f"stage_bounds {list(bounds)} must start at 0 and end at {count}, the number of pieces"
        )
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        if stop <= start:
            raise ValueError(
                f"stage {stage} is empty or runs backwards: stage_bounds go from {start} to {stop}"
            )
    if len(plan.stage_to_device) != plan.stages:
        raise ValueError(f"stage_to_device has {len(plan.stage_to_device)} entries for {plan.stages} stages")
    for stage, device in enumerate(plan.stage_to_device):
        if not 0 <= device < plan.devices:
            raise ValueError(f"stage {stage} is on device {device}; expected 0 to {plan.devices - 1}")
    if len(plan.recompute) != count:
        raise ValueError(f"recompute has {len(plan.recompute)} entries for {count} pieces")
    for piece, policy in zip(plan.pieces, plan.recompute):
        if policy not in POLICIES:
            raise ValueError(f"recompute of piece {piece!r} is {policy!r}; expected one of {list(POLICIES)}")


def _check_action(plan: Plan, device: int, action: Action, found: dict[str, int]) -> None:
    """Checks one action against those of its stage and micro-batch before it; adds it to `found`."""
    stage, phase, microbatch = action
    if phase not in PHASES:
        raise ValueError(
            f"action {action} on device {device}: phase {phase!r}; expected one of {list(PHASES)}"
        )
    if not 0 <= stage < plan.stages:
        raise ValueError(f"action {action} on device {device}: stages go from 0 to {plan.stages - 1}")
    if not 0 <= microbatch < plan.microbatches:
        raise ValueError(
            f"action {action} on device {device}: micro-batches go from 0 to {plan.microbatches - 1}"
        )
    for other, other_device in found.items():
        twin = Action(stage, other, microbatch)
        if other == phase:
            raise ValueError(f"action {action} stands twice: on device {other_device} and on device {device}")
        if phase != "F" and other != "F" and "B" in (phase, other):
            raise ValueError(f"action {action} on device {device} clashes with {twin}: B is I and W at once")
        if other_device != device:
            raise ValueError(f"action {action} stands on device {device} but {twin} on device {other_device}")
    needed = {"F": None, "W": "I"}.get(phase, "F")
    if needed and needed not in found:
        before = Action(stage, needed, microbatch)
        raise ValueError(f"action {action} on device {device} stands before {before}, whose result it needs")
    found[phase] = device
