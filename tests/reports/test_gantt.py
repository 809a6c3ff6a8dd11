import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.plan import Action, Plan
from jaxpipe.planning.simulator import simulate
from jaxpipe.reports.gantt import COLORS, IDLE, MEMORY, attention_stages, label, write_gantt

DATA = Path(__file__).parent.parent / "data"
SVG = "{http://www.w3.org/2000/svg}"


def draw(path, plan, costs, **changes):
    """Texts of the picture, its fills, and the boxes of each fill as (x, y, width, height)."""
    write_gantt(simulate(plan, costs), plan, path, **({"title": "a title", "unit": costs.unit} | changes))
    root = ElementTree.parse(path).getroot()
    texts = ["".join(node.itertext()) for node in root.iter(SVG + "text")]
    boxes = {}
    for node in root.iter(SVG + "path"):
        found = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-", node.get("d"))
        boxes.setdefault(node.get("fill"), []).extend(tuple(map(float, box)) for box in found)
    return texts, boxes


def table(unit="ms", **sizes):
    return CostTable(unit, tuple(PieceCost(f"p{i}", "k", 1, 1, 1, **sizes) for i in range(3)))


def test_what_the_chart_says(tmp_path):
    costs = table(stash_bytes=1 << 20)
    texts, boxes = draw(tmp_path / "a.svg", make_plan(costs, 3, 4), costs)
    # (4 + 3 - 1) * 3 ms; bubble (p - 1) / (m + p - 1) = 2 / 6.
    subtitle = "makespan 18.0 ms, bubble 33.3% of 3 devices × makespan, 4 micro-batches"
    for text in ("a title", subtitle, "time (ms)", "F forward", "B backward", "idle"):
        assert text in texts
    assert [texts.count(f"device {d}") for d in range(3)] == [2, 2, 2]  # once for time, once for memory
    assert [texts.count(f"{n}.00 MiB") for n in (3, 2, 1)] == [1, 1, 1]
    # Stage and micro-batch in every box: once for F and once for B.
    assert all(texts.count(f"{s}.{m}") == 2 for s in range(3) for m in range(4))
    assert [text for text in texts if re.fullmatch(r"\d+", text)] == [str(2 * i) for i in range(10)]
    # Each colour has its boxes and its swatch in the legend.
    assert {phase: len(boxes.get(color, ())) for phase, color in COLORS.items()} == {
        "F": 13,
        "B": 13,
        "I": 0,
        "W": 0,
    }


def test_boxes_lie_where_the_events_are(tmp_path):
    costs = table("unit")
    _, boxes = draw(tmp_path / "a.svg", make_plan(costs, 3, 4), costs)
    lanes = [box for box in boxes[IDLE] if box[2] > 100]
    assert len(lanes) == 3
    # The lane is 18 long. On device 2 the first F runs from 2 to 3 and its B from 3 to 5.
    x, y, length, height = lanes[2]
    pixels = length / 18
    assert (x + 2 * pixels, y, pixels, height) in [pytest.approx(box, abs=0.02) for box in boxes[COLORS["F"]]]
    (found,) = [box for box in boxes[COLORS["B"]] if box[1] == y and box[0] < x + 4 * pixels]
    assert found == pytest.approx((x + 3 * pixels, y, 2 * pixels, height), abs=0.02)


def test_no_memory_strip_without_bytes_and_no_unit_without_length(tmp_path):
    costs = table("unit")
    texts, _ = draw(tmp_path / "a.svg", make_plan(costs, 3, 4), costs)
    assert texts.count("device 0") == 1
    assert "peak memory" not in texts
    assert "time" in texts


def test_the_limit_is_a_named_line_in_the_memory_strip(tmp_path):
    costs = table(stash_bytes=1 << 20)
    plan = make_plan(costs, 3, 4)
    for limit, over in ((1.5, 2), (6, 0)):
        texts, _ = draw(tmp_path / "a.svg", plan, costs, memory_limit_bytes=limit * 2**20)
        assert f"memory limit {limit:.2f} MiB" in texts
        root = ElementTree.parse(tmp_path / "a.svg").getroot()
        dashed = [node for node in root.iter(SVG + "path") if node.get("stroke-dasharray")]
        lines = [node.get("d").count("M") for node in dashed]
        assert sorted(lines) == [1, 3]  # in the name, and one a device
        # Peaks of 3, 2 and 1 MiB: those above the limit are written in its colour.
        red = [node for node in root.iter(SVG + "text") if node.get("fill") == dashed[0].get("stroke")]
        assert len(red) == 1 + over
        (found,) = [node for node in dashed if node.get("d").count("M") == 3]
        heights = [float(y) for y in re.findall(r"M[\d.]+ ([\d.]+)L", found.get("d"))]
        (bands,) = [node.get("d") for node in root.iter(SVG + "path") if node.get("fill") == MEMORY]
        tops = [min(float(y) for y in re.findall(r" ([\d.]+)", band)) for band in bands.split("M")[1:]]
        assert [line > top for line, top in zip(heights, tops)] == [True, True, False][:over] + [False] * (
            3 - over
        )


