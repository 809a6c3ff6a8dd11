"""Faults for programs: each mutation is a pure function (program, specs, random) -> program.

A mutation gives the program back unchanged where it finds nothing to change. What one changes may mean
the same, such as the registers of an instruction that never runs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from jaxpipe.program.patterns import Pattern, full_pattern
from jaxpipe.program.program import Program
from jaxpipe.program.spec import PieceSpec, operands, register_class

Mutation = Callable[[Program, Sequence[PieceSpec], Random], Program]


def differs(a: Program, b: Program) -> bool:
    """Whether anything in the programs is not the same."""
    same = all(np.array_equal(x, y) for x, y in zip(a.tables().values(), b.tables().values()))
    return not (same and a.signature == b.signature and a.slots == b.slots and a.length == b.length)


def with_patterns(program: Program, most: int) -> Program:
    """The same program with the `most - 1` commonest exact sets of permutes, and the full one."""
    exact = [_sending(program, tick) for tick in range(program.signature.ticks)]
    full = full_pattern(program.signature.channels, program.signature.devices)
    used = Counter(exact[: program.length])
    patterns = [*sorted(used, key=lambda p: (-used[p], p))[: most - 1], full]
    number = [patterns.index(p if p in patterns else full) for p in exact]
    signature = replace(program.signature, patterns=tuple(patterns))
    return replace(program, signature=signature, pattern=np.array(number, np.int32))


def _sending(program: Program, tick: int) -> Pattern:
    """For each channel the devices whose message lands in a register in this tick."""
    sig, sizes = program.signature, dict(program.signature.registers)
    return tuple(
        tuple(d - c.offset for d in np.flatnonzero(row != sizes[c.register_class]).tolist())
        for c, row in zip(sig.channels, program.receive[:, :, tick].T)
    )


# Instructions


def change_register(program, specs, random):
    """One operand of one instruction names another register of its class, or the one past its end."""
    d, at, classes = _random_instruction(program, specs, random)
    if not classes:
        return program
    a = random.randrange(len(classes))
    count = dict(program.signature.registers)[classes[a]]
    return _with(program, "operands", (d, at, a), _other(random, program.operands[d, at, a], count + 1))


def swap_registers(program, specs, random):
    """Two operands of one instruction change places."""
    d, at, classes = _random_instruction(program, specs, random)
    if len(classes) < 2:
        return program
    a, b = random.sample(range(len(classes)), 2)
    return _swapped(program, ["operands"], (d, at, a), (d, at, b))


def swap_registers_of_two(program, specs, random):
    """Two instructions of a device exchange the registers of one operand."""
    d, at, classes = _random_instruction(program, specs, random)
    if not classes:
        return program
    a, other = random.randrange(len(classes)), random.randrange(_used(program, d))
    return _swapped(program, ["operands"], (d, at, a), (d, other, a))


def change_op(program, specs, random):
    """An instruction runs another op: another phase, kind, policy, slot or set of kept values."""
    d, at, _ = _random_instruction(program, specs, random)
    count = len(program.signature.ops)
    return _with(program, "op", (d, at), _other(random, program.op[d, at], count)) if count > 1 else program


def change_microbatch(program, specs, random):
    """An instruction runs for another micro-batch, or for one that does not exist."""
    d, at, _ = _random_instruction(program, specs, random)
    count = program.signature.microbatches + 1
    return _with(program, "microbatch", (d, at), _other(random, program.microbatch[d, at], count))


def change_slot(program, specs, random):
    """An instruction names another parameter slot: in the table, and in its op where the op has one."""
    d, at, _ = _random_instruction(program, specs, random)
    ops = program.signature.ops
    op = ops[program.op[d, at]]
    count = dict(program.signature.slots).get(op.kind, 0) + 1
    if op.slot is None:
        return _with(program, "slot", (d, at), _other(random, program.slot[d, at], count))
    others = [i for i, o in enumerate(ops) if o != op and o._replace(slot=op.slot) == op]
    return _with(program, "op", (d, at), random.choice(others)) if others else program


def swap_instructions(program, specs, random):
    """Two instructions of a device change places."""
    d, at, _ = _random_instruction(program, specs, random)
    return _swapped(
        program,
        ["op", "microbatch", "slot", "operands"],
        (d, at),
        (d, random.randrange(_used(program, d))),
    )


def repeat_instruction(program, specs, random):
    """An instruction stands in the place of another one of its device."""
    d, at, _ = _random_instruction(program, specs, random)
    to = random.randrange(_used(program, d))
    for name in ("op", "microbatch", "slot", "operands"):
        program = _with(program, name, (d, to), getattr(program, name)[d, at])
    return program


# Messages


def redirect_sending(program, specs, random):
    """A message carries another register."""
    if not (message := _random_message(program, random)):
        return program
    target, c, tick = message
    place = (target - program.signature.channels[c].offset, c, tick)
    return _with(program, "send", place, _other(random, program.send[place], _size(program, c) + 1))


def redirect_arrival(program, specs, random):
    """A message lands in another register."""
    if not (message := _random_message(program, random)):
        return program
    number = _other(random, program.receive[message], _size(program, message[1]))
    return _with(program, "receive", message, number)


def drop_message(program, specs, random):
    """A message lands in the spare register, that is: nowhere."""
    if not (message := _random_message(program, random)):
        return program
    return _with(program, "receive", message, _size(program, message[1]))


def clear_sending(program, specs, random):
    """A message carries register 0, as where nobody sends."""
    if not (message := _random_message(program, random)):
        return program
    target, c, tick = message
    return _with(program, "send", (target - program.signature.channels[c].offset, c, tick), 0)


def move_message(program, specs, random):
    """A message travels up to two ticks earlier or later, in place of what travels then."""
    if not (message := _random_message(program, random)):
        return program
    target, c, tick = message
    to, source = tick + random.choice([-2, -1, 1, 2]), target - program.signature.channels[c].offset
    if not 0 <= to < program.length:
        return program
    program = _swapped(program, ["receive"], message, (target, c, to))
    return _swapped(program, ["send"], (source, c, tick), (source, c, to))


def add_message(program, specs, random):
    """What arrives on an idle channel, in its spare register so far, lands in another."""
    sizes = np.array([_size(program, c) for c in range(len(program.signature.channels))], np.int32)
    found = np.argwhere(program.receive == sizes[:, None])
    found = found[found[:, 2] < program.length].tolist()
    if not found:
        return program
    place = tuple(random.choice(found))
    return _with(program, "receive", place, random.randrange(_size(program, place[1])))


# Ticks


def move_action(program, specs, random):
    """An action runs up to two ticks earlier or later, in place of what runs then."""
    d, tick = _random_tick(program, random)
    to = tick + random.choice([-2, -1, 1, 2])
    if not 0 <= to < program.length:
        return program
    return _swapped(program, ["first", "count"], (d, tick), (d, to))


def delay_device(program, specs, random):
    """From some tick on, all actions of a device run one tick later; the last one never."""
    d, tick = _random_tick(program, random)
    for name in ("first", "count"):
        later = np.insert(getattr(program, name)[d], tick, 0)[:-1]
        program = _with(program, name, (d,), later)
    return program


def repeat_action(program, specs, random):
    """An action runs once more, in a tick of its device that was idle or ran something else."""
    d, tick = _random_tick(program, random)
    to = random.randrange(program.length)
    for name in ("first", "count"):
        program = _with(program, name, (d, to), getattr(program, name)[d, tick])
    return program


def change_span(program, specs, random):
    """A tick runs one instruction more or fewer, at its start or end."""
    d, tick = _random_tick(program, random)
    step = random.choice([-1, 1])
    if random.random() < 0.5:
        program = _with(program, "first", (d, tick), program.first[d, tick] - step)
    return _with(program, "count", (d, tick), program.count[d, tick] + step)


def change_length(program, specs, random):
    """The program ends earlier or later by up to two ticks."""
    return replace(program, length=program.length + random.choice([-2, -1, 1, 2]))


def change_pattern(program, specs, random):
    """A tick runs another set of permutes, or one that does not exist."""
    tick, count = random.randrange(program.length), len(program.signature.patterns)
    return _with(program, "pattern", (tick,), _other(random, program.pattern[tick], count + 1))


# The whole


def swap_devices(program, specs, random):
    """Two devices run each other's instructions, with the parameters and messages of their own."""
    if program.signature.devices < 2:
        return program
    a, b = random.sample(range(program.signature.devices), 2)
    names = ["first", "count", "op", "microbatch", "slot", "operands"]
    return _swapped(program, names, (a,), (b,))


