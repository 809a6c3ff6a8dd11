"""The executor: one compiled interpreter that runs any program on a mesh.

The step is one `shard_map` over all axes. A loop over ticks starts the tick's permutes, runs the
tick's instructions and writes what arrived. Every instruction picks one op of the signature by a
`switch`; the schedule itself is data.

Everything that the loop carries passes through the switch, and every op updates in place what it
touches. XLA needs `compiler.compiler_options` to see that, or it copies whole register files in every op.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpipe.models.backward import varying
from jaxpipe.models.code import AXES, Codes, compute_copy
from jaxpipe.models.piece import Model
from jaxpipe.program.program import Op, Pattern, Program, Signature
from jaxpipe.program.spec import PieceSpec, operands, register_class
from jaxpipe.runtime.layout import Layout, slot_key, slot_specs, tied_users
from jaxpipe.runtime.specs import register_types


class State(NamedTuple):
    """What the tick loop carries on each device.

    registers: class -> one array [count, *shape] for each array of a register.
    grads: slot key, or kind whose slots are stacked -> gradients (float32) as a flat list.
    losses: name -> float32[].
    """

    registers: dict[str, tuple[jax.Array, ...]]
    grads: dict[str, list[jax.Array]]
    losses: dict[str, jax.Array]


def run_program(
    codes: Codes,
    pieces: Sequence[PieceSpec],
    signature: Signature,
    params: dict[str, list[jax.Array]],
    batch: dict[str, jax.Array],
    tables: dict[str, jax.Array],
    length: jax.Array,
    scales: dict[str, jax.Array],
) -> State:
    """Runs a program on local arrays inside `shard_map`; everything is varying over all axes.

    Args:
      params: slot key -> compute copies of the slot's parameters; kind -> copies [slots, ...] where an op's
        slot is None.
      batch: arrays [micro-batches, sequences, tokens].
      tables: this device's rows of the program's tables.
      length: ticks to run, the same on all devices.
      scales: cotangent of each loss.
    """
    examples = {(s.kind, s.policy): s for s in pieces}
    ops = [functools.partial(_run, codes, examples[op.kind, op.policy], op) for op in signature.ops]
    state = _initial_state(codes, signature, params, scales, any(op.phase != "F" for op in signature.ops))

    def instruction(at, state: State) -> State:
        numbers = {name: tables[name][at] for name in ("microbatch", "slot", "operands")}
        branches = [functools.partial(op, numbers, params, batch, scales) for op in ops]
        return lax.switch(tables["op"][at], branches, state)

    def tick(pattern: Pattern, t, state: State) -> State:
        used = [(i, *pair) for i, pair in enumerate(zip(signature.channels, pattern)) if pair[1]]
        payloads = [_read(state.registers[c.register_class], tables["send"][i, t]) for i, c, _ in used]
        # The barrier orders these reads before the instructions' writes, so that XLA need not copy the file.
        state, payloads = lax.optimization_barrier((state, payloads))
        arrived = []
        for (_, channel, sources), payload in zip(used, payloads):
            pairs = [(d, d + channel.offset) for d in sources]
            arrived.append([lax.ppermute(a, "stage", pairs) for a in payload])
        start = tables["first"][t]
        state = lax.fori_loop(start, start + tables["count"][t], instruction, state)
        registers = dict(state.registers)
        for (i, channel, _), values in zip(used, arrived):
            name = channel.register_class
            registers[name] = _write(registers[name], tables["receive"][i, t], values)
        return state._replace(registers=registers)

    ticks = [functools.partial(tick, pattern) for pattern in signature.patterns]
    return lax.fori_loop(0, length, lambda t, state: lax.switch(tables["pattern"][t], ticks, t, state), state)


def _initial_state(codes, signature, params, scales, trains: bool) -> State:
    types, travels = register_types(codes), {c.register_class for c in signature.channels}
    registers = {
        name: tuple(_zeros((count + (name in travels), *t.shape), t.dtype) for t in types[name])
        for name, count in signature.registers
    }
    grads = {key: [_zeros(v.shape, jnp.float32) for v in leaves] for key, leaves in params.items()}
    return State(registers, grads if trains else {}, {name: _zeros((), jnp.float32) for name in scales})


def _zeros(shape, dtype) -> jax.Array:
    return varying(jnp.zeros(shape, dtype), AXES)


def _read(file: tuple[jax.Array, ...], register) -> tuple[jax.Array, ...]:
    return tuple(lax.dynamic_index_in_dim(a, register, 0, keepdims=False) for a in file)


def _write(file: tuple[jax.Array, ...], register, values) -> tuple[jax.Array, ...]:
    return tuple(lax.dynamic_update_index_in_dim(a, v, register, 0) for a, v in zip(file, values))


def _added(total: jax.Array, static: int | None, slot, gradient: jax.Array) -> jax.Array:
    """The sum of a slot's gradient with one more; of the slot that the table names where they are stacked."""
    gradient = gradient.astype(jnp.float32)
    if static is not None:
        return total + gradient
    (own,) = _read((total,), slot)
    return _write((total,), slot, (own + gradient,))[0]


