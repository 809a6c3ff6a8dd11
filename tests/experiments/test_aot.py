"""The command `python -m experiments.aot`.

Compiling for absent GPUs itself is tested where `make aot` has put its packages:

    .venv-aot/bin/python -m pytest tests/experiments/test_aot.py
"""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from jaxpipe.runtime.aot import PACKAGES

ROOT = Path(__file__).parents[2]
INSTALLED = set(PACKAGES) <= {d.name for d in distributions()}
CONFIG_FILE = """
from ml_collections import ConfigDict

from jaxpipe.training.config import to_json
from tests.training.runs import tiny_config

def get_config():
    plan = {"schedule": "1f1b_split", "chip": "h200"}
    return ConfigDict(to_json(tiny_config("nowhere", mesh={"stage": 2}, plan=plan, dtype="bfloat16")))
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("aot") / "config.py"
    path.write_text(CONFIG_FILE)
    return path


def run(config: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The command, without the compiler flags of the tests' own process."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "experiments.aot", f"--config={config}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(not INSTALLED, reason="the packages of requirements-aot.txt are not installed")
def test_compiles_for_two_absent_gpus(config, tmp_path):
    done = run(config, "--topology=1x1x2", "--chip=h200", f"--json={tmp_path / 'report.json'}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["plan"]["tick_makespan"] >= report["plan"]["makespan"] > 0
    assert report["config"]["mesh"]["stage"] == 2
    assert report["copies"] == report["weight_slices"] == report["weight_updates"] == {}
    assert report["permutes"]["asynchronous"] > 0
    assert report["permutes"]["synchronous"] == 0
    assert report["peak_bytes"] == pytest.approx(report["predicted_bytes"]["all"], rel=0.05)
    matmuls = {op["name"]: op["matmuls"] for op in report["ops"]}
    assert matmuls["attention_core F"] == 2
    assert matmuls["attention_core I"] == 5
    assert matmuls["mlp I"] == 3
    for line in ("copies of register files, weights or gradients in the tick loop: 0", "permutes beside the"):
        assert line in done.stdout


@pytest.mark.skipif(INSTALLED, reason="the packages of requirements-aot.txt are installed")
def test_packages_missing(config):
    done = run(config, "--topology=1x1x2", "--chip=h200")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("aot: compiling for absent GPUs needs jax-cuda13-plugin, ")
    assert "pip install --no-deps -r requirements-aot.txt" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--topology=1x1x2", "--chip=gtx"),
            "aot: chip 'gtx' is unknown as a compile target; known: h100, h200",
        ),
        (
            ("--topology=1x1x4", "--chip=h100"),
            "aot: topology '1x1x4' has 4 GPUs, but field 'mesh' asks for 2 (stage 2 x data 1 x model 1)",
        ),
        (
            ("--topology=1x1x2", "--chip=h100", "--json=no/folder.json"),
            "aot: cannot write --json=no/folder.json: No such file or directory; expected a file",
        ),
        (
            ("--chip=h100",),
            "aot: --topology is missing; expected partitions x hosts x GPUs of a host, as in 1x1x8",
        ),
    ],
)
def test_mistakes_get_one_line(config, arguments, message):
    done = run(config, *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [message]