def swap_pieces(program, specs, random):
    """Two pieces are in each other's parameter slots, of one kind or of two, on one device or on two."""
    places = _places(program)
    if len(places) < 2:
        return program
    (a, i), (b, j) = random.sample(places, 2)
    return _placed(_placed(program, a, [j]), b, [i])


def change_pieces(program, specs, random):
    """A parameter slot is left out, or its device has another after it, of any piece or none that exists."""
    place, i = random.choice(_places(program))
    extra = random.randrange(-1, len(specs) + 1)
    return _placed(program, place, random.choice([[], [i, extra]]))


def drop_kind(program, specs, random):
    """The slots of a kind, or those that one device has of it, are not said."""
    kind = random.choice(sorted(program.slots))
    if random.random() < 0.5:
        return replace(program, slots={k: rows for k, rows in program.slots.items() if k != kind})
    return replace(program, slots=program.slots | {kind: program.slots[kind][:-1]})


# What is compiled


def change_op_of_signature(program, specs, random):
    """An op is another for all its instructions: slot, phase or the values whose cotangents come in."""
    ops, sig = list(program.signature.ops), program.signature
    at = random.randrange(len(ops))
    slots = [None, *range(dict(sig.slots).get(ops[at].kind, 0) + 1)]
    change = random.choice(
        [
            {"slot": random.choice(slots)},
            {"phase": random.choice("FBIW")},
            {"kept": random.choice([(), ("x",), ("q", "x")])},
        ]
    )
    ops[at] = ops[at]._replace(**change)
    return replace(program, signature=replace(sig, ops=tuple(ops)))


