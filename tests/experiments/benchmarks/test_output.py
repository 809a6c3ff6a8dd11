import json

import pytest
from absl import flags

from experiments.benchmarks.output import JSON, Spread, begin, spread, write_results


def test_spread_gives_quartiles():
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(2.0, 3.0, 4.0)
    assert str(spread([1.0, 2.0])) == "1.5 (1.25 to 1.75)"


def test_arguments_that_are_no_flags_are_refused():
    with pytest.raises(SystemExit) as stopped:
        begin(["folder/overhead.py", "fast"], devices=1)
    assert stopped.value.code == "overhead.py: unexpected argument 'fast'; flags start with --"


def test_results_say_where_they_come_from(tmp_path):
    flags.FLAGS(["benchmark", f"--json={tmp_path / 'results.json'}"])
    assert JSON.value
    write_results({"ratio": 1.5})
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["ratio"] == 1.5
    assert results["host"]["device"] == "cpu"
    assert results["host"]["cores"] >= 1
