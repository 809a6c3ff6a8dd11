"""Symbolic execution of a program: tokens in place of arrays.

The verifier knows the model's wiring and the tables, not how the tables were made. It proves that
every read sees the value that the model means, and that every phase of every piece runs exactly
once for each micro-batch.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from jaxpipe.program.check import check_program
from jaxpipe.program.instructions import Form, Name, Token, forms, instruction
from jaxpipe.program.program import Op, Program
from jaxpipe.program.spec import PieceSpec, operands, register_class

Files = dict[str, list[Token | None]]
"""The registers of one device by class. None stands for what nobody may read."""

Slots = Mapping[str, Sequence[Sequence[int]]]
"""Kind -> for each device, the pieces in its parameter slots."""


def verify(program: Program, pieces: Sequence[PieceSpec]) -> None:
    """Runs the program's tables on tokens.

    Raises:
      ValueError: naming tick, device and instruction of the first fault.
    """
    sig, sizes = program.signature, dict(program.signature.registers)
    check_program(program, pieces)
    known = forms(pieces)
    branches = [_Branch(op, pieces, known) for op in sig.ops]
    files: list[Files] = [{name: [None] * count for name, count in sizes.items()} for _ in range(sig.devices)]
    done: Counter = Counter()
    arrivals = _arrivals(program)
    names = ("first", "count", "op", "microbatch", "slot", "operands")
    first, count, op, microbatch, slot, numbers = (getattr(program, name).tolist() for name in names)
    for tick in range(program.length):
        arrived = {}
        pattern = sig.patterns[program.pattern[tick]]
        for target, channel, number, source, sent in arrivals[tick]:
            if not pattern[channel]:
                continue  # nothing arrives, nothing is written
            name = sig.channels[channel].register_class
            if (target, name, number) in arrived:
                raise ValueError(
                    f"tick {tick}: two messages arrive in register {name}[{number}] of device {target}"
                )
            # A permute gives zeros where no device sends, and the spare register holds nothing.
            empty = source not in pattern[channel] or sent == sizes[name]
            arrived[target, name, number] = None if empty else files[source][name][sent]
        for d in range(sig.devices):
            for at in range(first[d][tick], first[d][tick] + count[d][tick]):
                branch, m = branches[op[d][at]], microbatch[d][at]
                try:
                    owner = branch.owner(program.slots, d, slot[d][at])
                    form = branch.step(owner, files[d], m, numbers[d][at], done)
                except ValueError as error:
                    what = f"{branch.op.phase} of {branch.op.kind}, micro-batch {m}"
                    raise ValueError(f"tick {tick}, device {d}, instruction {at} ({what}) {error}") from None
                done[form.piece, form.phase, m] += 1
        for (target, name, number), token in arrived.items():
            files[target][name][number] = token
    _check_done(pieces, sig.microbatches, done)


class _Branch:
    """One op: the operands as the executor reads them, and the pieces that it may stand for."""

    def __init__(self, op: Op, pieces: Sequence[PieceSpec], known: Mapping[tuple[int, str], Form]):
        same = [i for i, s in enumerate(pieces) if (s.kind, s.policy) == (op.kind, op.policy)]
        example = pieces[same[0]]
        self.op, self.has_params = op, example.has_params
        self.inputs, self.outputs = (
            [register_class(example, o) for o in side] for side in operands(example, op.phase, op.kept)
        )
        self.by_inputs: dict[tuple[Name, ...], list[Form]] = defaultdict(list)
        for i in same:
            if (form := known[i, op.phase]).kept == op.kept:
                self.by_inputs[form.inputs].append(form)

    def owner(self, slots: Slots, device: int, slot: int) -> int | None:
        """The piece whose parameters it uses on a device, with what the table `slot` says."""
        if not self.has_params:
            return None
        held = slots[self.op.kind][device]
        slot = slot if self.op.slot is None else self.op.slot
        if not 0 <= slot < len(held):
            raise ValueError(f"uses parameter slot {slot} of {len(held)}")
        return held[slot]

    def step(self, owner: int | None, file: Files, microbatch: int, numbers: list[int], done) -> Form:
        """Runs one instruction."""
        classes = self.inputs + self.outputs
        for name, number in zip(classes, numbers):
            if not 0 <= number < len(file[name]):
                raise ValueError(f"names register {name}[{number}] of {len(file[name])}")
        seen = [file[name][number] for name, number in zip(self.inputs, numbers)]
        x = self._meant(owner, microbatch, seen, done)
        written = list(zip(self.outputs, numbers[len(self.inputs) :]))
        if len(set(written)) != len(written):
            raise ValueError(f"writes one register twice: {written}")
        for (name, number), token in zip(written, x.outputs):
            file[name][number] = token
        return x.form

    def _meant(self, owner: int | None, microbatch: int, seen: list[Token | None], done):
        """The instruction that reads just what was seen."""
        named = tuple(token and token[:3] for token in seen)
        found = [f for f in self.by_inputs.get(named, ()) if owner in (None, f.piece)]
        found = [f for f in found if instruction(f, microbatch).inputs == tuple(seen)]
        if not found:
            wanted = [f for fs in self.by_inputs.values() for f in fs if owner in (None, f.piece)]
            expected = " or ".join(str(list(instruction(f, microbatch).inputs)) for f in wanted[:3])
            raise ValueError(f"reads {seen}; expected {expected or 'another op on this device'}")
        # Only pieces that read nothing cannot be told apart: then the first that has not run yet.
        form = min(found, key=lambda f: done[f.piece, f.phase, microbatch])
        return instruction(form, microbatch)


def _arrivals(program: Program) -> dict[int, list[tuple[int, int, int, int, int]]]:
    """tick -> (device, channel, register, sending device, register there) of all that arrives."""
    channels, sizes = program.signature.channels, dict(program.signature.registers)
    spare = np.array([sizes[c.register_class] for c in channels], np.int32)
    result = defaultdict(list)
    for target, c, tick in np.argwhere(program.receive != spare[None, :, None]).tolist():
        source = target - channels[c].offset
        sent = int(program.send[source, c, tick]) if 0 <= source < program.signature.devices else 0
        result[tick].append((target, c, int(program.receive[target, c, tick]), source, sent))
    return result


def _check_done(pieces: Sequence[PieceSpec], microbatches: int, done: Counter) -> None:
    for i, spec in enumerate(pieces):
        for microbatch in range(microbatches):
            ran = {p: done[i, p, microbatch] for p in spec.phases}
            if ran.get("F", 1) != 1 or not _backward_once(spec, ran):
                raise ValueError(f"piece {spec.name!r}, micro-batch {microbatch}: phases ran {ran} times")


def _backward_once(spec: PieceSpec, ran: dict[str, int]) -> bool:
    if "B" not in spec.phases:
        return True
    fused = ran["B"] == 1 and ran.get("I", 0) == 0 and ran.get("W", 0) == 0
    return fused or (ran["B"] == 0 and all(ran[p] == 1 for p in ("I", "W") if p in spec.phases))
