"""Parameters in slots: round trips, what counts and which copies belong together, for random partitions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpipe.models.code import abstract_mesh, trace_model
from jaxpipe.models.piece import Model, Piece, init_params, piece_params
from jaxpipe.planning.plan import Action, Plan
from jaxpipe.program.program import lower
from jaxpipe.runtime.layout import from_slots, make_layout, owned, slot_specs, tied_users, to_slots
from jaxpipe.runtime.specs import piece_specs

V, H = 6, 3
NORMAL = nn.initializers.normal(1.0)


class Embed(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        table = self.param("table", nn.with_partitioning(NORMAL, ("model", None)), (V // self.tp, H))
        return {"x": table[batch["tokens"]]}, {}


class Scale(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        return {"x": values["x"] * self.param("scale", NORMAL, (H,))}, {}


class Mix(nn.Module):
    """Nested parameters."""

    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        return {"x": nn.Dense(H)(values["x"]) + self.param("shift", NORMAL, ())}, {}


class Double(nn.Module):
    """No parameters."""

    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        return {"x": 2 * values["x"]}, {}


class Head(nn.Module):
    tp: int = 1

    @nn.compact
    def __call__(self, values, batch):
        table = self.param("table", nn.with_partitioning(NORMAL, ("model", None)), (V // self.tp, H))
        scale = self.param("scale", NORMAL, (H,))
        return {}, {"nll": jnp.sum(values["x"] * scale @ table.T)}


def head(name: str, **tied) -> Piece:
    return Piece(name, "head", Head(), ("x",), (), ("nll",), tuple(tied.items()))


def block(i: int, module: nn.Module) -> Piece:
    return Piece(f"block_{i}", type(module).__name__.lower(), module, ("x",), ("x",))


MODEL = Model(
    "toy",
    (
        Piece("embed", "embed", Embed(), (), ("x",)),
        *(block(i, module()) for i, module in enumerate([Scale, Mix, Double, Scale, Scale, Mix])),
        head("first", table=("embed", "table")),
        # Of one kind, one piece owns what another ties to.
        head("second"),
        head("third", table=("second", "table"), scale=("first", "scale")),
    ),
)
OWNERS = [("embed", "table"), ("first", "scale"), ("second", "table")]
COUNT = len(MODEL.pieces)
POLICIES = ("forward",) * COUNT
CODES = trace_model(MODEL, abstract_mesh(1), 1, 2, POLICIES, jnp.float32)
SPECS = piece_specs(MODEL, CODES, POLICIES)
PARAMS = init_params(MODEL, 0)


def layout_of(bounds, homes, devices):
    rows = [tuple(Action(s, "F", 0) for s, home in enumerate(homes) if home == d) for d in range(devices)]
    names = tuple(piece.name for piece in MODEL.pieces)
    plan = Plan("given", devices, 1, names, bounds, homes, ("none",) * COUNT, tuple(rows))
    return make_layout(MODEL, lower(plan, SPECS))


@st.composite
def layouts(draw):
    """Layouts of any partition in stages on any devices, some of which may hold nothing."""
    devices = draw(st.integers(1, 4))
    bounds = (0, *sorted(draw(st.sets(st.integers(1, COUNT - 1)))), COUNT)
    homes = tuple(draw(st.integers(0, devices - 1)) for _ in bounds[1:])
    return layout_of(bounds, homes, devices)


def holders(layout):
    """(slot key, device, piece index) of every slot in use."""
    return [(key, d, i) for key, held in layout.placement for d, i in enumerate(held) if i >= 0]


@settings(deadline=None, max_examples=25)
@given(layouts())
def test_slots_hold_the_parameters_of_each_piece(layout):
    slots = to_slots(MODEL, layout, PARAMS)
    found = holders(layout)
    assert sorted(i for _, _, i in found) == [i for i, p in enumerate(MODEL.pieces) if p.kind != "double"]
    for key, device, i in found:
        assert key.split(":")[0] == MODEL.pieces[i].kind
        own = jax.tree.map(lambda a, d=device: a[d], slots[key])
        jax.tree.map(np.testing.assert_array_equal, own, piece_params(MODEL.pieces[i], PARAMS))
    for key, held in layout.placement:
        for device in (d for d, i in enumerate(held) if i < 0):
            assert all(not np.any(a[device]) for a in jax.tree.leaves(slots[key]))
    back = from_slots(MODEL, layout, slots)
    assert list(back) == [piece.name for piece in MODEL.pieces]
    jax.tree.map(np.testing.assert_array_equal, back, PARAMS)


@settings(deadline=None, max_examples=25)
@given(layouts())
def test_every_parameter_counts_once(layout):
    slots = to_slots(MODEL, layout, PARAMS)
    counts = owned(MODEL, layout, slots)
    by_device = jax.tree.map(lambda a: np.square(a).reshape(len(a), -1).sum(1), slots)
    found = sum(jax.tree.leaves(jax.tree.map(lambda s, c: (s * c).sum(), by_device, counts)))
    np.testing.assert_allclose(found, sum(np.square(v).sum() for v in jax.tree.leaves(PARAMS)), rtol=1e-5)
    # Specs, which the training state passes, give the same.
    jax.tree.map(np.testing.assert_array_equal, owned(MODEL, layout, slot_specs(MODEL, layout)), counts)


@settings(deadline=None, max_examples=25)
@given(layouts())
def test_copies_of_a_tied_parameter_are_found(layout):
    """Each owner's parameter is filled with a number of its own: its copies are where that number stands."""
    params = jax.tree.map(jnp.zeros_like, PARAMS)
    for number, (owner, name) in enumerate(OWNERS, 1):
        params[owner] = params[owner] | {name: jnp.full_like(params[owner][name], number)}
    slots = to_slots(MODEL, layout, params)
    groups = tied_users(MODEL, layout)
    assert len(groups) == len(OWNERS)
    for number, group in enumerate(groups, 1):
        found = {
            (key, name, device)
            for (key, name), flags in group.items()
            for device in np.flatnonzero(flags).tolist()
        }
        assert found == {
            (key, name, device)
            for key, own in slots.items()
            for name in ("table", "scale")
            if key.split(":")[0] in ("embed", "head") and name in own
            for device in range(own[name].shape[0])
            if (own[name][device] == number).all()
        }
        assert len(found) == 2
        assert all(flags.dtype == np.float32 and set(flags) <= {0, 1} for flags in group.values())


def test_a_layout_by_hand():
    layout = layout_of((0, 5, COUNT), (1, 0), 2)
    assert layout.placement == (
        ("embed:0", (-1, 0)),
        ("head:0", (7, -1)),
        ("head:1", (8, -1)),
        ("head:2", (9, -1)),
        ("mix:0", (6, 2)),
        ("scale:0", (5, 1)),
        ("scale:1", (-1, 4)),
    )
    specs = slot_specs(MODEL, layout)
    assert specs["embed:0"] == {"table": P("stage", "model", None)}
    assert specs["head:1"] == {"table": P("stage", "model", None), "scale": P("stage")}
    assert specs["mix:0"]["Dense_0"] == {"kernel": P("stage"), "bias": P("stage")}


def test_placements_with_equal_slots_take_arguments_of_one_structure():
    """`third` stands in slot 0 of its device or in slot 1: a step compiled for one runs the other."""
    layouts = [layout_of((0, 8, 9, COUNT), homes, 2) for homes in ((0, 0, 1), (0, 1, 0))]
    assert [key for key, _ in layouts[0].placement] == [key for key, _ in layouts[1].placement]
    one, other = (jax.tree.structure(tied_users(MODEL, layout)) for layout in layouts)
    assert one == other
