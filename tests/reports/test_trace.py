import json

import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.build import make_plan
from jaxpipe.planning.simulator import simulate
from jaxpipe.reports.trace import event_entries, memory_entries, write_trace


def simulation(unit):
    costs = CostTable(unit, tuple(PieceCost(f"p{i}", "k", 1, 2, 3, stash_bytes=10) for i in range(2)))
    return simulate(make_plan(costs, 2, 3), costs)


@pytest.mark.parametrize(("unit", "factor"), [("s", 1e6), ("ms", 1e3), ("us", 1), ("unit", 1)])
def test_events_in_microseconds(unit, factor, tmp_path):
    simulated = simulation(unit)
    write_trace(simulated, tmp_path / "trace.json", unit)
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["name"], e["tid"]): e["args"]["name"] for e in entries if e["ph"] == "M"}
    assert names == {
        ("process_name", 0): "planned",
        ("thread_name", 0): "device 0",
        ("thread_name", 1): "device 1",
    }
    spans = {e["name"]: (e["tid"], e["ts"], e["dur"], e["cat"]) for e in entries if e["ph"] == "X"}
    assert len(spans) == 2 * 3 * 2
    # Stage 1 runs F of micro-batch 0 from 1 to 2 and its backward, which takes 2 + 3, from 2 to 7.
    assert spans["0F0"] == (0, 0, pytest.approx(factor), "forward")
    assert spans["1F0"] == (1, pytest.approx(factor), pytest.approx(factor), "forward")
    assert spans["1B0"] == (1, pytest.approx(2 * factor), pytest.approx(5 * factor), "backward")
    assert max(ts + dur for _, ts, dur, _ in spans.values()) == pytest.approx(simulated.makespan * factor)


def test_memory_counters_keep_the_peaks():
    simulated = simulation("ms")
    entries = memory_entries(simulated.memory, "ms")
    for device in range(2):
        series = [e for e in entries if e["name"] == f"memory of device {device}"]
        assert [e["ts"] for e in series] == sorted({e["ts"] for e in series})
        assert max(e["args"]["bytes"] for e in series) == simulated.peak_bytes[device]
        assert series[-1]["args"]["bytes"] == 0


def test_a_measured_step_is_a_process_of_its_own():
    entries = event_entries(simulation("s").events, "s", process="measured", process_id=1)
    assert {e["pid"] for e in entries} == {1}
    assert entries[0]["args"] == {"name": "measured"}


def test_unknown_unit():
    with pytest.raises(ValueError, match="unknown time unit 'min'"):
        event_entries([], "min")
