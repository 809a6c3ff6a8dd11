"""Symbolic execution of a program: tokens in place of arrays.

The verifier knows the model's wiring and the tables, not how the tables were made. It proves that
every read sees the value that the model means, and that every phase of every piece runs exactly
once for each micro-batch.
"""

from collections import Counter
from collections.abc import Sequence

from jaxpipe.program.instructions import instruction, token_class
from jaxpipe.program.program import Program
from jaxpipe.program.spec import PieceSpec


def verify(program: Program, pieces: Sequence[PieceSpec]) -> None:
    """Runs the program's tables on tokens.

    Raises:
      ValueError: naming tick, device and instruction of the first fault.
    """
    sig = program.signature
    sizes = dict(sig.registers)
    spare = {c.register_class for c in sig.channels}
    files = [
        {name: [None] * (count + (name in spare)) for name, count in sizes.items()}
        for _ in range(sig.devices)
    ]
    done = Counter()
    for tick in range(program.length):
        arrivals = []
        for c, channel in enumerate(sig.channels):
            for source in range(sig.devices):
                target = source + channel.offset
                if 0 <= target < sig.devices:
                    sent = files[source][channel.register_class][program.send[source, c, tick]]
                    arrivals.append((target, channel.register_class, program.receive[target, c, tick], sent))
            for target in range(sig.devices):
                if not 0 <= target - channel.offset < sig.devices:
                    arrivals.append((target, channel.register_class, program.receive[target, c, tick], None))
        for device in range(sig.devices):
            for at in range(
                program.first[device, tick], program.first[device, tick] + program.count[device, tick]
            ):
                _step(program, pieces, files[device], device, tick, at, done)
        written = set()
        for target, name, number, sent in arrivals:
            if number != sizes[name]:
                if (target, name, number) in written:
                    raise ValueError(
                        f"tick {tick}: two messages arrive in register {name}[{number}] of device {target}"
                    )
                written.add((target, name, number))
                files[target][name][number] = sent
    for i, spec in enumerate(pieces):
        for microbatch in range(sig.microbatches):
            ran = {p: done[i, p, microbatch] for p in spec.phases}
            if ran.get("F", 1) != 1 or not _backward_once(spec, ran):
                raise ValueError(f"piece {spec.name!r}, micro-batch {microbatch}: phases ran {ran} times")


def _backward_once(spec: PieceSpec, ran: dict[str, int]) -> bool:
    if "B" not in spec.phases:
        return True
    fused = ran["B"] == 1 and ran.get("I", 0) == 0 and ran.get("W", 0) == 0
    return fused or (ran["B"] == 0 and all(ran[p] == 1 for p in ("I", "W") if p in spec.phases))


def _step(program: Program, pieces, registers, device, tick, at, done) -> None:
    op = program.signature.ops[program.op[device, at]]
    microbatch = int(program.microbatch[device, at])
    where = (
        f"tick {tick}, device {device}, instruction {at} ({op.phase} of {op.kind}, micro-batch {microbatch})"
    )
    candidates = _pieces_of(program, pieces, device, op)
    operands = [int(r) for r in program.operands[device, at]]
    for i in candidates:
        x = instruction(pieces, i, op.phase, microbatch)
        classes = [token_class(pieces, t) for t in x.inputs]
        seen = [registers[c][r] for c, r in zip(classes, operands)]
        if tuple(seen) == x.inputs:
            break
    else:
        raise ValueError(f"{where} reads {seen}; expected {list(x.inputs)}")
    done[i, op.phase, microbatch] += 1
    outputs = [(token_class(pieces, t), r) for t, r in zip(x.outputs, operands[len(x.inputs) :])]
    if len(set(outputs)) != len(outputs):
        raise ValueError(f"{where} writes one register twice: {outputs}")
    for (name, number), token in zip(outputs, x.outputs):
        registers[name][number] = token


def _pieces_of(program: Program, pieces, device: int, op) -> list[int]:
    """The pieces that an op on a device may stand for: one, or for kinds without parameters any."""
    same = [i for i, s in enumerate(pieces) if (s.kind, s.policy) == (op.kind, op.policy)]
    held = program.slots[op.kind][device]
    if not pieces[same[0]].has_params:
        return same
    if op.slot >= len(held):
        raise ValueError(f"device {device} runs {op}, but holds only {len(held)} pieces of that kind")
    return [held[op.slot]]
