"""Layouts against the cases of Megatron-LM's own tests."""

import json
from pathlib import Path

import pytest

from jaxpipe.planning.megatron import (
    automatic_layout,
    check_layout,
    layer_numbers,
    parse_layout,
    stage_bounds,
)

CASES = json.loads((Path(__file__).parent.parent / "data" / "megatron_layouts.json").read_text())


def cases(start):
    (value,) = [value for key, value in CASES.items() if key.startswith(start)]
    return value


@pytest.mark.parametrize("case", cases("layout_parse_cases"), ids=lambda case: case["str"])
def test_parsed_as_megatron_parses(case):
    layout = parse_layout(case["str"], case["pp"])
    assert [list(names) for names in layout] == case["stages"]


@pytest.mark.parametrize("text", cases("layout_strings_in_functional_tests"))
def test_layouts_of_functional_tests(text):
    # Letters outside parentheses, and inside times their number: counted by hand.
    stages, decoders = {
        "Et*2|(tt|)*5t|tmL": (8, 14),
        "Et*7|t*7mL": (2, 14),
        "Et*3|(tt|)*6tmL": (8, 16),
        "Et*3|(tt|)*6mL": (8, 15),
        "Et*3|(tt|)*6L": (8, 15),
        "Et|(tt|)*6mL": (8, 13),
        "E|t*3|(t|)*5mL": (8, 8),
        "E|t*3|(t|)*4tm|L": (8, 8),
        "E|t*3|(t|)*3tt|m|L": (8, 8),
    }[text]
    layout = parse_layout(text, 2, decoders)
    assert len(layout) == stages
    with pytest.raises(ValueError, match=f"has {decoders} decoder layers; the model has {decoders + 1}"):
        parse_layout(text, 2, decoders + 1)


def test_layout_of_llama3_70b():
    case = cases("megatron_bridge_PR5391")
    layout = parse_layout(case["str"], case["pp"], case["layers"])
    assert len(layout) == case["pp"] * case["vpp"]


def test_layer_numbers():
    case = cases("layer_number_golden")
    assert layer_numbers(tuple(map(tuple, case["stages"])), case["pp"]) == tuple(
        tuple(map(tuple, device)) for device in case["golden"]
    )


@pytest.mark.parametrize("case", cases("must_accept"), ids=lambda case: str(case["layout"])[:40])
def test_accepted(case):
    check_layout(case["layout"], case["pp"], case["num_layers"])


@pytest.mark.parametrize("case", cases("must_reject"), ids=lambda case: case["why"])
def test_rejected(case):
    message = {
        "no embedding": "the layout has 0 embeddings; expected one",
        "no loss": "the layout has 0 losses; expected one",
        "invalid type": "stage 1 holds 'invalid_type'; expected one of embedding, decoder, mtp, loss",
        "3 stages not divisible by pp": "the layout has 3 stages; expected a multiple of the 2 devices",
    }[case["why"]]
    with pytest.raises(ValueError, match=message):
        check_layout(case["layout"], case["pp"], case["num_layers"])


@pytest.mark.parametrize("case", cases("resume_across_layouts"), ids=str)
def test_layouts_of_checkpoints(case):
    numbers = []
    for side in case.values():
        if side.get("layout"):
            check_layout(side["layout"], side["pp"])
            layout = tuple(map(tuple, side["layout"]))
            numbers.append(
                sorted(n for rank in layer_numbers(layout, side["pp"]) for part in rank for n in part)
            )
    assert numbers
    assert all(found == list(range(1, found[-1] + 1)) for found in numbers)


@pytest.mark.parametrize("case", cases("auto_split_golden"), ids=str)
def test_automatic_splits(case):
    layout = automatic_layout(
        case["layers"],
        case["pp"],
        case.get("vpp") or 1,
        case.get("first_stage_layers"),
        case.get("last_stage_layers"),
        case.get("account_embedding", False),
        case.get("account_loss", False),
    )
    check_layout(layout, case["pp"], case["layers"])
    chunks = sorted(part for rank in layer_numbers(layout, case["pp"]) for part in rank)
    assert [part[0] for part in chunks] == case["first"]
    assert [part[-1] for part in chunks] == case["last"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((13, 4), "13 layers cannot be shared equally by 4 devices"),
        ((8, 2, 3), "4 layers cannot be shared equally by 3 stages of a device"),
        ((8, 2, 1, 9), "-1 layers cannot be shared equally by 1 devices"),
        ((8, 2, 1, 4, None, True), "embedding and loss cannot count then"),
    ],
)
def test_splits_that_do_not_divide(arguments, message):
    with pytest.raises(ValueError, match=message):
        automatic_layout(*arguments)


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("Et|xL", 1, "'x' at character 4; expected one of E t m L | or"),
        ("E(tx|)*2L", 1, "'x' at character 4"),
        ("E(tt)L", 1, "'\\(' at character 2"),
        ("E((t|)*2t)*2L", 1, "'\\(' at character 2"),
        ("Et**2L", 1, "'\\*' at character 3"),
        ("Et *2L", 1, "' ' at character 3"),
        ("", 1, "has 0 embeddings"),
        ("tEL", 1, "has 1 embeddings; expected one, as its first layer"),
        ("EtEL", 1, "has 2 embeddings"),
        ("EtLt", 1, "has 1 losses; expected one, as its last layer"),
        ("EtLL", 1, "has 2 losses"),
        ("Et|mt|L", 3, "decoder layer after an mtp layer"),
        ("Et|t|m|L", 1, "stage 2 holds an mtp layer; expected them in the last 1 stages"),
        ("Et|L", 0, "devices is 0"),
        ("Et*999999999999999999999L", 1, "has more than 100000 layers"),
        ("E" + "(t|)*60000" * 2 + "L", 1, "has more than 100000 layers"),
    ],
)
def test_wrong_layouts(text, devices, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_layout(text, devices)
    assert "\n" not in str(error.value)


def test_stage_bounds_of_pieces():
    # Embedding, two decoder layers of four pieces and one of two, loss.
    layout = parse_layout("Et|tt|L", 3)
    assert stage_bounds(layout, (1, 4, 4, 2, 1)) == (0, 5, 11, 12)
    with pytest.raises(ValueError, match="pieces are given for 4 layers; the layout has 5"):
        stage_bounds(layout, (1, 4, 4, 1))
    with pytest.raises(ValueError, match="stage 1 of the layout holds no piece"):
        stage_bounds(parse_layout("Et||tL", 3), (1, 4, 4, 1))
