"""The executor: one compiled interpreter that runs any program on a mesh.

The step is one `shard_map` over all axes. A loop over ticks starts the tick's permutes, runs the
tick's instructions and writes what arrived. Every instruction picks one op of the signature; the
schedule itself is data.
"""

import functools
import itertools
import math
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
from jaxpipe.program.program import Op, Program, Signature
from jaxpipe.program.spec import PieceSpec, operands, register_class
from jaxpipe.runtime.layout import Layout, slot_key, slot_specs, tied_users
from jaxpipe.runtime.specs import register_types


class State(NamedTuple):
    """What the tick loop carries on each device.

    registers: class -> one array [count, *shape] for each array of a register.
    grads: slot key -> gradients (float32) of the slot's parameters, as a flat list.
    losses: name -> float32[].
    """

    registers: dict[str, tuple[jax.Array, ...]]
    grads: dict[str, list[jax.Array]]
    losses: dict[str, jax.Array]


class Branch(NamedTuple):
    """One op of the signature with all that its code needs."""

    op: Op
    spec: PieceSpec
    slot: str


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
      params: slot key -> compute copies of the slot's parameters.
      batch: arrays [micro-batches, sequences, tokens].
      tables: this device's rows of the program's tables.
      length: ticks to run, the same on all devices.
      scales: cotangent of each loss.
    """
    examples = {(s.kind, s.policy): s for s in pieces}
    branches = [Branch(op, examples[op.kind, op.policy], slot_key(op.kind, op.slot)) for op in signature.ops]
    state = _initial_state(codes, signature, params, scales, any(op.phase != "F" for op in signature.ops))

    def tick(t, state: State) -> State:
        registers, arrived = dict(state.registers), []
        payloads = [
            _read(registers[c.register_class], tables["send"][i, t]) for i, c in enumerate(signature.channels)
        ]
        # The barrier orders these reads before the instructions' writes, so that XLA need not copy the file.
        registers, payloads = lax.optimization_barrier((registers, payloads))
        for channel, payload in zip(signature.channels, payloads):
            pairs = [(d, d + channel.offset) for d in range(signature.devices)]
            pairs = [(a, b) for a, b in pairs if 0 <= b < signature.devices]
            arrived.append(jax.tree.map(lambda a, p=pairs: lax.ppermute(a, "stage", p), payload))
        start = tables["first"][t]

        def instruction(at, state: State) -> State:
            index, microbatch, registers = tables["op"][at], tables["microbatch"][at], tables["operands"][at]

            def run(branch: Branch, i, state: State) -> State:
                return _run(codes, branch, registers, microbatch, params, batch, scales, i, state)

            return _dispatch(branches, index, run, state)

        state = lax.fori_loop(
            start, start + tables["count"][t], instruction, state._replace(registers=registers)
        )
        registers = dict(state.registers)
        for i, (channel, values) in enumerate(zip(signature.channels, arrived)):
            name = channel.register_class
            registers[name] = _write(registers[name], tables["receive"][i, t], values)
        return state._replace(registers=registers)

    return lax.fori_loop(0, length, tick, state)


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


def _dispatch(branches: Sequence[Branch], index, run, state: State) -> State:
    """Runs the branch numbered `index`: run(branch, i, state).

    Branches stand behind gates: loops of none or one rounds, which update what they carry in place. A
    gate costs a little even when it stays shut, so groups of them stand behind gates of their own.
    """
    numbered = list(enumerate(branches))
    for group in itertools.batched(numbered, max(1, math.isqrt(len(numbered)))):

        def each(_, state: State, group=group) -> State:
            for number, branch in group:
                state = _gate([branch], index == number, functools.partial(run, branch), state)
            return state

        inside = (index >= group[0][0]) & (index <= group[-1][0])
        state = _gate([branch for _, branch in group], inside, each, state)
    return state


def _gate(branches: Sequence[Branch], chosen, body, state: State) -> State:
    """Runs body(i, state) if it was chosen, on the part of the state that any of `branches` touches."""
    names, slots = set(), set()
    for branch in branches:
        inputs, outputs = operands(branch.spec, branch.op.phase, branch.op.kept)
        names |= {register_class(branch.spec, o) for o in [*inputs, *outputs]}
        slots |= {branch.slot} & set(state.grads if branch.op.phase != "F" else ())
    touched = State(
        {name: state.registers[name] for name in sorted(names)},
        {slot: state.grads[slot] for slot in sorted(slots)},
        state.losses,
    )
    # The barrier orders this loop before the next: XLA takes a file that is only read out of the carry, and
    # would copy it for the loop behind that writes it.
    after = lax.optimization_barrier(lax.fori_loop(0, chosen.astype(jnp.int32), body, touched))
    return State(state.registers | after.registers, state.grads | after.grads, after.losses)


def _run(codes, branch: Branch, numbers, microbatch, params, batch, scales, i, state: State) -> State:
    """One instruction: reads its registers, computes, writes registers, gradients and losses."""
    # Tied to the loop's counter, or XLA would take the work for loop-invariant and do it in any case.
    numbers, microbatch, _ = lax.optimization_barrier((numbers, microbatch, i))
    op, spec = branch.op, branch.spec
    code = codes[op.kind, op.policy].phases[op.phase]
    inputs, outputs = operands(spec, op.phase, op.kept)
    arrays, kept = {}, {}
    for number, operand in zip(numbers, inputs):
        values = _read(state.registers[register_class(spec, operand)], number)
        what, name = operand
        if what == "kept":
            kept[name] = values[0]
        elif what in ("residuals", "stash"):
            arrays |= {(what.removesuffix("s"), i): v for i, v in enumerate(values)}
        else:
            arrays[operand] = values[0]
    arrays |= {("param", i): v for i, v in enumerate(params.get(branch.slot, ()))}
    arrays |= {
        ("batch", n): lax.dynamic_index_in_dim(v, microbatch, 0, keepdims=False) for n, v in batch.items()
    }
    arrays |= {("ct_loss", n): v for n, v in scales.items()}
    results = dict(zip(code.results, code.fragment(*(arrays[t] for t in code.arguments))))
    results = {t: varying(jnp.asarray(v), AXES) for t, v in results.items()}
    for name, value in kept.items():
        results["ct_read", name] += value
    # All reads come before all writes, or XLA would copy the files that are written.
    results = lax.optimization_barrier(results)
    files = dict(state.registers)
    for number, operand in zip(numbers[len(inputs) :], outputs):
        what, _ = operand
        bundle = what in ("residuals", "stash")
        values = (
            [v for t, v in results.items() if t[0] == what.removesuffix("s")]
            if bundle
            else [results[operand]]
        )
        name = register_class(spec, operand)
        files[name] = _write(files[name], number, values)
    grads = {
        key: [
            g + results["grad", i].astype(jnp.float32) if ("grad", i) in results else g
            for i, g in enumerate(gs)
        ]
        for key, gs in state.grads.items()
    }
    losses = {n: v + results["loss", n] if ("loss", n) in results else v for n, v in state.losses.items()}
    return State(files, grads, losses)


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
        leaves = {key: jax.tree.leaves(tree) for key, tree in copies.items()}
        state = run_program(codes, pieces, signature, leaves, batch, tables, length, scales)
        losses = {n: lax.psum(v, AXES) for n, v in state.losses.items()}
        if not trains:
            return {}, losses
        grads = {k: jax.tree.unflatten(jax.tree.structure(slots[k]), gs) for k, gs in state.grads.items()}
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
