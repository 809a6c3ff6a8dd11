"""The forward and the backward of a piece, cut from one trace.

A piece is traced once, forward and vector-Jacobian product together. What depends on a cotangent
is backward; values that cross from forward to backward are stashed as residuals. The backward
splits again: I is what the cotangents of the inputs need, W is the rest, and what crosses from I to
W is a second stash. Weights are never stashed, and what follows from weights and batch alone is
computed again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from jaxpipe.models.jaxprs import Fragment, cut, tainted, trace, used
from jaxpipe.models.piece import Piece
from jaxpipe.models.stash import fewest_bytes

POLICIES = ("none", "full", "forward")
"""none: stash residuals; full: stash inputs and compute the forward again; forward: no backward."""

Tag = tuple[str, str | int]
"""Names one array of a piece: ("param", leaf), ("read", value), ("write", value), ("batch", field),
("residual", number), ("stash", number), ("loss", name), ("ct_write", value), ("ct_loss", name),
("ct_read", value) or ("grad", leaf)."""


@dataclass(frozen=True, eq=False)
class PhaseCode:
    """Code of one phase: `fragment` maps arrays named by `arguments` to arrays named by `results`."""

    arguments: tuple[Tag, ...]
    results: tuple[Tag, ...]
    fragment: Fragment

    def names(self, group: str) -> tuple:
        """Second halves of the arguments tagged `group`."""
        return tuple(name for tag, name in self.arguments if tag == group)


@dataclass(frozen=True, eq=False)
class PieceCode:
    """Code of one kind under one recompute policy.

    types: type (`jax.ShapeDtypeStruct`, local shapes) of every tagged array.
    phases: F, and unless the policy is "forward" B and I, and W where there is something left for
      it. A piece that only has losses does everything in its backward, where its logits are: its F
      runs in forward programs only, its I is its B.
    """

    types: dict[Tag, jax.ShapeDtypeStruct]
    phases: dict[str, PhaseCode]

    def group(self, group: str) -> dict:
        """Types of the arrays tagged `group`, by name."""
        return {name: t for (tag, name), t in self.types.items() if tag == group}


def trace_piece(
    piece: Piece, params: dict, reads: Mapping, batch: Mapping, policy: str, axes: tuple[str, ...] = ()
) -> PieceCode:
    """Traces a piece on local types.

    Args:
      params, reads, batch: arrays or types; inside `shard_map` typed varying over all of `axes`.
      policy: one of POLICIES.
      axes: the mesh axes, when called inside `shard_map`.
    """
    if policy not in POLICIES:
        raise ValueError(f"recompute policy {policy!r} is unknown; expected one of {POLICIES}")
    leaves, tree = jax.tree.flatten(params)
    given = {("param", i): leaf for i, leaf in enumerate(leaves)}
    given |= {("read", n): reads[n] for n in piece.reads}
    given |= {("batch", n): batch[n] for n in sorted(batch)}

    def apply(arrays: dict[Tag, jax.Array], constants: dict[Tag, jax.Array]) -> dict[Tag, jax.Array]:
        every = arrays | constants
        own = jax.tree.unflatten(tree, [every["param", i] for i in range(len(leaves))])
        values, data = ({n: every[t, n] for t, n in every if t == group} for group in ("read", "batch"))
        written, losses = piece.module.apply({"params": own}, values, data)
        _check(piece, values, written, losses, axes)
        result = {("write", n): varying(written[n], axes) for n in piece.writes}
        return result | {("loss", n): varying(losses[n], axes) for n in piece.losses}

    outputs = jax.eval_shape(lambda *a: apply(dict(zip(given, a)), {}), *given.values())
    cotangents = {(f"ct_{tag}", n): zeros(v, axes) for (tag, n), v in outputs.items()}

    def joint(*flat):
        every = dict(zip([*given, *cotangents], flat))
        constants = {t: every[t] for t in given if t[0] == "batch"}
        inputs = {t: every[t] for t in given if t[0] != "batch"}
        results, vjp = jax.vjp(lambda arrays: apply(arrays, constants), inputs)
        (grads,) = vjp({t: every["ct_" + t[0], t[1]] for t in results})
        results |= {("ct_read", n): grads["read", n] for n in piece.reads}
        results |= {("grad", i): grads["param", i] for i in range(len(leaves))}
        return list(results.values())

    whole = trace(joint, *given.values(), *cotangents.values())
    result_tags = [*outputs]
    result_tags += [("ct_read", n) for n in piece.reads] + [("grad", i) for i in range(len(leaves))]
    inputs = dict(zip([*given, *cotangents], whole.inputs))
    results = dict(zip(result_tags, whole.outputs))
    return _cut_phases(whole, inputs, results, policy)


def _cut_phases(whole: Fragment, inputs: dict[Tag, Var], results: dict[Tag, Var], policy: str) -> PieceCode:
    """Cuts the joint trace of a piece into its phases."""
    written = [t for t in results if t[0] == "write"]
    losses = [t for t in results if t[0] == "loss"]
    d_reads = [t for t in results if t[0] == "ct_read"]
    grads = [t for t in results if t[0] == "grad"]
    arrays = inputs | results

    def phase(arguments: Iterable[Tag], outputs: Iterable[Tag]) -> PhaseCode:
        outputs = tuple(outputs)
        fragment = cut(whole, [arrays[t] for t in arguments], [arrays[t] for t in outputs])
        needed = used(fragment)
        kept = tuple(t for t in arguments if _is_in(arrays[t], needed))
        return PhaseCode(kept, outputs, cut(whole, [arrays[t] for t in kept], fragment.outputs))

    forward_inputs = [t for t in inputs if not t[0].startswith("ct_")]
    residuals, saved = [], list(inputs)
    if policy == "none" and written:
        forward, backward = ([results[t] for t in tags] for tags in (written + losses, d_reads + grads))
        names = {v: t for t, v in arrays.items() if t[0] in ("read", "write") and isinstance(v, Var)}
        kept = _forward_values(whole, inputs, set(names), forward, backward)
        residuals = [("residual", i) for i in range(sum(v not in names for v in kept))]
        arrays |= zip(residuals, (v for v in kept if v not in names))
        saved = [t for t in inputs if t[0] != "read"] + [names[v] for v in kept if v in names] + residuals
    phases = {"F": phase(forward_inputs, [*written, *losses, *residuals])}
    if policy != "forward":
        if written:
            phases["B"] = phase(saved, [*d_reads, *grads])
            phases |= _split_backward(whole, arrays, saved, d_reads, grads, phase)
        else:
            phases["B"] = phases["I"] = phase(saved, [*losses, *d_reads, *grads])
    return PieceCode({t: _struct(v.aval) for t, v in arrays.items()}, phases)


def _forward_values(
    whole: Fragment, inputs: dict[Tag, Var], values: set[Var], forward_outputs: list, backward_outputs: list
) -> list[Var]:
    """The forward values to keep for the backward: the fewest bytes from which it follows cheaply.

    On ties `values`, which are read or written and have a register anyway, are preferred.
    Only what the forward computes anyway can be kept. The rest is left to the backward even where no
    cotangent enters, as the scores that attention's backward deliberately computes again.
    """
    reads = [v for t, v in inputs.items() if t[0] == "read"]
    forward = cut(whole, whole.inputs, forward_outputs).eqns
    made = {v for e in forward for v in e.outvars} | set(reads)
    done = {id(e) for e in forward}
    needed = {v for v in backward_outputs if isinstance(v, Var)}
    for eqn in cut(whole, whole.inputs, backward_outputs).eqns:
        if id(eqn) not in done:
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    candidates = made & tainted(whole, reads)
    return fewest_bytes(whole, needed & candidates, candidates, reads, values)


def _is_in(atom: Var | Literal, variables: set[Var]) -> bool:
    """Whether `atom` is one of `variables`; literals, which have no hash, are not."""
    return isinstance(atom, Var) and atom in variables


def _split_backward(whole, arrays, saved, d_reads, grads, phase) -> dict[str, PhaseCode]:
    """I and W; adds the stash between them to `arrays`.

    Weight gradients that I computes anyway (those of a loop are made together with its input gradient)
    are given by I.
    """
    made = {v for e in phase(saved, d_reads).fragment.eqns for v in e.outvars}
    early = [t for t in grads if _is_in(arrays[t], made)]
    grads = [t for t in grads if t not in early]
    if not grads:
        return {"I": phase(saved, [*d_reads, *early])}
    rest = [e for e in phase(saved, grads).fragment.eqns if not made.intersection(e.outvars)]
    wanted = {v for e in rest for v in e.invars if isinstance(v, Var)}
    wanted |= {arrays[t] for t in grads if isinstance(arrays[t], Var)}
    own = tainted(whole, [arrays[t] for t in saved if t[0] not in ("param", "batch")])
    stash = []
    for i, var in enumerate(fewest_bytes(whole, wanted & own & made, own & made)):
        arrays["stash", i] = var
        stash.append(("stash", i))
    return {"I": phase(saved, [*d_reads, *early, *stash]), "W": phase([*saved, *stash], grads)}


def varying(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`value` typed as varying over all of `axes` (a no-op outside `shard_map`)."""
    missing = tuple(a for a in axes if a not in jax.typeof(value).manual_axis_type.varying)
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def _check(piece: Piece, reads: Mapping, written: Mapping, losses: Mapping, axes: tuple[str, ...]) -> None:
    if set(written) != set(piece.writes) or set(losses) != set(piece.losses):
        raise ValueError(
            f"piece {piece.name!r} gave values {sorted(written)} and losses {sorted(losses)}; "
            f"declared are {sorted(piece.writes)} and {sorted(piece.losses)}"
        )
    for name, value in written.items():
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise ValueError(
                f"piece {piece.name!r} writes {name!r} as {_type(value)}; "
                "values must be floating point, since their cotangents travel too"
            )
        if name in reads and _type(value) != _type(reads[name]):
            raise ValueError(
                f"piece {piece.name!r} reads {name!r} as {_type(reads[name])} "
                f"but writes it as {_type(value)}; a value keeps its type"
            )
    for name, loss in losses.items():
        if _type(loss) != "float32[]":
            raise ValueError(f"piece {piece.name!r}: loss {name!r} is {_type(loss)}; expected float32[]")
        if (
            piece.module.tp > 1
            and "model" in axes
            and "model" not in jax.typeof(loss).manual_axis_type.varying
        ):
            raise ValueError(
                f"piece {piece.name!r}: loss {name!r} is the same on all of axis 'model'; give shares"
            )


def _type(value) -> str:
    return f"{jnp.result_type(value)}[{','.join(map(str, jnp.shape(value)))}]"


def _struct(aval) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def zeros(struct, axes: tuple[str, ...]) -> jax.Array:
    """Zeros of a type, varying over all of `axes`: an argument for tracing."""
    return varying(jnp.zeros(struct.shape, struct.dtype), axes)
