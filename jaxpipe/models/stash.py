"""Which forward values to stash: the fewest bytes from which the backward follows cheaply.

Elementwise chains are cheaper to compute again than to keep. The best set is a minimum cut in the
graph of forward values, from those that are costly to compute (matmuls, loops, reductions) and the
piece's inputs, to those that the backward looks at.
"""

import math
from collections.abc import Iterable, Set

import numpy as np
from jax.extend.core import Var
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxpipe.models.jaxprs import Fragment

_ARITHMETIC = frozenset(
    """
    abs add add_any and broadcast_in_dim ceil clamp concatenate convert_element_type copy div eq expand_dims
    floor ge gt integer_pow iota is_finite le lt max min mul ne neg not one_minus_square or pad pcast pvary
    reduce_precision rem reshape rev round rsqrt select_n sign slice split sqrt square squeeze stack
    stop_gradient sub transpose unstack xor
    """.split()
)

CHEAP = {
    "cpu": _ARITHMETIC,
    "accelerator": _ARITHMETIC
    | frozenset("cos erf erfc exp exp2 expm1 log log1p logistic pow sin tanh".split()),
}
"""Primitives that move or change elements one by one, by what they run on.

On a CPU exponentials cost more than their bytes: the step of the tiny Nemotron-H took 5 to 10% longer
when its backward computed them again, though its registers were smaller by a third.
"""

_INFINITE = 2**30


def fewest_bytes(
    whole: Fragment,
    needed: set[Var],
    candidates: set[Var],
    cheap: Set[str],
    reads: Iterable[Var] = (),
    preferred: Set[Var] = frozenset(),
) -> list[Var]:
    """Variables to keep so that all of `needed` follow from them by `cheap` equations.

    Args:
      whole: the traced piece.
      needed: forward variables that the backward looks at.
      candidates: forward variables that depend on the piece's inputs; others (from weights and
        batch) are at hand and cost nothing.
      cheap: names of primitives, a value of CHEAP.
      reads: the piece's inputs.
      preferred: win ties; for values that have a register anyway, so that keeping them needs no copy.
    """
    if not needed:
        return []
    order = [v for v in reads if v in candidates]
    makers = {}
    for eqn in whole.eqns:
        for var in eqn.outvars:
            if var in candidates:
                order.append(var)
                makers[var] = eqn
    index = {v: i for i, v in enumerate(order)}
    unit = max(1, sum(_bytes(v) for v in order) * 4 // _INFINITE + 1)
    source, sink = 2 * len(order), 2 * len(order) + 1
    edges = {}
    for var, i in index.items():
        size = 4 * _bytes(var) // unit + 2
        edges[2 * i, 2 * i + 1] = size - (var in preferred)
        eqn = makers.get(var)
        if eqn is None or eqn.primitive.name not in cheap:
            edges[source, 2 * i] = _INFINITE
        else:
            for parent in eqn.invars:
                if isinstance(parent, Var) and parent in index:
                    edges[2 * index[parent] + 1, 2 * i] = _INFINITE
        if var in needed:
            edges[2 * i + 1, sink] = _INFINITE
    rows, columns = np.array(list(edges)).T
    graph = csr_array((np.array(list(edges.values()), np.int32), (rows, columns)), shape=(sink + 1, sink + 1))
    residual = graph - maximum_flow(graph, source, sink).flow
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    return [v for v, i in index.items() if 2 * i in reached and 2 * i + 1 not in reached]


def _bytes(var: Var) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize
