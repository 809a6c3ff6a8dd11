import pytest
from rich.console import Console

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import rivals
from jaxpipe.planning.simulator import lower_bound, simulate
from jaxpipe.reports.tables import PieceRow, PlanRow, piece_rows, pieces_table, plan_row, plans_table


def printed(table, width=80):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def cells(lines, name):
    """The row called `name`, one space between the words."""
    (line,) = [line for line in lines if line.replace(">", "").strip().startswith(name + " ")]
    return " ".join(line.replace(">", "").split())


def test_plans_table():
    rows = [
        PlanRow("1f1b-even", 0.25, 0.275, 0.305, 3 << 30, 0.125),
        PlanRow("1f1b-balanced", 0.2, 0.2, 0.125, 1 << 30, 0.125),
    ]
    lines = printed(plans_table(rows, "s", chosen="1f1b-balanced"))
    assert cells(lines, "1f1b-even") == "1f1b-even 250 ms 275 ms 30.5% 3.00 GiB 2.000"
    assert cells(lines, "1f1b-balanced") == "1f1b-balanced 200 ms 200 ms 12.5% 1.00 GiB 1.600"
    assert [line.split()[1] for line in lines if line.lstrip().startswith(">")] == ["1f1b-balanced"]


def test_memory_over_the_limit_is_red():
    table = plans_table(
        [PlanRow("a", 1, 1, 0, 2000, 1), PlanRow("b", 1, 1, 0, 1000, 1)], "s", memory_limit_bytes=1500
    )
    assert [text.style for text in table.columns[4]._cells] == ["red", ""]


def test_plan_rows_from_simulations_fit_80_columns():
    costs = CostTable("ms", tuple(PieceCost(f"p{i}", "k", 1, 2, 3, stash_bytes=7 << 20) for i in range(6)))
    bound = lower_bound(costs, 3, 4)
    rows = [plan_row(plan.name, simulate(plan, costs), 99.5, bound) for plan in rivals(costs, 3, 4)]
    lines = printed(plans_table(rows, "ms"))
    assert max(map(len, lines)) <= 80
    # (m + p - 1) stages of 12 ms each, against m times 12 ms; 4 or 3 micro-batches of 14 MiB.
    assert cells(lines, "gpipe-even") == "gpipe-even 72.0 ms 99.5 ms 33.3% 56.0 MiB 1.500"
    assert cells(lines, "1f1b-balanced") == "1f1b-balanced 72.0 ms 99.5 ms 33.3% 42.0 MiB 1.500"


def test_pieces_table():
    rows = [PieceRow("mlp", 4, 2_000_000, 1e-3, 2e-3, 1e-3), PieceRow("head", 1, 500_000, 0.0, 2e-3, 2e-3)]
    lines = printed(pieces_table(rows, "s"))
    assert cells(lines, "mlp") == "mlp 4 2.00 M 1.00 ms 2.00 ms 1.00 ms 80.0%"
    assert cells(lines, "head") == "head 1 500 K 0 2.00 ms 2.00 ms 20.0%"
    assert cells(lines, "all") == "all 5 2.50 M 4.00 ms 10.0 ms 6.00 ms 100.0%"


def test_piece_rows_group_by_kind():
    pieces = (PieceCost("a", "x", 1, 2, 3), PieceCost("b", "y", 4, 5, 6), PieceCost("c", "x", 3, 2, 1))
    rows = piece_rows(CostTable("unit", pieces), {"a": 10, "b": 20, "c": 30})
    assert rows == [PieceRow("x", 2, 40, 2, 2, 2), PieceRow("y", 1, 20, 4, 5, 6)]
    with pytest.raises(KeyError, match="b"):
        piece_rows(CostTable("unit", pieces), {"a": 10, "c": 30})
