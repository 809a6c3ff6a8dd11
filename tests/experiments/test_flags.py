import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import flags
from experiments.configs import llama_tiny

ROOT = Path(__file__).parents[2]
LLAMA = "--config=experiments/configs/llama_tiny.py"
ENTRY_POINT = """
import json
from absl import app
from experiments import flags
from jaxpipe.training.config import to_json
CONFIG = flags.define_config()
app.run(lambda _: print(json.dumps(to_json(flags.resolve(CONFIG.value)))), flags_parser=flags.parse)
"""


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", ENTRY_POINT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_overrides_on_the_command_line():
    changes = ("--config.optimizer.learning_rate=5e-2", "--config.model.window=64", "--config.model.tied")
    result = run(LLAMA, *changes)
    assert result.returncode == 0, result.stderr
    tree = json.loads(result.stdout)
    assert tree["optimizer"]["learning_rate"] == 0.05
    assert (tree["model"]["window"], tree["model"]["tied"]) == (64, True)


def test_a_value_of_the_wrong_type_leaves_no_traceback():
    result = run(LLAMA, "--config.train.steps=many")
    assert result.returncode == 1
    assert "flag --config.train.steps=many: invalid literal for int()" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [LLAMA, "--config.optimizer.learning_rat=1"],
            "unknown field 'optimizer.learning_rat'; did you mean 'learning_rate'?",
        ),
        (["--config.tran.steps", "3", *LLAMA.split("=")], "unknown field 'tran'; did you mean 'train'?"),
        ([LLAMA, "--config.seed.x=1"], "field 'seed' has no fields; got --config.seed.x"),
        ([LLAMA, "--noconfig.model.tie"], "unknown field 'model.tie'; did you mean 'tied'?"),
        (["--config=nowhere.py"], "--config is 'nowhere.py', which is no file"),
        (["--workdir=runs/x"], "--config is missing; expected a file such as"),
        (["--config"], "--config is missing; expected a file such as"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        flags.parse(["train.py", *arguments])
    assert stopped.value.code.startswith(f"train.py: {message}")
    assert "\n" not in stopped.value.code


def test_a_field_out_of_range_is_one_line():
    tree = llama_tiny.get_config()
    tree.train.steps = 0
    with pytest.raises(SystemExit) as stopped:
        flags.resolve(tree)
    assert stopped.value.code == "--config: field 'train.steps' is 0; expected at least 1"