def shrink_signature(program, specs, random):
    """There is one slot, or register, of a kind, or class, fewer; or none at all; or shorter tables."""
    sig = program.signature
    name = random.choice(["slots", "registers", "ticks", "instructions", "operands", "microbatches"])
    value = getattr(sig, name)
    if isinstance(value, int):
        return replace(program, signature=replace(sig, **{name: value - 1}))
    if not value:
        return program
    at = random.randrange(len(value))
    key, count = value[at]
    rest = () if random.random() < 0.3 else ((key, count - 1),)
    return replace(program, signature=replace(sig, **{name: (*value[:at], *rest, *value[at + 1 :])}))


def change_permute(program, specs, random):
    """In one pattern a device sends that did not, no longer, or twice."""
    sig = program.signature
    if not sig.channels:
        return program
    p, c = random.randrange(len(sig.patterns)), random.randrange(len(sig.channels))
    pattern, d = list(sig.patterns[p]), random.randrange(sig.devices)
    others = tuple(s for s in pattern[c] if s != d)
    pattern[c] = random.choice([others, tuple(sorted((*others, d))), (*pattern[c], d)])
    patterns = (*sig.patterns[:p], tuple(pattern), *sig.patterns[p + 1 :])
    return replace(program, signature=replace(sig, patterns=patterns))


TABLES: tuple[Mutation, ...] = (
    change_register,
    swap_registers,
    swap_registers_of_two,
    change_op,
    change_microbatch,
    change_slot,
    swap_instructions,
    repeat_instruction,
    redirect_sending,
    redirect_arrival,
    drop_message,
    clear_sending,
    move_message,
    add_message,
    move_action,
    delay_device,
    repeat_action,
    change_span,
    change_length,
    change_pattern,
    swap_devices,
)
"""Mutations that leave the signature and the parameter slots alone: the compiled step is the same."""

MUTATIONS: tuple[Mutation, ...] = (
    *TABLES,
    swap_pieces,
    change_pieces,
    drop_kind,
    change_op_of_signature,
    shrink_signature,
    change_permute,
)


def _with(program: Program, table: str, place: tuple[int, ...], value) -> Program:
    """The program with another entry in one table."""
    changed = getattr(program, table).copy()
    changed[place] = value
    return replace(program, **{table: changed})


def _swapped(program: Program, tables: Sequence[str], a: tuple[int, ...], b: tuple[int, ...]) -> Program:
    """The program with two entries exchanged in each of some tables."""
    for name in tables:
        table = getattr(program, name)
        program = _with(_with(program, name, a, table[b]), name, b, table[a])
    return program


def _other(random: Random, old: int, count: int) -> int:
    """A number below `count` other than `old`; `old` where there is none."""
    return (old + random.randrange(1, count)) % count if count > 1 else old


def _used(program: Program, device: int) -> int:
    return int(program.count[device].sum())


def _size(program: Program, channel: int) -> int:
    """Registers of the class that a channel moves; the number of the spare one."""
    return dict(program.signature.registers)[program.signature.channels[channel].register_class]


def _random_instruction(program, specs, random) -> tuple[int, int, list[str]]:
    """(device, number, register class of each operand)."""
    d, at = random.choice(
        [(d, at) for d in range(program.signature.devices) for at in range(_used(program, d))]
    )
    op = program.signature.ops[program.op[d, at]]
    spec = next(s for s in specs if (s.kind, s.policy) == (op.kind, op.policy))
    sides = operands(spec, op.phase, op.kept)
    return d, at, [register_class(spec, o) for side in sides for o in side]


def _random_message(program, random) -> tuple[int, int, int] | None:
    """(device, channel, tick) of an arrival; None where there are none."""
    sizes = np.array([_size(program, c) for c in range(len(program.signature.channels))], np.int32)
    found = np.argwhere(program.receive != sizes[:, None]).tolist()
    return tuple(random.choice(found)) if found else None


def _random_tick(program, random) -> tuple[int, int]:
    """(device, tick) of an action."""
    return tuple(random.choice(np.argwhere(program.count > 0).tolist()))


def _places(program) -> list[tuple[tuple[str, int, int], int]]:
    """((kind, device, slot), piece) of every piece that is in a slot."""
    return [
        ((kind, d, slot), i)
        for kind, rows in program.slots.items()
        for d, row in enumerate(rows)
        for slot, i in enumerate(row)
    ]


def _placed(program, place: tuple[str, int, int], pieces: list[int]) -> Program:
    """The program with other pieces in one parameter slot."""
    kind, d, slot = place
    rows = list(program.slots[kind])
    rows[d] = (*rows[d][:slot], *pieces, *rows[d][slot + 1 :])
    return replace(program, slots=program.slots | {kind: tuple(rows)})
