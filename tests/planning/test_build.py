import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import make_plan, rivals
from jaxpipe.planning.plan import check

# Times 3 3 3 3 9 9; with the heavy forwards run twice 3 3 3 3 15 15.
COSTS = CostTable(
    "unit",
    tuple(PieceCost(f"a{i}", "light", 1, 1, 1) for i in range(4))
    + tuple(PieceCost(f"b{i}", "heavy", 6, 1, 2) for i in range(2)),
)


def test_partitions():
    assert make_plan(COSTS, 2, 4, partition="even").stage_bounds == (0, 3, 6)
    # 12 and 18 beat 21 and 9; with recompute 27 and 15 beat 12 and 30.
    assert make_plan(COSTS, 2, 4).stage_bounds == (0, 4, 6)
    assert make_plan(COSTS, 2, 4, recompute={"heavy": "full"}).stage_bounds == (0, 5, 6)


def test_recompute_by_kind_or_for_all():
    assert make_plan(COSTS, 2, 4).recompute == ("none",) * 6
    assert make_plan(COSTS, 2, 4, recompute="full").recompute == ("full",) * 6
    assert make_plan(COSTS, 2, 4, recompute={"heavy": "full"}).recompute == ("none",) * 4 + ("full",) * 2


def test_rivals_are_several_schedules_and_all_partitions():
    plans = rivals(COSTS, 3, 5, {"light": "full"})
    schedules = ("gpipe", "1f1b", "1f1b_split", "zb_h1")
    assert [plan.name for plan in plans] == [f"{s}-{p}" for s in schedules for p in ("balanced", "even")]
    for plan in plans:
        check(plan)
        assert plan.recompute == ("full",) * 4 + ("none",) * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "zb-h3"}, "unknown schedule 'zb-h3'; known: gpipe, gpipe_split, 1f1b"),
        ({"partition": "fair"}, "unknown partition 'fair'; known: balanced, even"),
        ({"recompute": "half"}, "unknown recompute policy 'half' of 'heavy'; known: none, full"),
        ({"recompute": {"mamba": "full"}}, "unknown kind 'mamba'; known: heavy, light"),
        ({"devices": 7}, "6 pieces cannot fill 7 devices; expected a piece for each at least"),
        (
            {"microbatches": 10**8},
            r"100000000 micro-batches on 2 devices .* at most 131,072 pairs of device and micro-batch",
        ),
        ({"devices": 0}, "devices is 0; expected at least 1"),
        ({"microbatches": 0}, "microbatches is 0; expected at least 1"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**({"costs": COSTS, "devices": 2, "microbatches": 4} | arguments))