def _run(codes, spec: PieceSpec, op: Op, numbers, params, batch, scales, state: State) -> State:
    """One instruction: reads its registers, computes, writes registers, gradients and losses."""
    code = codes[op.kind, op.policy].phases[op.phase]
    inputs, outputs = operands(spec, op.phase, op.kept)
    arrays, kept = {}, {}
    registers = numbers["operands"]
    files, written = dict(state.registers), {register_class(spec, operand) for operand in outputs}
    for number, operand in zip(registers, inputs):
        what, name = operand
        file = register_class(spec, operand)
        values = _read(files[file], number)
        if file in written:
            # XLA would copy the file if it could fuse this read with what uses it after the write.
            files[file], values = lax.optimization_barrier((files[file], values))
        if what == "kept":
            kept[name] = values[0]
        elif what in ("residuals", "stash"):
            arrays |= {(what.removesuffix("s"), i): v for i, v in enumerate(values)}
        else:
            arrays[operand] = values[0]
    stored = op.kind if op.slot is None else slot_key(op.kind, op.slot)
    leaves = params.get(stored, ())
    if op.slot is None:
        leaves = _read(leaves, numbers["slot"])
    arrays |= {("param", i): v for i, v in enumerate(leaves)}
    microbatch = _read(batch.values(), numbers["microbatch"])
    arrays |= {("batch", n): v for n, v in zip(batch, microbatch)}
    arrays |= {("ct_loss", n): v for n, v in scales.items()}
    results = dict(zip(code.results, code.fragment(*(arrays[t] for t in code.arguments))))
    results = {t: varying(jnp.asarray(v), AXES) for t, v in results.items()}
    for name, value in kept.items():
        results["ct_read", name] += value
    for number, operand in zip(registers[len(inputs) :], outputs):
        what, _ = operand
        bundle = what in ("residuals", "stash")
        values = (
            [v for t, v in results.items() if t[0] == what.removesuffix("s")]
            if bundle
            else [results[operand]]
        )
        name = register_class(spec, operand)
        files[name] = _write(files[name], number, values)
    grads = dict(state.grads)
    for tag, i in code.results:
        if tag == "grad":
            grads[stored] = list(grads[stored])
            grads[stored][i] = _added(grads[stored][i], op.slot, numbers["slot"], results[tag, i])
    losses = {n: v + results["loss", n] if ("loss", n) in results else v for n, v in state.losses.items()}
    # Likewise for what only passes through: without this barrier some models had every file copied.
    return lax.optimization_barrier(State(files, grads, losses))


def make_step(
    model: Model,
    layout: Layout,
    pieces: Sequence[PieceSpec],
    codes: Codes,
    signature: Signature,
    mesh: Mesh,
    dtype,
):
    """A function that runs programs of one signature.

    Returns:
      step(slots, batch, tables, length, scales, ties) -> (grads, losses): slots and grads are slot
      trees (float32), grads summed over all users of tied parameters and over axes `data` and
      `model`; batch holds arrays [micro-batches, sequences, tokens]; losses are sums over the batch.
      For programs without a backward, grads is empty.
    """
    specs = slot_specs(model, layout)
    trains = any(op.phase != "F" for op in signature.ops)

    def body(slots, batch, tables, length, scales, ties):
        slots, tables, ties = jax.tree.map(lambda v: v[0], (slots, tables, ties))
        copies = compute_copy(slots, dtype)
        # Varying before the loop: a reduction over `data` or `model` must not land in every tick.
        copies, tables, batch, scales = jax.tree.map(
            lambda v: varying(v, AXES), (copies, tables, batch, scales)
        )
        leaves = {key: tuple(jax.tree.leaves(tree)) for key, tree in copies.items()}
        state = run_program(
            codes, pieces, signature, _stacked(signature, leaves), batch, tables, length, scales
        )
        losses = {n: lax.psum(v, AXES) for n, v in state.losses.items()}
        if not trains:
            return {}, losses
        grads = _unstacked(signature, state.grads)
        grads = {k: jax.tree.unflatten(jax.tree.structure(own), grads[k]) for k, own in slots.items()}
        grads = jax.tree.map(_reduce, grads, specs)
        grads = _sum_tied(grads, ties)
        return jax.tree.map(lambda g: g[None], grads), losses

    stage, batch_spec = PartitionSpec("stage"), PartitionSpec(None, "data")
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs, batch_spec, stage, PartitionSpec(), PartitionSpec(), stage),
        out_specs=(specs if trains else {}, PartitionSpec()),
    )


def _stacked_kinds(signature: Signature) -> dict[str, list[str]]:
    """Kind -> its slot keys, for the kinds whose slots are picked by the table."""
    picked = {op.kind for op in signature.ops if op.slot is None}
    return {k: [slot_key(k, j) for j in range(n)] for k, n in signature.slots if k in picked}


def _stacked(signature: Signature, leaves: dict) -> dict:
    """Slot key -> leaves, with one entry [slots, ...] in place of the slots of each stacked kind."""
    result = dict(leaves)
    for kind, keys in _stacked_kinds(signature).items():
        result[kind] = tuple(map(jnp.stack, zip(*(result.pop(key) for key in keys))))
    return result


def _unstacked(signature: Signature, leaves: dict) -> dict:
    """The inverse of `_stacked`."""
    result = dict(leaves)
    for kind, keys in _stacked_kinds(signature).items():
        stacks = result.pop(kind)
        result |= {key: [stack[j] for stack in stacks] for j, key in enumerate(keys)}
    return result


def _reduce(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Sums a gradient over the axes that its parameter is replicated on."""
    return lax.psum(grad, tuple(a for a in ("data", "model") if a not in spec))


def _sum_tied(grads, ties):
    """Gives every holder of a tied parameter the sum of all its holders' gradients."""
    for holders in ties:
        total = sum(grads[key][name] * mine.astype(jnp.float32) for (key, name), mine in holders.items())
        total = lax.psum(total, "stage")
        for (key, name), mine in holders.items():
            grads[key] = grads[key] | {name: jnp.where(mine > 0, total, grads[key][name])}
    return grads


def program_arguments(program: Program, model: Model, layout: Layout):
    """(tables, length, ties): the program as arguments of a step."""
    return program.tables(), np.int32(program.length), tied_users(model, layout)
