"""Whether a program's tables fit its signature, and both fit the model: before any instruction runs."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from jaxpipe.program.program import Program
from jaxpipe.program.spec import PieceSpec, operands, register_class


def check_program(program: Program, pieces: Sequence[PieceSpec]) -> None:
    """Checks shapes and ranges of the tables, what the signature counts, and the parameter slots.

    Register numbers, and slots that the table names, are left to what runs the instructions: their limits
    depend on the op, and those of unused entries mean nothing.

    Raises:
      ValueError: naming the first fault.
    """
    _check_shapes(program)
    _check_patterns(program)
    _check_ops(program, pieces)
    _check_ranges(program)
    _check_slots(program, pieces)


def _check_shapes(program: Program) -> None:
    sig = program.signature
    ticks, instructions = (sig.devices, sig.ticks), (sig.devices, sig.instructions)
    messages = (sig.devices, len(sig.channels), sig.ticks)
    shapes = {"first": ticks, "count": ticks, "pattern": ticks, "send": messages, "receive": messages}
    shapes |= dict.fromkeys(("op", "microbatch", "slot"), instructions)
    shapes["operands"] = (*instructions, sig.operands)
    for name, table in program.tables().items():
        if table.shape != shapes[name]:
            raise ValueError(f"table {name!r} has shape {table.shape}; the signature says {shapes[name]}")
    if not 0 <= program.length <= sig.ticks:
        raise ValueError(f"the program has {program.length} ticks in tables of {sig.ticks}")


def _check_patterns(program: Program) -> None:
    sig, sizes = program.signature, dict(program.signature.registers)
    for channel in sig.channels:
        if channel.register_class not in sizes:
            raise ValueError(f"the signature has {channel} but no registers of that class")
    for number, pattern in enumerate(sig.patterns):
        if len(pattern) != len(sig.channels):
            raise ValueError(f"pattern {number} is for {len(pattern)} channels, not {len(sig.channels)}")
        for channel, senders in zip(sig.channels, pattern):
            targets = [d + channel.offset for d in senders]
            if any(not 0 <= d < sig.devices for d in (*senders, *targets)):
                raise ValueError(f"pattern {number} sends from {senders} over {channel}, where nobody is")
            if len(set(senders)) != len(senders):
                raise ValueError(f"pattern {number} sends twice from one of {senders} over {channel}")


def _check_ops(program: Program, pieces: Sequence[PieceSpec]) -> None:
    """Every op, used or not: all of them are compiled."""
    sig, examples = program.signature, {(s.kind, s.policy): s for s in pieces}
    sizes, counts, stacked = dict(sig.registers), dict(sig.slots), defaultdict(set)
    for op in sig.ops:
        spec = examples.get((op.kind, op.policy))
        if spec is None or op.phase not in spec.phases or not set(op.kept) <= set(spec.reads):
            raise ValueError(f"no piece of the model has the code of {op}")
        used = [register_class(spec, o) for side in operands(spec, op.phase, op.kept) for o in side]
        if len(used) > sig.operands:
            raise ValueError(f"{op} has {len(used)} operands in a table of {sig.operands}")
        if absent := sorted(set(used) - set(sizes)):
            raise ValueError(f"{op} uses registers of class {absent[0]!r}; the signature has none")
        if not spec.has_params:
            continue
        stacked[op.kind].add(op.slot is None)
        if op.slot is not None and not 0 <= op.slot < counts.get(op.kind, 0):
            raise ValueError(f"{op} uses parameter slot {op.slot} of {counts.get(op.kind, 0)}")
    if mixed := sorted(kind for kind, ways in stacked.items() if len(ways) > 1):
        raise ValueError(f"some ops of kind {mixed[0]!r} name their slot, others leave it to the table")


def _check_ranges(program: Program) -> None:
    sig, sizes = program.signature, dict(program.signature.registers)
    counts = np.array([sizes[c.register_class] for c in sig.channels], np.int32)[None, :, None]
    limits = {"op": len(sig.ops) - 1, "microbatch": sig.microbatches - 1, "send": counts, "receive": counts}
    limits["pattern"] = len(sig.patterns) - 1
    limits |= {"first": sig.instructions, "count": sig.instructions - program.first}
    for name, limit in limits.items():
        table = program.tables()[name]
        if wrong := np.argwhere((table < 0) | (table > limit)).tolist():
            at = tuple(wrong[0])
            raise ValueError(f"table {name!r} holds {table[at]} at {at}, which is out of range")


def _check_slots(program: Program, pieces: Sequence[PieceSpec]) -> None:
    """Every piece with parameters is in one slot of its kind, among as many as the signature counts."""
    sig, counts, held = program.signature, dict(program.signature.slots), Counter()
    for kind in sorted({s.kind for s in pieces if s.has_params} | set(counts)):
        rows, count = program.slots.get(kind, ()), counts.get(kind, 0)
        if len(rows) != sig.devices:
            raise ValueError(f"slots of kind {kind!r} are given for {len(rows)} devices of {sig.devices}")
        for d, row in enumerate(rows):
            if len(row) > count:
                raise ValueError(f"device {d} holds {len(row)} pieces of kind {kind!r} in {count} slots")
            for i in row:
                if not 0 <= i < len(pieces) or pieces[i].kind != kind:
                    raise ValueError(f"device {d} holds piece {i} in a slot of kind {kind!r}; it is none")
            held.update(row)
    for i, spec in enumerate(pieces):
        if spec.has_params and held[i] != 1:
            raise ValueError(f"piece {spec.name!r} is in {held[i]} parameter slots; expected one")
