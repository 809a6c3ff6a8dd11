import json

import numpy as np
import pytest

from jaxpipe.training.metrics import MetricsWriter, Progress, format_count, format_duration, read_metrics


def test_each_line_is_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, loss=np.float32(0.5), phase="train")
        assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5, "phase": "train"}
        writer.write(2, loss=0.25, tokens=7)
        assert read_metrics(path)[1] == {"step": 2, "loss": 0.25, "tokens": 7}


def test_a_resumed_run_reads_as_one(tmp_path):
    path, straight = tmp_path / "metrics.jsonl", tmp_path / "straight.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 8):
            writer.write(step, loss=1 / step)
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # killed in the middle of a line
    with MetricsWriter(path, step=4) as writer:
        for step in range(5, 10):
            writer.write(step, loss=1 / step)
    with MetricsWriter(straight) as writer:
        for step in range(1, 10):
            writer.write(step, loss=1 / step)
    assert path.read_text() == straight.read_text()
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


@pytest.mark.parametrize("line", ["[1]", '{"loss": 1}', "plain words"])
def test_a_foreign_line_is_refused_and_kept(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{line}\n'
    path.write_text(text)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected a JSON object with an integer"):
        MetricsWriter(path, step=1)
    assert path.read_text() == text


def test_progress_line():
    line = str(Progress(step=120, steps=600, loss=2.3125, seconds=0.4, tokens_per_step=8192))
    assert line == "step 120/600 loss 2.312 tokens/s 20.5k step 0.4 s ETA 3m12s"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (999, "999"),
        (999.7, "1k"),
        (12_345, "12.3k"),
        (999_700, "1M"),
        (2.5e9, "2.5G"),
        (5e12, "5000G"),
    ],
)
def test_format_count(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (192, "3m12s"), (7500, "2h05m")]
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text