def test_what_is_allocated_is_told_from_what_is_used(tmp_path):
    costs = table(stash_bytes=1 << 20)
    plan = make_plan(costs, 3, 4)
    for model, heading, sizes in (("ideal", "peak memory", [1, 1, 1]), ("padded", "allocated", [3, 0, 0])):
        simulation = simulate(plan, costs, memory_model=model)
        write_gantt(simulation, plan, tmp_path / "a.svg", "a title", "ms")
        texts = [node.text for node in ElementTree.parse(tmp_path / "a.svg").getroot().iter(SVG + "text")]
        assert [name for name in ("peak memory", "allocated") if name in texts] == [heading]
        # Devices 0, 1 and 2 use 3, 2 and 1 MiB; one program for all gives each 3.
        assert [texts.count(f"{n}.00 MiB") for n in (3, 2, 1)] == sizes


def test_memory_that_changes_hands_at_one_time_shows_no_slit(tmp_path):
    # On one device B of 0 ends, and frees a stash, when F of 1 begins, which takes one.
    costs = CostTable("ms", (PieceCost("p", "k", 1, 1, 1, stash_bytes=100),))
    draw(tmp_path / "a.svg", make_plan(costs, 1, 2), costs)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    (band,) = [node.get("d") for node in root.iter(SVG + "path") if node.get("fill") == MEMORY]
    points = [tuple(map(float, point.split())) for point in band[1:].split("L")]
    (left, top), (right, floor) = min(points), max(points)
    assert top < floor
    assert {y for x, y in points if left < x < right} == {top}  # one level all the way


def test_several_stages_a_device_with_I_and_W(tmp_path):
    schedule = read_csv((DATA / "pytorch_zb1p_2rank_2stagep_compute.csv").read_text())
    names = tuple("abcd")
    plan = Plan("zb1p", 2, 8, names, (0, 1, 2, 3, 4), (0, 1, 0, 1), ("none",) * 4, schedule)
    costs = CostTable("us", tuple(PieceCost(name, "k", 1, 1, 1) for name in names))
    texts, boxes = draw(tmp_path / "a.svg", plan, costs)
    for text in ("I input gradient", "W weight gradient", "lighter: later stage of a device", "time (µs)"):
        assert text in texts
    assert "B backward" not in texts
    assert all(texts.count(f"{s}.{m}") == 3 for s in range(4) for m in range(8))
    # Two shades of each colour: 2 devices, 8 micro-batches; the full ones have swatches, too.
    assert [len(boxes[COLORS[phase]]) for phase in "FIW"] == [17] * 3
    assert sorted(len(found) for found in boxes.values() if len(found) >= 16) == [16] * 3 + [17] * 3


def test_attention_is_hatched(tmp_path):
    kinds = ("attention_pre", "attention_core", "attention_post")
    costs = CostTable("ms", tuple(PieceCost(kind, kind, 1, 1, 1) for kind in kinds))
    plan = make_plan(costs, 3, 4)
    assert attention_stages(plan, costs) == (1,)
    assert attention_stages(make_plan(costs, 2, 4), costs) == ()
    texts, boxes = draw(tmp_path / "a.svg", plan, costs, attention=attention_stages(plan, costs))
    hatched = boxes["url(#attention)"]
    assert "attention" in texts
    lanes = {y for _, y, width, _ in hatched if width > 14}
    assert len(lanes) == 1
    assert len(hatched) == 4 + 4 + 1  # F and B of every micro-batch, and the legend


def test_what_is_written_depends_on_the_room():
    action = Action(12, "F", 7)
    for width, digits, shared, expected in (
        (100, 2, False, ("12.7", False)),
        (20, 2, False, ("7", False)),
        (20, 2, True, ("12.7", True)),
        (8, 1, False, ("7", False)),
        (8, 2, False, ("12.7", True)),
        (3, 2, True, None),
    ):
        found = label(action, width, 26.4, digits, shared)
        assert (found and (found.text, found.upright)) == expected
        # Digits are about 0.6 of the font size wide and 0.7 high.
        if found:
            along, across = (26.4, width) if found.upright else (width, 26.4)
            assert 0.6 * found.size * len(found.text) < along
            assert 0.7 * found.size < across
            assert found.size >= 5.5


def test_every_action_can_be_read_at_16_devices_and_64_micro_batches(tmp_path):
    pieces = tuple(PieceCost(f"p{i}", "k", 1, 1, 1) for i in range(32))
    costs = CostTable("ms", pieces)
    texts, _ = draw(tmp_path / "a.svg", named_plan("interleaved_1f1b", costs, 16, 64), costs)
    assert all(texts.count(f"{s}.{m}") == 2 for s in range(32) for m in range(64))


def test_micro_batch_numbers_only_where_they_fit(tmp_path):
    costs = table("unit")
    texts, _ = draw(tmp_path / "a.svg", make_plan(costs, 3, 4000), costs)
    assert "3999" not in texts
    assert "0.3999" not in texts


def test_titles_are_escaped(tmp_path):
    costs = table()
    texts, _ = draw(tmp_path / "a.svg", make_plan(costs, 3, 4), costs, title="a < b & c")
    assert "a < b & c" in texts


def test_a_plan_that_takes_no_time_can_be_drawn(tmp_path):
    costs = CostTable("s", tuple(PieceCost(f"p{i}", "k", 0, 0, 0) for i in range(3)))
    texts, _ = draw(tmp_path / "a.svg", make_plan(costs, 3, 4), costs)
    assert texts.count("device 2") == 1


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
        + "".join(
            f"import jaxpipe.reports.{name}\n"
            for name in ["gantt", "plan_report", "svg", "tables", "trace", "units"]
        )
        + "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
