import io
import logging
import os
import re
import shutil
import signal
from itertools import count
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxpipe.training import trainer
from jaxpipe.training.checkpoints import Checkpoints
from jaxpipe.training.metrics import read_metrics
from jaxpipe.training.prepare import prepare
from jaxpipe.training.state import abstract_layers
from tests.training.runs import make_corpus, tiny_config

# Orbax leaves a closed event loop behind when a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Run(NamedTuple):
    """A run in a folder; `output` is what it printed."""

    folder: Path
    result: trainer.Result
    output: str


class InterruptedRun(Exception):
    """Raised from `on_step`, as a crash would."""


def train(config, folder: Path, on_step=None) -> Run:
    output = io.StringIO()
    result = trainer.train(config, folder, Console(file=output, width=120), on_step)
    return Run(folder, result, output.getvalue())


def crash_after(step: int):
    def on_step(done: int, _) -> None:
        if done == step:
            raise InterruptedRun

    return on_step


def signal_after(step: int, number: int):
    return lambda done, _: os.kill(os.getpid(), number) if done == step else None


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """What a run's metrics say, apart from times; every step has one line, in order."""
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    names = ("loss", "grad_norm", "learning_rate", "heldout_loss")
    return [tuple(record.get(name) for name in names) for record in records]


def checkpoint(folder: Path, config) -> tuple[int, dict]:
    """The newest checkpoint of a run: its step and its arrays."""
    with Checkpoints(folder / "checkpoints", keep=3) as checkpoints:
        step, state = checkpoints.restore_latest(abstract_layers(prepare(config)))
    return step, jax.device_get(state)


def assert_same_run(found: Path, expected: Path, config) -> None:
    assert losses(found) == losses(expected)
    (step, arrays), (expected_step, expected_arrays) = (checkpoint(f, config) for f in (found, expected))
    assert step == expected_step == config.train.steps
    assert jax.tree.structure(arrays) == jax.tree.structure(expected_arrays)
    jax.tree.map(np.testing.assert_array_equal, arrays, expected_arrays)


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    return tiny_config(make_corpus(tmp_path_factory.mktemp("data") / "corpus"))


@pytest.fixture(scope="session")
def whole(config, tmp_path_factory) -> Run:
    """The run that nothing interrupts."""
    return train(config, tmp_path_factory.mktemp("whole"))


def test_an_uninterrupted_run(whole, config):
    records = read_metrics(whole.folder / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if "heldout_loss" in r] == [3, 6]
    assert records[0]["loss"] == pytest.approx(np.log(256), rel=0.05)  # uniform before it learns
    assert all(later["loss"] < earlier["loss"] for earlier, later in zip(records, records[2:]))
    assert all(r["tokens_per_second"] == pytest.approx(8 * 16 / r["step_seconds"]) for r in records)
    assert whole.result == trainer.Result(6, records[-1]["heldout_loss"])
    with Checkpoints(whole.folder / "checkpoints", keep=3) as checkpoints:
        assert checkpoints.steps() == [2, 4, 6]
    for name in ("uniform", "unigram", "bigram", "trigram"):
        assert f"held-out loss  {name}" in whole.output
    assert f"held-out loss  this model {whole.result.heldout:.4f} nats a byte" in whole.output


def test_a_complete_run_only_evaluates_again(whole, config, tmp_path):
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    again = train(config, folder, on_step=crash_after(7))
    assert again.result == whole.result
    assert "resuming after step 6" in again.output
    assert losses(folder) == losses(whole.folder)


def test_crashed_and_resumed_twice_equals_uninterrupted(whole, config, tmp_path):
    with pytest.raises(InterruptedRun):
        train(config, tmp_path, crash_after(1))  # before the first checkpoint
    with pytest.raises(InterruptedRun):
        train(config, tmp_path, crash_after(5))
    resumed = train(config, tmp_path)
    assert "resuming after step 4" in resumed.output
    assert resumed.result == whole.result
    assert_same_run(tmp_path, whole.folder, config)


