"""The quick tables of the benchmark hold, and a broken bar shows."""

import pytest

from experiments.benchmarks import simulator
from experiments.benchmarks.simulator import MAKERS, at_most, equal, near

QUICK = {"measured iterations": 8, "sheets": 30, "formulas": 76, "helix bubbles": 28, "helix memory": 6}
"""Tables and how many numbers each has."""


@pytest.mark.parametrize("name", QUICK)
def test_quick_tables_hold(name):
    rows = list(MAKERS[name]())
    assert [f"{row.case}: {row.what}" for row in rows if not row.holds] == []
    assert len(rows) == QUICK[name]


def test_bars():
    assert near("", "", 0.1, 0.1001, 0.0002).holds
    assert not near("", "", 0.1, 0.0997, 0.0002).holds
    assert at_most("", "", 0.1, 0.05, 0.002).holds
    assert not at_most("", "", 0.1, 0.1021, 0.002).holds
    assert equal("", "", 3.0, 0.3 * 10).holds
    assert not equal("", "", 3, 3.001).holds


@pytest.mark.parametrize("found", [1.0, 2.0])
def test_a_broken_bar_is_named_and_fails(found, monkeypatch, capsys):
    def table():
        """One number."""
        yield equal("a case", "a number", 1.0, found)

    class Flag:
        value = None

    monkeypatch.setattr(simulator, "MAKERS", {"one": table})
    monkeypatch.setattr(simulator, "TABLES", Flag)
    monkeypatch.setattr(simulator, "begin", lambda argv, devices: None)
    monkeypatch.setattr(simulator, "write_results", lambda results: None)
    with pytest.raises(SystemExit) as stop:
        simulator.main(["simulator"])
    broken = found != 1.0
    assert stop.value.code == broken
    assert ("one, a case: a number" in capsys.readouterr().out) == broken
