"""Symbolic execution of a program: tokens in place of arrays.

The verifier knows the model's wiring and the tables, not how the tables were made. It proves that
every read sees the value that the model means, and that every phase of every piece runs exactly
once for each micro-batch.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from jaxpipe.program.instructions import Form, Name, Token, forms, instruction
from jaxpipe.program.program import Op, Program
from jaxpipe.program.spec import PieceSpec, operands, register_class

Files = dict[str, list[Token | None]]
"""The registers of one device by class. None stands for what nobody may read."""


def verify(program: Program, pieces: Sequence[PieceSpec]) -> None:
    """Runs the program's tables on tokens.

    Raises:
      ValueError: naming tick, device and instruction of the first fault.
    """
    sig, sizes = program.signature, dict(program.signature.registers)
    _check_ranges(program)
    _check_slots(program, pieces)
    branches = [_Branch(op, pieces) for op in sig.ops]
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
                    owner = branch.owner(program.slots[branch.op.kind][d], slot[d][at])
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

    def __init__(self, op: Op, pieces: Sequence[PieceSpec]):
        same = [i for i, s in enumerate(pieces) if (s.kind, s.policy) == (op.kind, op.policy)]
        known = forms(pieces)
        if not same or op.phase not in pieces[same[0]].phases:
            raise ValueError(f"no piece of the model has the code of {op}")
        example = pieces[same[0]]
        self.op, self.has_params = op, example.has_params
        self.inputs, self.outputs = (
            [register_class(example, o) for o in side] for side in operands(example, op.phase, op.kept)
        )
        self.by_inputs: dict[tuple[Name, ...], list[Form]] = defaultdict(list)
        for i in same:
            if (form := known[i, op.phase]).kept == op.kept:
                self.by_inputs[form.inputs].append(form)

    def owner(self, held: Sequence[int], slot: int) -> int | None:
        """The piece whose parameters it uses on a device that holds the pieces `held` of its kind."""
        if not self.has_params:
            return None
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
    for pattern in sig.patterns:
        for channel, senders in zip(sig.channels, pattern, strict=True):
            if lost := [d for d in senders if not 0 <= d + channel.offset < sig.devices]:
                raise ValueError(f"a pattern sends from devices {lost} over {channel}, where nobody is")
    if not 0 <= program.length <= sig.ticks:
        raise ValueError(f"the program has {program.length} ticks in tables of {sig.ticks}")


def _check_slots(program: Program, pieces: Sequence[PieceSpec]) -> None:
    held = Counter(i for devices in program.slots.values() for row in devices for i in row)
    for i, spec in enumerate(pieces):
        if spec.has_params and held[i] != 1:
            raise ValueError(f"piece {spec.name!r} is in {held[i]} parameter slots; expected one")


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
