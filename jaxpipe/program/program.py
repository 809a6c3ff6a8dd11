"""Programs: a plan as integer tables that one compiled interpreter reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from jaxpipe.costs.table import CostTable
from jaxpipe.planning.plan import Plan
from jaxpipe.program.arrange import Arrangement, arrange
from jaxpipe.program.instructions import Form
from jaxpipe.program.patterns import Pattern, to_pattern
from jaxpipe.program.registers import Allocation
from jaxpipe.program.spec import PieceSpec
from jaxpipe.program.ticks import Channel


class Op(NamedTuple):
    """One branch of the interpreter: a phase of a kind on one parameter slot.

    slot: None where the kind's slots are stacked and the table `slot` names one.
    kept: values that it reads and later pieces read too; their cotangents come in and are added to.
    """

    kind: str
    policy: str
    slot: int | None
    phase: str
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Signature:
    """All that the compiled step depends on beside the model; plans with equal signatures share it.

    slots: (kind, parameter slots a device) by kind; only kinds with parameters.
    registers: (class, count) by class; classes that travel have one more, where an arrival that
        nobody sent is written.
    patterns: sets of permutes, of which each tick runs one; for each channel, the devices that send.
    ticks, instructions: lengths of the tables; programs may be shorter.
    operands: width of the operand table.
    """

    devices: int
    microbatches: int
    ops: tuple[Op, ...]
    slots: tuple[tuple[str, int], ...]
    registers: tuple[tuple[str, int], ...]
    channels: tuple[Channel, ...]
    patterns: tuple[Pattern, ...]
    ticks: int
    instructions: int
    operands: int


@dataclass(frozen=True, eq=False)
class Program:
    """A plan lowered to ticks. All tables are int32 with one row a device (P devices).

    slots: kind -> for each device, the pieces in its parameter slots of that kind.
    length: ticks in use.
    pattern [T]: of each tick, as an index into signature.patterns.
    first, count [P, T]: the instructions of each tick are first .. first + count.
    op, microbatch, slot [P, N]: of each instruction, op as an index into signature.ops.
    operands [P, N, A]: register numbers of inputs, then outputs.
    send, receive [P, C, T]: for each channel, the register sent and the one written on arrival.
    """

    signature: Signature
    slots: dict[str, tuple[tuple[int, ...], ...]]
    length: int
    pattern: np.ndarray
    first: np.ndarray
    count: np.ndarray
    op: np.ndarray
    microbatch: np.ndarray
    slot: np.ndarray
    operands: np.ndarray
    send: np.ndarray
    receive: np.ndarray

    def tables(self) -> dict[str, np.ndarray]:
        """The tables by name, as the executor takes them."""
        names = ("first", "count", "op", "microbatch", "slot", "operands", "send", "receive")
        tables = {name: getattr(self, name) for name in names}
        return tables | {"pattern": np.tile(self.pattern, (self.signature.devices, 1))}


def slots_by_kind(plan: Plan, pieces: Sequence[PieceSpec]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """kind -> for each device, its pieces of that kind in order: piece slots[k][d][j] is in slot j of d."""
    held = {spec.kind: [[] for _ in range(plan.devices)] for spec in pieces}
    for stage, device in enumerate(plan.stage_to_device):
        for i in plan.stage_pieces(stage):
            held[pieces[i].kind][device].append(i)
    return {kind: tuple(tuple(sorted(d)) for d in devices) for kind, devices in held.items()}


def lower(
    plan: Plan,
    pieces: Sequence[PieceSpec],
    stacked: bool = False,
    costs: CostTable | None = None,
    patterns: int = 1,
) -> Program:
    """Lowers a plan to a program, arranged on ticks as `arrange` finds best by `costs`.

    patterns: the most sets of permutes that the step may be compiled with.
    stacked: one op serves all parameter slots of a kind.

    Raises:
      ValueError: the schedule deadlocks; the plan is for other pieces or recompute policies; it runs a piece
        away from its parameters; or `costs` are of other pieces.
    """
    check_fits(plan, pieces)
    return emit(plan, pieces, stacked, *arrange(plan, pieces, costs, patterns))


def emit(
    plan: Plan, pieces: Sequence[PieceSpec], stacked: bool, arranged: Arrangement, allocation: Allocation
) -> Program:
    """The tables of a plan that `arrange` has put on ticks."""
    rows, timetable, channels = arranged.rows, arranged.timetable, arranged.channels
    slots = slots_by_kind(plan, pieces)
    slot_of = {i: j for devices in slots.values() for held in devices for j, i in enumerate(held)}

    def op_of(form: Form) -> Op:
        spec, slot = pieces[form.piece], slot_of[form.piece]
        slot = None if stacked and spec.has_params else slot if spec.has_params else 0
        return Op(spec.kind, spec.policy, slot, form.phase, form.kept)

    streams = [[x for action in row for x in action] for row in rows]
    op_by_phase = {x.form[:2]: op_of(x.form) for stream in streams for x in stream}
    ops = tuple(sorted(set(op_by_phase.values())))
    op_number, channel_number = ({v: i for i, v in enumerate(values)} for values in (ops, channels))
    width = max((len(x.inputs) + len(x.outputs) for s in streams for x in s), default=0)
    length, longest = timetable.length, max(map(len, streams))
    counts = {name: bucket(count, 8) for name, count in allocation.counts.items()}
    with_params = {spec.kind: spec for spec in pieces if spec.has_params}.values()
    signature = Signature(
        plan.devices,
        plan.microbatches,
        ops,
        tuple(sorted((s.kind, max(map(len, slots[s.kind]))) for s in with_params)),
        tuple(sorted(counts.items())),
        channels,
        tuple(to_pattern(senders, len(channels)) for senders in arranged.patterns),
        length,
        longest,
        width,
    )
    devices = plan.devices
    first, count = np.zeros((2, devices, length), np.int32)
    op, microbatch, slot = np.zeros((3, devices, longest), np.int32)
    operands = np.zeros((devices, longest, width), np.int32)
    for d, row in enumerate(rows):
        at = 0
        for tick, action in zip(timetable.ticks[d], row):
            first[d, tick], count[d, tick] = at, len(action)
            for x in action:
                op[d, at], microbatch[d, at] = op_number[op_by_phase[x.form[:2]]], x.microbatch
                slot[d, at] = slot_of[x.form.piece] if pieces[x.form.piece].has_params else 0
                registers = [allocation.register[d, t] for t in (*x.inputs, *x.outputs)]
                operands[d, at, : len(registers)] = registers
                at += 1
    send = np.zeros((devices, len(channels), length), np.int32)
    receive = np.zeros((devices, len(channels), length), np.int32)
    for c, channel in enumerate(channels):
        receive[:, c] = counts[channel.register_class]  # the spare register
    for m in timetable.messages:
        c, target = channel_number[m.channel], m.source + m.channel.offset
        send[m.source, c, m.tick] = allocation.register[m.source, m.token]
        receive[target, c, m.tick] = allocation.register[target, m.token]
    pattern = np.array(arranged.pattern, np.int32)
    program = Program(
        signature, slots, length, pattern, first, count, op, microbatch, slot, operands, send, receive
    )
    return fit(program, replace(signature, ticks=bucket(length), instructions=bucket(longest)))


def check_fits(plan: Plan, pieces: Sequence[PieceSpec]) -> None:
    """Raises ValueError where the plan and the pieces it is lowered with disagree."""
    if len(plan.pieces) != len(pieces):
        raise ValueError(f"the plan has {len(plan.pieces)} pieces, the model {len(pieces)}")
    for i, (name, policy, spec) in enumerate(zip(plan.pieces, plan.recompute, pieces)):
        if name != spec.name:
            raise ValueError(f"piece {i} is {name!r} in the plan and {spec.name!r} in the model")
        if spec.policy not in (policy, "forward"):
            raise ValueError(f"piece {name!r} has policy {policy!r} in the plan, code for {spec.policy!r}")
    for device, row in enumerate(plan.schedule):
        for action in row:
            home = plan.stage_to_device[action.stage]
            if device == home:
                continue
            if fixed := [pieces[i].name for i in plan.stage_pieces(action.stage) if pieces[i].has_params]:
                raise ValueError(
                    f"action {action} stands on device {device}, the parameters of {fixed[0]!r} on {home}"
                )


def bucket(count: int, steps: int = 4) -> int:
    """`count` rounded up to `steps` a doubling (a power of two), so that similar programs share a step."""
    step = 1 << max(0, count.bit_length() - steps.bit_length())
    return -(-count // step) * step


def union(signatures: Sequence[Signature]) -> Signature:
    """The smallest signature that programs of all the given ones fit.

    Raises:
      ValueError: they differ in devices, micro-batches, or whether the slots of a kind are stacked.
    """
    if len({(s.devices, s.microbatches) for s in signatures}) != 1:
        raise ValueError("programs share an executable only with equal devices and micro-batches")
    ops = {op for s in signatures for op in s.ops}
    stacked = {op.kind for op in ops if op.slot is None}
    if mixed := sorted({op.kind for op in ops if op.slot is not None} & stacked):
        raise ValueError(f"slots of kinds {mixed} are stacked in one program and static in another")
    channels = tuple(sorted({c for s in signatures for c in s.channels}))
    return Signature(
        signatures[0].devices,
        signatures[0].microbatches,
        tuple(sorted(ops)),
        _largest(s.slots for s in signatures),
        _largest(s.registers for s in signatures),
        channels,
        _joined([[_widened(p, s.channels, channels) for p in s.patterns] for s in signatures]),
        max(s.ticks for s in signatures),
        max(s.instructions for s in signatures),
        max(s.operands for s in signatures),
    )


def stacked_kinds(signature: Signature) -> tuple[str, ...]:
    """The kinds whose parameter slots share ops."""
    return tuple(sorted({op.kind for op in signature.ops if op.slot is None}))


def _largest(counts: Iterable[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...]:
    result: dict[str, int] = {}
    for name, count in chain.from_iterable(counts):
        result[name] = max(count, result.get(name, 0))
    return tuple(sorted(result.items()))


def _widened(pattern: Pattern, channels: Sequence[Channel], wider: Sequence[Channel]) -> Pattern:
    """The same pattern over more channels."""
    senders = dict(zip(channels, pattern))
    return tuple(senders.get(channel, ()) for channel in wider)


def _joined(patterns: Sequence[Sequence[Pattern]]) -> tuple[Pattern, ...]:
    """Patterns for programs with these: the one that holds all when each has one, else every one of them."""
    if all(len(own) == 1 for own in patterns):
        every = zip(*(own[0] for own in patterns))
        return (tuple(tuple(sorted(set(chain.from_iterable(senders)))) for senders in every),)
    return tuple(sorted({pattern for own in patterns for pattern in own}))


def _covering(pattern: Pattern, patterns: Sequence[Pattern]) -> int:
    """The smallest of `patterns` that holds `pattern`, as an index."""
    found = [i for i, other in enumerate(patterns) if all(set(a) <= set(b) for a, b in zip(pattern, other))]
    if not found:
        raise ValueError("the program needs permutes that no pattern of the signature has")
    return min(found, key=lambda i: sum(map(len, patterns[i])))


def fit(program: Program, signature: Signature) -> Program:
    """The same program in the tables of a wider signature.

    Raises:
      ValueError: the signature lacks something that the program uses.
    """
    old = program.signature
    if replace(union([old, signature]), patterns=signature.patterns) != signature:
        raise ValueError("the program does not fit the signature; fit it to their union")
    counts, spare = dict(old.registers), dict(signature.registers)
    renamed = np.array([signature.ops.index(op) for op in old.ops], np.int32)
    more_ticks = (0, signature.ticks - old.ticks)
    more = (0, signature.instructions - old.instructions)
    widened = [_widened(p, old.channels, signature.channels) for p in old.patterns]
    covering = np.array([_covering(p, signature.patterns) for p in widened], np.int32)
    shape = (old.devices, len(signature.channels), signature.ticks)
    send, receive = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for c, channel in enumerate(signature.channels):
        receive[:, c] = spare[channel.register_class]
        if channel in old.channels:
            k = old.channels.index(channel)
            send[:, c, : old.ticks] = program.send[:, k]
            arrived = program.receive[:, k]
            idle = arrived == counts[channel.register_class]
            receive[:, c, : old.ticks] = np.where(idle, spare[channel.register_class], arrived)
    return replace(
        program,
        signature=signature,
        pattern=np.pad(covering[program.pattern], more_ticks),
        first=np.pad(program.first, ((0, 0), more_ticks)),
        count=np.pad(program.count, ((0, 0), more_ticks)),
        op=np.pad(renamed[program.op], ((0, 0), more)),
        microbatch=np.pad(program.microbatch, ((0, 0), more)),
        slot=np.pad(program.slot, ((0, 0), more)),
        operands=np.pad(program.operands, ((0, 0), more, (0, signature.operands - old.operands))),
        send=send,
        receive=receive,
    )
