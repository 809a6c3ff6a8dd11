"""Small tools on jaxprs: inlining, cutting out fragments, and asking what depends on what."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

_PLAIN_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "remat2": "jaxpr"}
"""Calls that only group equations (remat2: `jax.checkpoint`): name -> parameter that holds the jaxpr."""

_CALLS = _PLAIN_CALLS | {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""The same with calls that bring their own derivatives."""


@dataclass(frozen=True, eq=False)
class Fragment:
    """A part of a traced function: equations that lead from `inputs` to `outputs`.

    An output may be a literal, an input or a constant.
    """

    inputs: tuple[Var, ...]
    outputs: tuple[Var | Literal, ...]
    eqns: tuple[JaxprEqn, ...]
    consts: dict[Var, jax.Array]

    def __call__(self, *args) -> list:
        """Evaluates the fragment; one argument for each of `inputs`."""
        env = self.consts | dict(zip(self.inputs, args, strict=True))
        _evaluate(self.eqns, env, calls={})
        return [_read(env, v) for v in self.outputs]


def _read(env: dict, atom):
    return atom.val if isinstance(atom, Literal) else env[atom]


def _evaluate(eqns: Sequence[JaxprEqn], env: dict, calls: dict[str, str]) -> None:
    """Adds what the equations make to `env`; the bodies of `calls` are evaluated in their place."""
    for eqn in eqns:
        inputs = [_read(env, v) for v in eqn.invars]
        if eqn.primitive.name in calls:
            inner = eqn.params[calls[eqn.primitive.name]]
            closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
            outputs = _call(closed, inputs, calls)
        else:
            with eqn.ctx.manager:
                outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        env.update(zip(eqn.outvars, outputs))


def _call(closed: ClosedJaxpr, inputs: Sequence, calls: dict[str, str]) -> list:
    jaxpr = closed.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True))
    _evaluate(jaxpr.eqns, env, calls)
    return [_read(env, v) for v in jaxpr.outvars]


def without_checkpoints(closed: ClosedJaxpr) -> Callable[..., list]:
    """A traced function with `jax.checkpoint` undone; derivatives that it defines itself stay defined."""
    return lambda *args: _call(closed, args, _PLAIN_CALLS)


def trace(function: Callable, *args) -> Fragment:
    """Traces `function` on flat arguments, with nested calls inlined; its differentiation must be over.

    Only after inlining do equalities show: a residual that is an input, or a cast of a weight.
    """
    outer = jax.make_jaxpr(function)(*args)
    return _whole(jax.make_jaxpr(lambda *a: _call(outer, a, _CALLS))(*outer.in_avals))


def _whole(closed: ClosedJaxpr) -> Fragment:
    jaxpr = closed.jaxpr
    consts = dict(zip(jaxpr.constvars, closed.consts))
    return Fragment(tuple(jaxpr.invars), tuple(jaxpr.outvars), tuple(jaxpr.eqns), consts)


def cut(fragment: Fragment, inputs: Iterable[Var], outputs: Iterable[Var | Literal]) -> Fragment:
    """The equations of `fragment` that lead from `inputs` (any variables) to `outputs`, and no others."""
    inputs, outputs = tuple(inputs), tuple(outputs)
    given = set(inputs) | set(fragment.consts)
    needed = {v for v in outputs if not isinstance(v, Literal)} - given
    eqns = []
    for eqn in reversed(fragment.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed.difference_update(eqn.outvars)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal) and v not in given)
    if needed:
        raise ValueError(f"outputs need {len(needed)} inputs that were not given")
    return Fragment(inputs, outputs, tuple(reversed(eqns)), fragment.consts)


def tainted(fragment: Fragment, sources: Iterable[Var]) -> set[Var]:
    """All variables of the fragment that depend on any of `sources`."""
    result = set(sources)
    for eqn in fragment.eqns:
        if any(v in result for v in eqn.invars if not isinstance(v, Literal)):
            result.update(eqn.outvars)
    return result


def used(fragment: Fragment) -> set[Var]:
    """Variables that an equation or an output of the fragment reads."""
    atoms = [v for e in fragment.eqns for v in e.invars] + list(fragment.outputs)
    return {v for v in atoms if not isinstance(v, Literal)}
