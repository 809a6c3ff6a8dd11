import pytest

from jaxpipe.reports.units import format_bytes, format_count, format_duration, format_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (2.5e-8, "25.0 ns"),
        (9.996e-7, "1.00 µs"),
        (1.234e-6, "1.23 µs"),
        (0.0456, "45.6 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.996, "10.0 s"),
        (59.4, "59.4 s"),
        (60, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (3600 * 99_999, "99999 h 00 min"),
        (3.6e33, "1.00e+30 h"),
    ],
)
def test_format_time(seconds, text):
    assert format_time(seconds) == text


def test_format_duration():
    assert format_duration(1500, "us") == "1.50 ms"
    assert format_duration(0.25, "s") == "250 ms"
    assert format_duration(51, "unit") == "51.0"
    assert [format_duration(0, unit) for unit in ("s", "ms", "us", "unit")] == ["0"] * 4
    assert format_duration(12345, "unit") == "12,345"
    assert format_duration(1e30, "unit") == "1.00e+30"
    with pytest.raises(ValueError, match="unknown time unit 'h'; known: s, ms, us, unit"):
        format_duration(1, "h")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (3 << 20, "3.00 MiB"),
        (80 << 30, "80.0 GiB"),
    ],
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text
    assert format_bytes(5 << 40) == "5.00 TiB"
    assert format_bytes(5 << 60) == "5.76e+18 B"


@pytest.mark.parametrize(
    ("count", "text"),
    [(7, "7"), (1000, "1.00 K"), (1_240_000, "1.24 M"), (70_600_000_000, "70.6 B"), (1.5e12, "1.50 T")],
)
def test_format_count(count, text):
    assert format_count(count) == text
