"""Small tools on jaxprs: inlining, cutting out fragments, and asking what depends on what."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


@dataclass(frozen=True, eq=False)
class Fragment:
    """A part of a traced function: equations that lead from `inputs` to `outputs`.

    An output may be a literal, an input or a constant. Differentiation is over by now, so calls
    with custom derivatives are plain calls.
    """

    inputs: tuple[Var, ...]
    outputs: tuple[Var | Literal, ...]
    eqns: tuple[JaxprEqn, ...]
    consts: dict[Var, jax.Array]

    def __call__(self, *args) -> list:
        """Evaluates the fragment; one argument for each of `inputs`."""
        env = self.consts | dict(zip(self.inputs, args, strict=True))
        _evaluate(self.eqns, env)
        return [_read(env, v) for v in self.outputs]


def _read(env: dict, atom):
    return atom.val if isinstance(atom, Literal) else env[atom]


def _evaluate(eqns: Sequence[JaxprEqn], env: dict) -> None:
    for eqn in eqns:
        inputs = [_read(env, v) for v in eqn.invars]
        if eqn.primitive.name in _CALLS:
            inner = eqn.params[_CALLS[eqn.primitive.name]]
            scope = dict(zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*inner.consts, *inputs]))
            _evaluate(inner.jaxpr.eqns, scope)
            outputs = [_read(scope, v) for v in inner.jaxpr.outvars]
        else:
            with eqn.ctx.manager:
                outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        env.update(zip(eqn.outvars, outputs))


def trace(function: Callable, *args) -> Fragment:
    """Traces `function` on flat arguments, with nested calls inlined.

    Only after inlining do equalities show: a residual that is an input, or a cast of a weight.
    """
    outer = jax.make_jaxpr(function)(*args)
    closed = jax.make_jaxpr(lambda *a: _whole(outer)(*a))(*outer.in_avals)
    return _whole(closed)


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
