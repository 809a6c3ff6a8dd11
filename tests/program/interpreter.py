"""An interpreter of programs over integers: what the tables mean, as the executor does it, without JAX.

It shares the toy pieces and the order of operands with what it judges: no tokens, no wiring. It refuses
nothing that the tables can name: a register that nobody wrote holds zeros, the last write to one counts.
"""

from collections import defaultdict
from collections.abc import Sequence

from jaxpipe.program.program import Op, Program
from jaxpipe.program.spec import PieceSpec, operands, register_class
from tests.program.toys import (
    KINDS,
    PRIME,
    toy_data,
    toy_forward,
    toy_input_gradient,
    toy_parameters,
    toy_stash,
    toy_weight_gradient,
)


def interpret(program: Program, specs: Sequence[PieceSpec]) -> tuple[list[int], int]:
    """(gradient of each piece, loss), summed over micro-batches; registers start as zeros.

    Raises:
      IndexError: a table names something that is not there.
    """
    sig, parameters = program.signature, toy_parameters(specs)
    tables = {name: table.tolist() for name, table in program.tables().items()}
    travels = {c.register_class for c in sig.channels}
    files = [{n: [0] * (c + (n in travels)) for n, c in sig.registers} for _ in range(sig.devices)]
    gradients, loss = defaultdict(int), 0
    examples, counts = {(s.kind, s.policy): s for s in specs}, dict(sig.slots)
    for tick in range(program.length):
        arriving = []
        for d, file in enumerate(files):
            pattern = entry(sig.patterns, entry(tables["pattern"][d], tick))
            for c, ((name, offset), senders) in enumerate(zip(sig.channels, pattern)):
                if senders:
                    sends = d - offset in senders
                    number = entry(tables["send"][d - offset][c], tick) if sends else 0
                    value = entry(files[d - offset][name], number) if sends else 0
                    arriving.append((file[name], entry(tables["receive"][d][c], tick), value))
        for d, file in enumerate(files):
            start = entry(tables["first"][d], tick)
            for at in range(start, start + tables["count"][d][tick]):
                op = entry(sig.ops, entry(tables["op"][d], at))
                spec, m = examples[op.kind, op.policy], tables["microbatch"][d][at]
                entry(range(sig.microbatches), m)
                parameter = 1
                if spec.has_params:
                    slot = tables["slot"][d][at] if op.slot is None else op.slot
                    entry(range(counts[op.kind]), slot)
                    held = program.slots[op.kind][d]
                    parameter = parameters[held[slot]] if slot < len(held) else 0
                gradient, lost = _run(spec, op, parameter, m, tables["operands"][d][at], file)
                if spec.has_params:
                    gradients[op.kind, d, slot] += gradient
                loss += lost
        for file, number, value in arriving:
            entry(file, number)
            file[number] = value
    found = [0] * len(specs)
    for kind, count in sig.slots:
        for d, held in enumerate(program.slots[kind]):
            for slot, i in enumerate(held[:count]):
                found[i] = gradients[kind, d, slot] % PRIME
    return found, loss % PRIME


def entry(values: Sequence, number: int):
    """values[number], where negative numbers are out of range too."""
    if not 0 <= number < len(values):
        raise IndexError(f"{number} of {len(values)}")
    return values[number]


def _run(
    spec: PieceSpec, op: Op, parameter: int, microbatch: int, numbers: Sequence[int], file: dict[str, list]
) -> tuple[int, int]:
    """Runs one instruction on a device's registers: (gradient of the parameter, loss)."""
    inputs, outputs = operands(spec, op.phase, op.kept)
    given = defaultdict(dict)
    for (what, name), number in zip(inputs, numbers):
        given[what][name] = entry(file[register_class(spec, (what, name))], number)
    read_names, written_names, _ = KINDS[spec.kind]
    read = given["read"]
    if "residuals" in given:
        read = dict(zip(read_names, given["residuals"][""] or (0,) * len(read_names)))
    cotangents, data = given["ct_write"], toy_data(microbatch)
    results, gradient, loss = {}, 0, 0
    if op.phase == "F" or not written_names:
        written = toy_forward(spec.kind, parameter, data, read)
        loss = written.pop("loss", 0)
        results |= {("write", n): v for n, v in written.items()}
        results["residuals", ""] = tuple(read[n] for n in read_names)
    if op.phase != "F":
        written = given["write"]
        stash = given["stash"][""] if "stash" in given else toy_stash(spec.kind, cotangents)
        results["stash", ""] = stash
        if op.phase in "BI":
            for n, ct in toy_input_gradient(spec.kind, parameter, read, written, cotangents).items():
                results["ct_read", n] = (ct + given["kept"].get(n, 0)) % PRIME
        if op.phase in "BW" or not written_names:
            gradient = toy_weight_gradient(spec.kind, data, read, written, stash)
    for operand, number in zip(outputs, numbers[len(inputs) :]):
        registers = file[register_class(spec, operand)]
        entry(registers, number)
        registers[number] = results[operand]
    return gradient, loss
