"""The table of the benchmark for few devices; bounds are what the design was drawn up with, or less."""

import pytest

from experiments.benchmarks.ticks import EXACT, UNEVEN, cases, measure, stage_times


@pytest.mark.parametrize(
    ("lengths", "schedule", "patterns", "at_most"),
    [
        ("F = I = W", "1f1b_split", 1, 1.0),
        ("F = I = W", "zb_h1", 1, 1.0),
        ("1 / 1.3 / 0.7", "1f1b_split", 1, 1.0),
        ("1 / 1.3 / 0.7", "zb_h1", 1, 1.025),
        ("1 / 1.67 / 0.22", "1f1b_split", 1, 1.10),
        ("1 / 1.67 / 0.22", "zb_h1", 1, 1.10),
        ("1 / 1.67 / 0.22", "1f1b_split", 3, 1.0),
        ("1 / 1.67 / 0.22", "zb_h1", 3, 1.0),
        (UNEVEN, "1f1b_split", 1, 1.01),
        ("F = I = W", "1f1b", 1, 1.19),
        ("F = I = W", "1f1b", 4, 1.03),
        ("F = I = W", "1f1b", 8, 1.0),
        ("F = I = W", "1f1b", EXACT, 1.0),
    ],
)
def test_time_over_the_ideal_on_four_devices(lengths, schedule, patterns, at_most):
    cell = measure(stage_times(lengths, 4), 16, schedule, patterns)
    assert 1 - 1e-9 <= cell.ratio <= at_most + 1e-9
    assert cell.patterns <= patterns


def test_eight_patterns_on_eight_devices():
    cell = measure(stage_times("F = I = W", 8), 32, "1f1b", 8)
    assert cell.ratio == pytest.approx(1.0)
    assert cell.patterns == 8


def test_fused_1f1b_waits_under_the_full_pattern():
    """Four micro-batches on four devices: 22 instead of (4 + 4 - 1) * 3."""
    assert measure(stage_times("F = I = W", 4), 4, "1f1b", 1).ratio == pytest.approx(22 / 21)


def test_uneven_stages_are_within_a_fifth():
    times = [t[0] for t in stage_times(UNEVEN, 8)]
    assert times[0] > 1 > times[1]
    assert (min(times), max(times)) == pytest.approx((0.8, 1.175))


def test_rows_differ():
    assert len(set(cases())) == len(cases())
