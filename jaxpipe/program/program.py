"""Programs: a plan as integer tables that one compiled interpreter reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxpipe.planning.plan import Plan
from jaxpipe.program.instructions import Form, expand
from jaxpipe.program.registers import allocate
from jaxpipe.program.spec import PieceSpec
from jaxpipe.program.ticks import Channel, place


class Op(NamedTuple):
    """One branch of the interpreter: a phase of a kind on one parameter slot.

    kept: values that it reads and later pieces read too; their cotangents come in and are added to.
    """

    kind: str
    policy: str
    slot: int
    phase: str
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Signature:
    """All that the compiled step depends on beside the model; plans with equal signatures share it.

    registers: (class, count) by class; classes that travel have one more, where an arrival that
        nobody sent is written.
    ticks, instructions: lengths of the tables; programs may be shorter.
    operands: width of the operand table.
    """

    devices: int
    microbatches: int
    ops: tuple[Op, ...]
    registers: tuple[tuple[str, int], ...]
    channels: tuple[Channel, ...]
    ticks: int
    instructions: int
    operands: int


@dataclass(frozen=True, eq=False)
class Program:
    """A plan lowered to ticks. All tables are int32 with one row a device (P devices).

    slots: kind -> for each device, the pieces in its parameter slots of that kind.
    length: ticks in use.
    first, count [P, T]: the instructions of each tick are first .. first + count.
    op, microbatch [P, N]: of each instruction, op as an index into signature.ops.
    operands [P, N, A]: register numbers of inputs, then outputs.
    send, receive [P, C, T]: for each channel, the register sent and the one written on arrival.
    """

    signature: Signature
    slots: dict[str, tuple[tuple[int, ...], ...]]
    length: int
    first: np.ndarray
    count: np.ndarray
    op: np.ndarray
    microbatch: np.ndarray
    operands: np.ndarray
    send: np.ndarray
    receive: np.ndarray

    def tables(self) -> dict[str, np.ndarray]:
        """The tables by name, as the executor takes them."""
        names = ("first", "count", "op", "microbatch", "operands", "send", "receive")
        return {name: getattr(self, name) for name in names}


def slots_by_kind(plan: Plan, pieces: Sequence[PieceSpec]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """kind -> for each device, its pieces of that kind in order: piece slots[k][d][j] is in slot j of d."""
    held = {spec.kind: [[] for _ in range(plan.devices)] for spec in pieces}
    for stage, device in enumerate(plan.stage_to_device):
        for i in plan.stage_pieces(stage):
            held[pieces[i].kind][device].append(i)
    return {kind: tuple(tuple(sorted(d)) for d in devices) for kind, devices in held.items()}


def lower(plan: Plan, pieces: Sequence[PieceSpec]) -> Program:
    """Lowers a plan to a program.

    Raises:
      ValueError: the schedule deadlocks; the plan is for other pieces or recompute policies; or it runs
        a piece away from its parameters.
    """
    _check_fits(plan, pieces)
    rows = expand(plan, pieces)
    timetable = place(plan, rows, pieces)
    allocation = allocate(rows, timetable, pieces)
    slots = slots_by_kind(plan, pieces)
    slot_of = {i: j for devices in slots.values() for held in devices for j, i in enumerate(held)}

    def op_of(form: Form) -> Op:
        spec, slot = pieces[form.piece], slot_of[form.piece]
        return Op(spec.kind, spec.policy, slot if spec.has_params else 0, form.phase, form.kept)

    streams = [[x for action in row for x in action] for row in rows]
    op_by_phase = {x.form[:2]: op_of(x.form) for stream in streams for x in stream}
    ops = tuple(sorted(set(op_by_phase.values())))
    channels = tuple(sorted({m.channel for m in timetable.messages}))
    op_number, channel_number = ({v: i for i, v in enumerate(values)} for values in (ops, channels))
    width = max((len(x.inputs) + len(x.outputs) for s in streams for x in s), default=0)
    length, longest = timetable.length, max(map(len, streams))
    signature = Signature(
        plan.devices,
        plan.microbatches,
        ops,
        tuple(sorted(allocation.counts.items())),
        channels,
        length,
        longest,
        width,
    )
    devices = plan.devices
    first, count = np.zeros((2, devices, length), np.int32)
    op, microbatch = np.zeros((2, devices, longest), np.int32)
    operands = np.zeros((devices, longest, width), np.int32)
    for d, row in enumerate(rows):
        at = 0
        for tick, action in zip(timetable.ticks[d], row):
            first[d, tick], count[d, tick] = at, len(action)
            for x in action:
                op[d, at], microbatch[d, at] = op_number[op_by_phase[x.form[:2]]], x.microbatch
                registers = [allocation.register[d, t] for t in (*x.inputs, *x.outputs)]
                operands[d, at, : len(registers)] = registers
                at += 1
    send = np.zeros((devices, len(channels), length), np.int32)
    receive = np.zeros((devices, len(channels), length), np.int32)
    for c, channel in enumerate(channels):
        receive[:, c] = allocation.counts[channel.register_class]  # the spare register
    for m in timetable.messages:
        c, target = channel_number[m.channel], m.source + m.channel.offset
        send[m.source, c, m.tick] = allocation.register[m.source, m.token]
        receive[target, c, m.tick] = allocation.register[target, m.token]
    program = Program(signature, slots, length, first, count, op, microbatch, operands, send, receive)
    return fit(program, replace(signature, ticks=bucket(length), instructions=bucket(longest)))


def _check_fits(plan: Plan, pieces: Sequence[PieceSpec]) -> None:
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


def bucket(count: int) -> int:
    """`count` rounded up to four steps a doubling, so that similar programs share an executable."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


def union(signatures: Sequence[Signature]) -> Signature:
    """The smallest signature that programs of all the given ones fit."""
    if len({(s.devices, s.microbatches) for s in signatures}) != 1:
        raise ValueError("programs share an executable only with equal devices and micro-batches")
    registers = {}
    for s in signatures:
        for name, count in s.registers:
            registers[name] = max(count, registers.get(name, 0))
    return Signature(
        signatures[0].devices,
        signatures[0].microbatches,
        tuple(sorted({op for s in signatures for op in s.ops})),
        tuple(sorted(registers.items())),
        tuple(sorted({c for s in signatures for c in s.channels})),
        max(s.ticks for s in signatures),
        max(s.instructions for s in signatures),
        max(s.operands for s in signatures),
    )


def fit(program: Program, signature: Signature) -> Program:
    """The same program in the tables of a wider signature.

    Raises:
      ValueError: the signature lacks something that the program uses.
    """
    old = program.signature
    if union([old, signature]) != signature:
        raise ValueError("the program does not fit the signature; fit it to their union")
    counts, spare = dict(old.registers), dict(signature.registers)
    renamed = np.array([signature.ops.index(op) for op in old.ops], np.int32)
    more_ticks = (0, signature.ticks - old.ticks)
    more = (0, signature.instructions - old.instructions)
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
        first=np.pad(program.first, ((0, 0), more_ticks)),
        count=np.pad(program.count, ((0, 0), more_ticks)),
        op=np.pad(renamed[program.op], ((0, 0), more)),
        microbatch=np.pad(program.microbatch, ((0, 0), more)),
        operands=np.pad(program.operands, ((0, 0), more, (0, signature.operands - old.operands))),
        send=send,
        receive=receive,
    )
