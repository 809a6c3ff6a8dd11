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


def test_a_mistake_leaves_neither_traceback_nor_usage():
    result = run(LLAMA, "--config.train.steps=many")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "-c: field 'train.steps' is 'many'; expected a whole number"
    assert "Traceback" not in result.stderr
    assert "FATAL" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--confg.seed=1"], "unknown flag --confg.seed; did you mean --config? known: --config, --out"),
        ([], "--out is missing; expected where to write"),
        (["--out"], "--out is missing; expected where to write"),
    ],
)
def test_a_wrong_flag_of_the_program_is_one_line(arguments, message):
    define = "from absl import flags as f\nf.DEFINE_string('out', None, 'where to write', required=True)\n"
    program = ENTRY_POINT.replace("app.run", f"{define}app.run")
    command = [sys.executable, "-c", program, LLAMA, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"-c: {message}"
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
        ([LLAMA, "--config.train.steps=abc"], "field 'train.steps' is 'abc'; expected a whole number"),
        ([LLAMA, "--config.train.steps", "1.5"], "field 'train.steps' is '1.5'; expected a whole number"),
        ([LLAMA, "--config.train.steps"], "field 'train.steps' has no value; expected a whole number"),
        (
            [LLAMA, "--config.train.steps", "--workdir=x"],
            "field 'train.steps' has no value; expected a whole number",
        ),
        (
            [LLAMA, "--noconfig.seed"],
            "field 'seed' is set by --noconfig.seed; expected --config.seed=a whole number",
        ),
        ([LLAMA, "--config.model.tied=x"], "field 'model.tied' is 'x'; expected true or false"),
        ([LLAMA, "--config.optimizer.b1=x"], "field 'optimizer.b1' is 'x'; expected a number"),
        ([LLAMA, "--config.model.window=x"], "field 'model.window' is 'x'; expected a whole number"),
        ([LLAMA, "--config.data.suffixes=(1,"], "field 'data.suffixes' is '(1,'; expected a tuple"),
        (
            [LLAMA, "--config.mesh=3"],
            "field 'mesh' is a table, set to '3'; expected --config.mesh.NAME=VALUE",
        ),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["experiments/train.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        flags.parse(sys.argv)
    assert stopped.value.code.startswith(f"train: {message}")
    assert "\n" not in stopped.value.code


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ndef get_config(:\n", ":2: SyntaxError: invalid syntax"),
        ("\nimport no_such_module\n", ":2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\n", ": no function get_config; expected one that returns a ConfigDict"),
        (
            "from jaxpipe.training.config import defaults\ndef get_config():\n    return defaults('gpt')\n",
            ":3: ValueError: unknown model family 'gpt'; known: llama, nemotron_h",
        ),
        ("def get_config():\n    raise OSError('two\\nlines')\n", ":2: OSError: two lines"),
        ("def get_config():\n    pass\n", ": get_config returned NoneType; expected a ConfigDict"),
        ("def get_config():\n    return {}\n", ": get_config returned dict; expected a ConfigDict"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(monkeypatch, tmp_path, source, message):
    file = tmp_path / "mine.py"
    file.write_text(source)
    monkeypatch.setattr(sys, "argv", ["train.py", f"--config={file}"])
    with pytest.raises(SystemExit) as stopped:
        flags.parse(sys.argv)
    assert stopped.value.code == f"train: {file}{message}"


def test_an_argument_that_get_config_does_not_take(monkeypatch, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def get_config():\n    return None\n")
    monkeypatch.setattr(sys, "argv", ["train.py", f"--config={file}:small"])
    with pytest.raises(SystemExit) as stopped:
        flags.parse(sys.argv)
    assert stopped.value.code.startswith(f"train: {file}: TypeError: get_config() takes 0 positional")


def test_a_field_out_of_range_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    tree = llama_tiny.get_config()
    tree.train.steps = 0
    with pytest.raises(SystemExit) as stopped:
        flags.resolve(tree)
    assert stopped.value.code == "train: field 'train.steps' is 0; expected at least 1"