def test_stopped_by_signals_and_resumed_twice_equals_uninterrupted(whole, config, tmp_path):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stops = ((1, signal.SIGTERM), (3, signal.SIGINT))
    for step, number in stops:
        stopped = train(config, tmp_path, signal_after(step, number))
        assert stopped.result == trainer.Result(step, None, number)
        assert stopped.output.endswith(f"stopped after step {step}; the same command goes on from there\n")
        assert checkpoint(tmp_path, config)[0] == step == len(losses(tmp_path))
        assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert train(config, tmp_path).result == whole.result
    assert_same_run(tmp_path, whole.folder, config)


def test_a_second_signal_acts_as_before():
    acted = []
    old = signal.signal(signal.SIGINT, lambda number, _: acted.append(number))
    with trainer._stop_signals(Console()) as stopped:
        signal.raise_signal(signal.SIGINT)
        assert (stopped, acted) == ([signal.SIGINT], [])
        signal.raise_signal(signal.SIGINT)
        assert (stopped, acted) == ([signal.SIGINT], [signal.SIGINT])
    signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize(
    "mesh", [{"stage": 2, "data": 1, "model": 1}, {"stage": 2, "data": 2, "model": 2}], ids=str
)
def test_saved_on_four_devices_and_resumed_on_another_mesh(whole, config, tmp_path, mesh):
    with pytest.raises(InterruptedRun):
        train(config, tmp_path, crash_after(2 + 1))
    changes = {"plan": {"partition": "even", "schedule": "gpipe", "recompute": "mlp=full"}}
    other = tiny_config(config.data.corpus, mesh=mesh, batch={"microbatches": 2}, **changes)
    resumed = train(other, tmp_path)
    for line in ("mesh.stage: 4 -> 2", "plan.schedule: '1f1b' -> 'gpipe'", "batch.microbatches: 4 -> 2"):
        assert f"changed since this run began: {line}" in resumed.output
    assert "resuming after step 2" in resumed.output
    for found, expected in zip(losses(tmp_path), losses(whole.folder), strict=True):
        for value, wanted in zip(found, expected):
            assert value == wanted or value == pytest.approx(wanted, rel=1e-5)


def test_stops_at_a_loss_that_is_not_a_number(config, tmp_path, monkeypatch):
    make_update = trainer.make_update

    def make_corrupting_update(job):
        update, calls = make_update(job), count(1)

        def corrupting_update(state, batch):
            if next(calls) == 4:
                key = min(state.params)
                state.params[key] = jax.tree.map(lambda p: p * np.float32("nan"), state.params[key])
            return update(state, batch)

        return corrupting_update

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "make_update", make_corrupting_update)
        message = r"^step 4: loss is nan, gradient norm nan; the last good checkpoint is that of step 2$"
        with pytest.raises(trainer.NonFiniteError, match=message):
            train(config, tmp_path)
    assert len(losses(tmp_path)) == 3
    step, arrays = checkpoint(tmp_path, config)
    assert step == 2
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(arrays))


def test_a_diverging_run_says_when(config, tmp_path):
    wild = tiny_config(config.data.corpus, optimizer={"learning_rate": 1e38, "warmup_steps": 0})
    with pytest.raises(trainer.NonFiniteError, match=r"^step 2: loss is .*; .* of step 0 \(none\)$"):
        train(wild, tmp_path)


def test_falls_back_loudly_from_a_truncated_checkpoint(whole, config, tmp_path, caplog):
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    for path in (folder / "checkpoints" / "6" / "default" / "d").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with caplog.at_level(logging.ERROR, logger="jaxpipe"):
        again = train(config, folder)
    (line,) = (r.message for r in caplog.records if r.name.startswith("jaxpipe"))
    going_on = r"going on with the one before it \(\w+: .+\)"
    assert re.match(rf"checkpoint of step 6 cannot be read; renamed to .+unreadable-6, {going_on}$", line)
    assert "resuming after step 4" in again.output
    assert again.result == whole.result
    assert_same_run(folder, whole.folder, config)
