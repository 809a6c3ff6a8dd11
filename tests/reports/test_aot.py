import io

from rich.console import Console

from jaxpipe.reports.aot import OpRow, library_calls, memory_table, ops_table


def shown(table) -> list[list[str]]:
    """The cells of the printed lines."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_ops_of_one_name_share_a_line():
    rows = [
        OpRow("mlp F", 9, 3, {"__cublas$lt$matmul": 3}, 2**20),
        OpRow("mlp F", 11, 3, {"__cublas$lt$matmul": 3, "__norm": 1}, 2**20),
        OpRow("embed F", 1, 0, {}, 512),
    ]
    lines = shown(ops_table(rows))
    assert ["mlp F", "2", "9 to 11", "3", "1.00 MiB"] in lines
    assert ["embed F", "1", "1", "0", "512 B"] in lines
    assert library_calls(rows) == {"__cublas$lt$matmul": 6, "__norm": 1}


def test_memory():
    lines = shown(memory_table({"registers": 3 * 2**30, "workspace": 2**30}, 5 * 2**30))
    assert ["registers", "3.00 GiB", "75.0%"] in lines
    assert ["predicted", "4.00 GiB", "100.0%"] in lines
    assert ["compiled", "5.00 GiB", "125.0%"] in lines
