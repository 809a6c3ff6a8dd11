"""The command `python -m experiments.train`, as a user meets it."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from jaxpipe.costs import table
from jaxpipe.planning import interchange, plan
from jaxpipe.training.metrics import read_metrics
from jaxpipe.training.trainer import train
from jaxpipe.training.workdir import FILES, open_workdir
from tests.training.runs import make_corpus, tiny_config

ROOT = Path(__file__).parents[2]
STEPS = 200
CONFIG_FILE = """
from ml_collections import ConfigDict

from jaxpipe.training.config import to_json
from tests.training.runs import tiny_config

def get_config():
    train = {{"steps": {steps}, "log_every": 50, "eval_every": 100, "checkpoint_every": 10_000}}
    return ConfigDict(to_json(tiny_config({corpus!r}, train=train)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where a corpus and a configuration file lie."""
    folder = tmp_path_factory.mktemp("command")
    corpus = make_corpus(folder / "corpus")
    (folder / "config.py").write_text(CONFIG_FILE.format(corpus=str(corpus), steps=STEPS))
    return folder


def start(folder: Path, *arguments: str, workdir: Path | None = None, **environment: str) -> subprocess.Popen:
    """The command in a process without the devices that the tests' own process has."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    quick = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    command = [sys.executable, "-m", "experiments.train", f"--config={folder / 'config.py'}"]
    command += [f"--workdir={workdir or folder / 'run'}", *arguments]
    return subprocess.Popen(
        command,
        env=kept | quick | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str, **more) -> tuple[int, str, str]:
    process = start(folder, *arguments, **more)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


def test_train_stop_and_resume(folder):
    workdir, metrics = folder / "run", folder / "run" / "metrics.jsonl"
    process = start(folder)
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, errors
    last = len(read_metrics(metrics))
    assert 2 < last < STEPS
    assert output.endswith(f"stopped after step {last}; the same command goes on from there\n")
    assert "4 devices, cpu (virtual: they share the cores of this host): stage 4 x data 1 x model 1" in output
    assert re.search(r"> 1f1b-balanced .*%", output)

    code, output, errors = run(folder)
    assert code == 0, errors
    assert errors == ""
    assert f"resuming after step {last}\n" in output
    records = read_metrics(metrics)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]

    rows = dict(re.findall(r"held-out loss  (\w[\w ]*?) +(\d+\.\d{4}) nats a byte", output))
    assert list(rows) == ["uniform", "unigram", "bigram", "trigram", "this model"]
    assert rows["uniform"] == "5.5452"
    assert rows["this model"] == f"{records[-1]['heldout_loss']:.4f}"
    assert float(rows["this model"]) < float(rows["unigram"])

    assert {path.name for path in workdir.iterdir()} == set(FILES)
    chosen = plan.load(workdir / "plan.json")
    plan.check(chosen)
    assert chosen.name == "1f1b-balanced"
    assert interchange.read_csv((workdir / "schedule.csv").read_text()) == chosen.schedule
    assert [p.name for p in table.load(workdir / "costs.json").pieces] == list(chosen.pieces)
    assert json.loads((workdir / "trace.json").read_text())["traceEvents"]
    assert ElementTree.parse(workdir / "gantt.svg").getroot().tag.endswith("svg")
    assert json.loads((workdir / "config.json").read_text())["mesh"]["stage"] == 4


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (
            ["--config.optimizer.learning_rat=1"],
            {},
            "train: unknown field 'optimizer.learning_rat'; did you mean 'learning_rate'? known: ",
        ),
        (
            ["--config.batch.microbatches=3"],
            {},
            "train: field 'batch.global_batch' is 8; expected a multiple of 3 = batch.microbatches (3)",
        ),
        (
            [],
            {"JAX_NUM_CPU_DEVICES": "2"},
            "train: field 'mesh' asks for 4 devices (stage 4 x data 1 x model 1), but JAX sees 2 (cpu); "
            "for virtual CPU devices set JAX_NUM_CPU_DEVICES=4 before the start",
        ),
        (["stray"], {}, "train: unexpected argument 'stray'; flags start with --"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(folder, tmp_path, arguments, environment, message):
    code, output, errors = run(folder, *arguments, workdir=tmp_path / "run", **environment)
    assert code == 1
    assert errors.startswith(message)
    assert errors.count("\n") == 1
    assert output == ""
    assert not (tmp_path / "run").exists()


def test_the_workdir_of_another_configuration(folder, tmp_path):
    open_workdir(
        tmp_path, tiny_config(folder / "corpus", optimizer={"learning_rate": 0.5}, train={"steps": 7})
    )
    code, _, errors = run(folder, workdir=tmp_path)
    assert code == 1
    (line,) = errors.splitlines()
    assert line.startswith(f"train: {tmp_path} belongs to another configuration: ")
    assert "optimizer.learning_rate: 0.5 -> 0.01; train.steps: 7 -> 200" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"steps": "many"}}, r"field 'train.steps' is 'many' \(str\); expected a whole number"),
        ({"data": {"sequence_length": 0}}, "field 'data.sequence_length' is 0; expected at least 1"),
        ({"batch": {"global_batch": 9}}, "field 'batch.global_batch' is 9; expected a multiple of 4"),
        (
            {"plan": {"schedule": "2f2b"}},
            "field 'plan.schedule' is '2f2b'; expected one of gpipe, ",
        ),
        ({"plan": {"chip": "abacus"}}, "field 'plan.chip' is 'abacus'; expected one of "),
        (
            {"mesh": {"stage": 8}, "model": {"layers": 1}},
            "field 'mesh.stage' is 8; the model has 6 pieces, so expected at most 6",
        ),
        ({"mesh": {"stage": 2, "model": 4}}, "kv_heads is 2, which tp=4 does not divide"),
        (
            {"data": {"corpus": "/no/such/corpus"}},
            "data.corpus '/no/such/corpus' does not exist; expected 'stdlib'",
        ),
    ],
)
def test_other_mistakes_are_one_line(folder, tmp_path, changes, message):
    corpus = {"data": {"corpus": str(folder / "corpus")}}
    with pytest.raises(ValueError, match=message) as error:
        train(tiny_config("", **corpus | changes), tmp_path, Console(file=io.StringIO()))
    assert "\n" not in str(error.value)


def test_an_unknown_letter_in_a_pattern(folder):
    with pytest.raises(
        ValueError, match=r"^field 'model.pattern' 'M-X' has 'X' at position 2; allowed are M "
    ) as error:
        tiny_config(folder / "corpus", "nemotron_h", model={"pattern": "M-X"})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"data.corpus '.*' has no files ending in .py, .txt, .md; see data.suffixes"),
        ({"a.pdf": "words"}, "has no files ending in .py, .txt, .md"),
        ({"a.txt": ""}, r"data.corpus '.*' has 1 files, all of them empty; expected text"),
        ({"a.txt": "x" * 50}, "has 10 held-out bytes in 1 files; expected at least 17"),
    ],
)
def test_a_corpus_without_enough_text(tmp_path, files, message):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, text in files.items():
        (corpus / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        train(tiny_config(corpus), tmp_path / "run", Console(file=io.StringIO()))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_workdir_that_cannot_be_made(folder, tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match=r"/run: it is a file; expected a folder$"):
        train(tiny_config(folder / "corpus"), tmp_path / "run", Console(file=io.StringIO()))
