import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.plan import Plan
from jaxpipe.planning.simulator import simulate
from jaxpipe.reports.gantt import COLORS, write_gantt

DATA = Path(__file__).parent.parent / "data"
SVG = "{http://www.w3.org/2000/svg}"


def draw(path, plan, costs, **changes):
    write_gantt(simulate(plan, costs), plan, path, **({"title": "a title", "unit": costs.unit} | changes))
    root = ElementTree.parse(path).getroot()
    texts = ["".join(node.itertext()).strip() for node in root.iter(SVG + "text")]
    fills = [node.get("style", "") for node in root.iter(SVG + "path")] + [
        node.get("style", "") for node in root.iter(SVG + "use")
    ]
    return texts, " ".join(fills).lower()


def table(unit="ms", **sizes):
    return CostTable(unit, tuple(PieceCost(f"p{i}", "k", 1, 1, 1, **sizes) for i in range(3)))


def test_what_the_chart_says(tmp_path):
    costs = table(stash_bytes=1 << 20)
    texts, fills = draw(tmp_path / "a.svg", make_plan(costs, 3, 4), costs)
    # (4 + 3 - 1) * 3 ms; bubble (p - 1) / (m + p - 1) = 2 / 6.
    subtitle = "makespan 18.0 ms, bubble 33.3% of 3 devices × makespan, 4 micro-batches"
    for text in ("a title", subtitle, "time (ms)", "F forward", "B backward", "idle"):
        assert text in texts
    assert [texts.count(f"device {d}") for d in range(3)] == [2, 2, 2]  # once for time, once for memory
    assert [texts.count(f"{n}.00 MiB") for n in (3, 2, 1)] == [1, 1, 1]
    assert COLORS["F"].lower() in fills
    assert COLORS["B"].lower() in fills
    assert COLORS["W"].lower() not in fills


def test_no_memory_strip_without_bytes_and_no_unit_without_length(tmp_path):
    costs = table("unit")
    texts, _ = draw(tmp_path / "a.svg", make_plan(costs, 3, 4), costs)
    assert texts.count("device 0") == 1
    assert "peak memory" not in texts
    assert "time" in texts


def test_several_stages_a_device_with_I_and_W(tmp_path):
    schedule = read_csv((DATA / "pytorch_zb1p_2rank_2stagep_compute.csv").read_text())
    names = tuple("abcd")
    plan = Plan("zb1p", 2, 8, names, (0, 1, 2, 3, 4), (0, 1, 0, 1), ("none",) * 4, schedule)
    costs = CostTable("us", tuple(PieceCost(name, "k", 1, 1, 1) for name in names))
    texts, _ = draw(tmp_path / "a.svg", plan, costs)
    for text in ("I input gradient", "W weight gradient", "lighter: later stage of a device", "time (µs)"):
        assert text in texts
    assert "B backward" not in texts
    # 96 boxes wide enough for one digit; the axis may add digits of its own.
    assert sum(text in set("01234567") for text in texts) >= 96


def test_micro_batch_numbers_only_where_they_fit(tmp_path):
    costs = table("unit")
    texts, _ = draw(tmp_path / "a.svg", make_plan(costs, 3, 400), costs)
    assert "399" not in texts


def test_same_input_same_bytes(tmp_path):
    costs = table(stash_bytes=1 << 20)
    for name in ("a.svg", "b.svg"):
        draw(tmp_path / name, make_plan(costs, 3, 4), costs)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_unknown_unit(tmp_path):
    costs = table()
    with pytest.raises(ValueError, match="unknown time unit 'h'"):
        draw(tmp_path / "a.svg", make_plan(costs, 3, 4), costs, unit="h")


def test_planning_and_reports_do_not_load_jax():
    modules = "build interchange memory partition plan schedules simulator stages"
    code = (
        "import sys\n"
        + "".join(f"import jaxpipe.planning.{name}\n" for name in modules.split())
        + "".join(f"import jaxpipe.reports.{name}\n" for name in ["gantt", "tables", "trace", "units"])
        + "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
