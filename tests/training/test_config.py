import copy
import json
from dataclasses import dataclass

import pytest
from ml_collections import ConfigDict

from jaxpipe.models.families import FAMILIES
from jaxpipe.training.config import defaults, differences, from_config_dict, recompute_policies, to_json


@dataclass(frozen=True)
class Toy:
    vocab: int
    hidden: int
    pattern: str = "M*"
    rope_theta: float = 1e4
    chunk: int | None = None
    tied: bool = False

    def __post_init__(self):
        if self.hidden < 1:
            raise ValueError(f"field 'hidden' is {self.hidden}; expected at least 1")
        if "X" in self.pattern:
            raise ValueError(f"Toy: pattern {self.pattern!r} has 'X' at position {self.pattern.index('X')}")
        if self.chunk == 3:
            raise ValueError("a chunk of 3 is too odd")


@pytest.fixture(autouse=True)
def toy_family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", (Toy, None))


def toy_tree(**overrides) -> dict:
    """A valid tree, changed at dotted paths written with double underscores."""
    tree = defaults("toy").to_dict()
    tree["model"] |= {"vocab": 300, "hidden": 8}
    for path, value in overrides.items():
        *folders, name = path.split("__")
        node = tree
        for folder in folders:
            node = node[folder]
        node[name] = value
    return tree


def test_fields_left_out_take_their_defaults():
    short = from_config_dict({"model": {"family": "toy", "vocab": 300, "hidden": 8}})
    assert short == from_config_dict(toy_tree())
    assert (short.family, short.model) == ("toy", Toy(300, 8))


def test_reads_back_its_own_json():
    config = from_config_dict(
        toy_tree(data__suffixes=(".c", ".h"), optimizer__learning_rate=1, model__chunk=7)
    )
    assert config.data.suffixes == (".c", ".h")
    assert isinstance(config.optimizer.learning_rate, float)
    assert from_config_dict(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"optimizer__learning_rat": 1.0},
            "unknown field 'optimizer.learning_rat'; did you mean 'learning_rate'?",
        ),
        ({"optimzer": {}}, "unknown field 'optimzer'; did you mean 'optimizer'? known: model, seed, dtype"),
        ({"model__hiden": 3}, "unknown field 'model.hiden'; did you mean 'hidden'? known: vocab, hidden"),
        ({"data__qqq": 3}, "unknown field 'data.qqq'; known: corpus, suffixes"),
        (
            {"data__sequence_length": "abc"},
            "field 'data.sequence_length' is 'abc' (str); expected a whole number",
        ),
        (
            {"data__sequence_length": 8.0},
            "field 'data.sequence_length' is 8.0 (float); expected a whole number",
        ),
        ({"batch__microbatches": True}, "field 'batch.microbatches' is True (bool); expected a whole number"),
        ({"model__tied": 1}, "field 'model.tied' is 1 (int); expected bool"),
        ({"model__chunk": "x"}, "field 'model.chunk' is 'x' (str); expected a whole number"),
        ({"data__suffixes": ".py"}, "field 'data.suffixes' is '.py' (str); expected tuple[str, ...]"),
        ({"data__suffixes": [".py", 1]}, "field 'data.suffixes[1]' is 1 (int); expected str"),
        ({"optimizer__eps": float("nan")}, "field 'optimizer.eps' is nan (float); expected a finite number"),
        ({"optimizer__clip_norm": float("inf")}, "field 'optimizer.clip_norm' is inf (float)"),
        ({"data": 3}, "field 'data' is 3 (int); expected a table of fields"),
        ({"model": 3}, "field 'model' is 3 (int); expected a table with 'family'"),
        ({"model": None}, "field 'model' is missing; expected a table with 'family'"),
        ({"model__family": "gpt"}, "field 'model.family' is 'gpt'; expected one of"),
        ({"model__hidden": None}, "field 'model.hidden' is missing; expected a whole number"),
        ({"model__hidden": 0}, "field 'model.hidden' is 0; expected at least 1"),
        ({"model__pattern": "X"}, "field 'model.pattern' 'X' has 'X' at position 0"),
        ({"model__chunk": 3}, "field 'model': a chunk of 3 is too odd"),
        ({"data__corpus": ""}, "field 'data.corpus' is ''; expected 'stdlib', a folder or a file"),
        ({"model__vocab": 255}, "field 'model.vocab' is 255; expected at least 256, as tokens are bytes"),
        ({"plan__patterns": 257}, "field 'plan.patterns' is 257; expected at most 256"),
        ({"seed": -1}, "field 'seed' is -1; expected at least 0"),
        ({"optimizer__learning_rate": 0.0}, "field 'optimizer.learning_rate' is 0.0; expected more than 0"),
        ({"optimizer__b1": 1.0}, "field 'optimizer.b1' is 1.0; expected less than 1"),
        ({"optimizer__final_fraction": 2.0}, "field 'optimizer.final_fraction' is 2.0; expected at most 1"),
        ({"dtype": "float16"}, "field 'dtype' is 'float16'; expected one of float32, bfloat16"),
        (
            {"plan__schedule": "zb"},
            "field 'plan.schedule' is 'zb'; expected one of gpipe, gpipe_split, 1f1b, 1f1b_split, zb_h1",
        ),
        (
            {"plan__schedule": "tuned", "plan__recompute": "full"},
            "field 'plan.recompute' is 'full', but plan.schedule 'tuned' chooses it; expected 'none'",
        ),
        (
            {"plan__schedule": "plan.json", "plan__partition": "even"},
            "field 'plan.partition' is 'even', but plan.schedule 'plan.json' chooses it; expected 'balanced'",
        ),
        (
            {"plan__schedule": "interleaved_1f1b", "batch__microbatches": 2, "mesh__stage": 4},
            "field 'plan.schedule' is 'interleaved_1f1b': schedule 'interleaved_1f1b' on 4 devices takes "
            "multiples of 4 micro-batches, not 2",
        ),
        (
            {"plan__chip": "h300"},
            "field 'plan.chip' is 'h300'; expected one of h100, h200, h20, a100, cpu",
        ),
        (
            {"plan__recompute": "mamba"},
            "field 'plan.recompute' is 'mamba'; expected 'none' or 'full' for all",
        ),
        (
            {"batch__global_batch": 30, "mesh__data": 2},
            "field 'batch.global_batch' is 30; expected a multiple of 16 "
            "= batch.microbatches (8) * mesh.data (2)",
        ),
        (
            {"data__sequence_length": 9, "mesh__model": 2},
            "field 'data.sequence_length' is 9; expected a multiple of mesh.model (2)",
        ),
    ],
)
def test_every_mistake_gets_one_line_naming_the_field(overrides, message):
    with pytest.raises(ValueError) as error:
        from_config_dict(toy_tree(**overrides))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_defaults_can_be_overridden_field_by_field_with_their_types():
    tree = defaults("toy")
    tree.lock()
    tree.model.update(vocab=256, hidden=4, chunk=64)
    tree.optimizer.learning_rate = 3
    with pytest.raises(TypeError):
        tree.model.chunk = "many"
    with pytest.raises(AttributeError):
        tree.optimizer.learning_rat = 1.0
    config = from_config_dict(tree)
    assert (config.model.chunk, config.optimizer.learning_rate) == (64, 3.0)


