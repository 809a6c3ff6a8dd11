"""The benchmark's costs against arithmetic by hand, and its plans."""

import pytest

from experiments.benchmarks.helix import (
    HELIX,
    MODEL,
    RIVALS,
    Row,
    best_rival,
    gain,
    make_plans,
    price,
    summary,
)

TOKENS, GPUS = 131072, 8


@pytest.fixture(scope="module")
def costs():
    return price(MODEL, TOKENS, 8, GPUS, "h20")


def test_costs_are_those_of_a_7b_model_at_128k_tokens(costs):
    """A GPU does an eighth; the H20 148 TFLOP/s, of which large matmuls reach 60%."""
    forward = {piece.name: piece.F for piece in costs.pieces}
    sent = {piece.name: piece.output_bytes for piece in costs.pieces}
    rate = 148e12 * 0.6 * GPUS
    # Scores and their product with v: two matmuls of 2 s^2 h FLOPs, half of them masked.
    attention = 2 * 2 * TOKENS**2 * 4096 / 2 / rate
    assert forward["layer_00/attention"] == pytest.approx(attention, rel=0.1)
    assert forward["layer_00/mlp"] == pytest.approx(2 * TOKENS * 3 * 4096 * 11008 / rate, rel=0.1)
    # bfloat16: q, k, v and the residual stream before attention, o and the stream behind.
    stream = 2 * TOKENS * 4096 / GPUS
    assert sent["layer_00/pre"] == 4 * stream
    assert sent["layer_00/attention"] == 2 * stream
    # float32 masters, an eighth of them, the tied table twice.
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 51200 * 4096
    assert sum(p.param_bytes for p in costs.pieces) == pytest.approx(4 * parameters / GPUS, rel=1e-3)


def test_every_plan_is_there(costs):
    plans = make_plans(costs, 8, 16)
    assert set(RIVALS) | set(HELIX) | {"interleaved_1f1b", "interleaved_1f1b+recompute"} <= set(plans)
    assert all(plan.microbatches == 16 and plan.devices == 8 for plan in plans.values())


def rows(*cells):
    return [Row(name, makespan, 0.0, 0.0, fits) for name, makespan, fits in cells]


def test_the_summary_compares_what_fits():
    found = rows(
        ("zb1p", 80.0, False),
        ("1f1b", 100.0, True),
        ("helix_naive", 50.0, False),
        ("helix_two_fold", 80.0, True),
    )
    assert best_rival(found).name == "zb1p"
    assert gain(found[3], found[1]) == pytest.approx(0.25)
    text = summary(found)
    assert text.startswith("helix_two_fold over 1f1b")
    assert "+25.0%" in text
    assert "+26%" in text


@pytest.mark.parametrize(
    ("name", "missing"), [("helix_naive", "1f1b, zb1p, adapipe"), ("adapipe", "helix_naive, ")]
)
def test_the_summary_says_what_is_missing(name, missing):
    assert f"nothing to compare: no plan of {missing}" in summary(rows((name, 1.0, True)))
