"""The forward and the backward of a piece, cut from one trace.

A piece is traced once, forward and vector-Jacobian product together. What depends on a cotangent
is backward; values that cross from forward to backward are stashed as residuals. The backward
splits again: I is what the cotangents of the inputs need, W is the rest, and what crosses from I to
W is a second stash. Weights are never stashed, and what follows from weights and batch alone is
computed again. `jax.checkpoint` in a piece is undone, since what to compute again is the plan's decision.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from jaxpipe.models.jaxprs import Fragment, cut, tainted, trace, used, without_checkpoints
from jaxpipe.models.piece import Piece
from jaxpipe.models.stash import CHEAP, fewest_bytes

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
    piece: Piece,
    params: dict,
    reads: Mapping,
    batch: Mapping,
    policy: str,
    axes: tuple[str, ...] = (),
    cheap: Set[str] = CHEAP["accelerator"],
) -> PieceCode:
    """Traces a piece on local types.

    Args:
      params, reads, batch: arrays or types; inside `shard_map` typed varying over all of `axes`.
      policy: one of POLICIES.
      axes: the mesh axes, when called inside `shard_map`.
      cheap: primitives that the backward may repeat rather than have their results stashed.
    """
    if policy not in POLICIES:
        raise ValueError(f"recompute policy {policy!r} is unknown; expected one of {POLICIES}")
    leaves, tree = jax.tree.flatten(params)
    given = {("param", i): leaf for i, leaf in enumerate(leaves)}
    given |= {("read", n): reads[n] for n in piece.reads}
    given |= {("batch", n): batch[n] for n in sorted(batch)}

    outputs = [("write", n) for n in piece.writes] + [("loss", n) for n in piece.losses]

    def apply(*flat):
        every = dict(zip(given, flat))
        own = jax.tree.unflatten(tree, [every["param", i] for i in range(len(leaves))])
        values, data = ({n: every[t, n] for t, n in every if t == group} for group in ("read", "batch"))
        written, losses = piece.module.apply({"params": own}, values, data)
        _check(piece, values, written, losses, axes)
        made = {"write": written, "loss": losses}
        return [varying(made[tag][n], axes) for tag, n in outputs]

    traced = jax.make_jaxpr(apply)(*given.values())
    forward = without_checkpoints(traced)
    cotangents = {(f"ct_{tag}", n): zeros(t, axes) for (tag, n), t in zip(outputs, traced.out_avals)}
    inputs = [*given, *cotangents]
    d_reads, grads = [("ct_read", n) for n in piece.reads], [("grad", i) for i in range(len(leaves))]

    def joint(*flat):
        every = dict(zip(inputs, flat))
        differentiated = {t: v for t, v in every.items() if t[0] in ("param", "read")}
        made, vjp = jax.vjp(lambda arrays: forward(*((every | arrays)[t] for t in given)), differentiated)
        (pulled,) = vjp([every[t] for t in cotangents])
        return [*made, *(pulled["read", n] for _, n in d_reads), *(pulled["param", i] for _, i in grads)]

    whole = trace(joint, *given.values(), *cotangents.values())
    results = dict(zip([*outputs, *d_reads, *grads], whole.outputs))
    return _cut_phases(whole, dict(zip(inputs, whole.inputs)), results, policy, cheap)


def _cut_phases(
    whole: Fragment, inputs: dict[Tag, Var], results: dict[Tag, Var], policy: str, cheap: Set[str]
) -> PieceCode:
    """Cuts the joint trace of a piece into its phases."""
    groups = ("write", "loss", "ct_read", "grad")
    written, losses, d_reads, grads = ([t for t in results if t[0] == group] for group in groups)
    saved, residuals, early, stash = list(inputs), {}, [], {}
    if policy == "none" and written:
        saved, residuals = _choose_saved(whole, inputs, results, cheap)
    arrays = inputs | results | residuals
    if policy != "forward" and written:
        early, stash = _split_backward(whole, arrays, saved, d_reads, grads, cheap)
        arrays |= stash

    def phase(arguments: Iterable[Tag], outputs: Iterable[Tag]) -> PhaseCode:
        return _phase(whole, arrays, arguments, outputs)

    forward_inputs = [t for t in inputs if not t[0].startswith("ct_")]
    phases = {"F": phase(forward_inputs, [*written, *losses, *residuals])}
    if policy != "forward" and not written:
        phases["B"] = phases["I"] = phase(saved, [*losses, *d_reads, *grads])
    elif policy != "forward":
        late = [t for t in grads if t not in early]
        phases["B"] = phase(saved, [*d_reads, *grads])
        phases["I"] = phase(saved, [*d_reads, *early, *stash])
        if late:
            phases["W"] = phase([*saved, *stash], late)
    return PieceCode({t: _struct(v.aval) for t, v in arrays.items()}, phases)


def _phase(
    whole: Fragment, arrays: Mapping[Tag, Var], arguments: Iterable[Tag], outputs: Iterable[Tag]
) -> PhaseCode:
    """The code from some of `arguments`, those that are needed, to all `outputs`."""
    outputs = tuple(outputs)
    fragment = cut(whole, [arrays[t] for t in arguments], [arrays[t] for t in outputs])
    needed = used(fragment)
    kept = tuple(t for t in arguments if _is_in(arrays[t], needed))
    return PhaseCode(kept, outputs, cut(whole, [arrays[t] for t in kept], fragment.outputs))


def _choose_saved(
    whole: Fragment, inputs: dict[Tag, Var], results: dict[Tag, Var], cheap: Set[str]
) -> tuple[list[Tag], dict[Tag, Var]]:
    """What the backward is given if the forward need not run again.

    Returns:
      Its arguments, residuals included, and the residuals: values kept that are neither read nor written.
    """
    names = {v: t for t, v in (inputs | results).items() if t[0] in ("read", "write") and isinstance(v, Var)}
    forward = [v for t, v in results.items() if t[0] in ("write", "loss")]
    backward = [v for t, v in results.items() if t[0] in ("ct_read", "grad")]
    kept = _forward_values(whole, inputs, set(names), forward, backward, cheap)
    residuals = {("residual", i): v for i, v in enumerate(v for v in kept if v not in names)}
    given = [t for t in inputs if t[0] != "read"]
    return [*given, *(names[v] for v in kept if v in names), *residuals], residuals


def _forward_values(
    whole: Fragment,
    inputs: dict[Tag, Var],
    values: set[Var],
    forward_outputs: list,
    backward_outputs: list,
    cheap: Set[str],
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
    return fewest_bytes(whole, needed & candidates, candidates, cheap, reads, values)


def _is_in(atom: Var | Literal, variables: set[Var]) -> bool:
    """Whether `atom` is one of `variables`; literals, which have no hash, are not."""
    return isinstance(atom, Var) and atom in variables


def _split_backward(
    whole: Fragment,
    arrays: Mapping[Tag, Var],
    saved: list[Tag],
    d_reads: list[Tag],
    grads: list[Tag],
    cheap: Set[str],
) -> tuple[list[Tag], dict[Tag, Var]]:
    """Splits the backward in I and W.

    Returns:
      The weight gradients that I computes anyway (those of a loop are made together with its input
      gradient), and the stash: what I makes for the gradients that are left to W.
    """
    given = [arrays[t] for t in saved]
    made = {v for e in cut(whole, given, [arrays[t] for t in d_reads]).eqns for v in e.outvars}
    early = [t for t in grads if _is_in(arrays[t], made)]
    late = [arrays[t] for t in grads if t not in early]
    rest = [e for e in cut(whole, given, late).eqns if not made.intersection(e.outvars)]
    wanted = {v for v in (*late, *(v for e in rest for v in e.invars)) if isinstance(v, Var)}
    own = made & tainted(whole, [arrays[t] for t in saved if t[0] not in ("param", "batch")])
    stash = fewest_bytes(whole, wanted & own, own, cheap)
    return early, {("stash", i): v for i, v in enumerate(stash)}


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