def test_defaults_of_an_unknown_family():
    with pytest.raises(ValueError, match=r"unknown model family 'gpt'; known: .*toy"):
        defaults("gpt")


def test_from_config_dict_leaves_its_argument_alone():
    tree = ConfigDict(toy_tree())
    before = copy.deepcopy(tree.to_dict())
    from_config_dict(tree)
    assert tree.to_dict() == before


def test_differences_name_the_fields():
    old = to_json(from_config_dict(toy_tree()))
    new = copy.deepcopy(old)
    new["optimizer"]["b1"] = 0.8
    del new["seed"]
    new["data"]["corpus"] = "/text"
    assert differences(old, old) == []
    assert differences(old, new) == [
        "seed: 0 -> absent",
        "data.corpus: 'stdlib' -> '/text'",
        "optimizer.b1: 0.9 -> 0.8",
    ]


def test_recompute_policies_by_kind():
    kinds = ("embed", "mamba", "mlp", "mamba", "head")
    assert recompute_policies("full", kinds) == dict.fromkeys(["embed", "mamba", "mlp", "head"], "full")
    assert recompute_policies("mamba=full, mlp=none", kinds) == {
        "embed": "none",
        "mamba": "full",
        "mlp": "none",
        "head": "none",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attn=full", "the model has no kind 'attn'; its kinds: mamba, mlp"),
        ("mlp=some", "expected 'none' or 'full' for all pieces, or kind=policy pairs"),
        ("mlp=full,mlp=none", "names kind 'mlp' twice"),
        ("", "expected 'none' or 'full'"),
    ],
)
def test_bad_recompute_policies(text, message):
    with pytest.raises(ValueError, match=message):
        recompute_policies(text, ("mamba", "mlp"))
