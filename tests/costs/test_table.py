import json

import pytest

from jaxpipe.costs import table as tables
from jaxpipe.costs.table import CostTable, Link, PieceCost

TABLE = CostTable(
    unit="us",
    pieces=(
        PieceCost("embed", "embed", 1.5, 0, 2, param_bytes=100, output_bytes=8),
        PieceCost("head", "head", 0, 7.25, 3, stash_bytes=5, grad_stash_bytes=6),
    ),
    link=Link(latency=2.0, bytes_per_unit=400.0),
    memory_limit_bytes=1 << 30,
    state_factor=4.5,
)


@pytest.mark.parametrize("table", [TABLE, CostTable("unit", TABLE.pieces)])
def test_round_trip(table, tmp_path):
    tables.save(table, tmp_path / "costs.json")
    assert tables.load(tmp_path / "costs.json") == table
    # Strict JSON has no infinity: the default bandwidth must be written as null.
    json.loads((tmp_path / "costs.json").read_text(), parse_constant=pytest.fail)


def test_small_hand_written_table():
    data = {"format": "jaxpipe-costs/1", "pieces": [{"name": "a", "kind": "k", "F": 1, "I": 2, "W": 3}]}
    table = tables.from_json(data)
    assert table == CostTable("unit", (PieceCost("a", "k", 1, 2, 3),))
    assert table.pieces[0].total == 6


@pytest.mark.parametrize(("weight", "held"), [(3, 50), (0, 0)])
def test_where_a_table_does_not_say_so_W_needs_all_of_the_stash(weight, held):
    piece = {"name": "a", "kind": "k", "F": 1, "I": 2, "W": weight, "stash_bytes": 50}
    data = {"format": "jaxpipe-costs/1", "pieces": [piece, piece | {"name": "b", "grad_stash_bytes": 7}]}
    table = tables.from_json(data)
    assert [p.grad_stash_bytes for p in table.pieces] == [held, 7]
    assert tables.from_json(tables.to_json(table)) == table


def test_link_time():
    assert Link(2.0, 400.0).time(1000) == 2.0 + 2.5
    assert Link().time(10**12) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": None}, "'format' is None; expected 'jaxpipe-costs/1'"),
        ({"unit": "hours"}, r"'unit' is 'hours'; expected one of \['s', 'ms', 'us', 'unit'\]"),
        ({"pieces": []}, "'pieces' must be a list with at least one piece"),
        ({"pieces": ["a"] * 4097}, "'pieces' holds 4097 pieces; expected at most 4096"),
        ({"state_factor": -(10**400)}, r"state_factor is -10{38}\.\.\.; expected a number from 0"),
        ({"pieces": ["a"]}, r"pieces\[0\] is 'a'; expected an object"),
        ({"pieces": [{"name": "a", "kind": "k", "F": 1}]}, r"pieces\[0\]: missing fields \['I', 'W'\]"),
        ({"peices": []}, r"unknown fields \['peices'\]"),
        ({"link": {"speed": 1}}, r"link: unknown fields \['speed'\]"),
        ({"link": {"latency": None}}, "link.latency is None; expected a number from 0"),
        ({"link": {"bytes_per_unit": 0}}, "link.bytes_per_unit is 0; expected at least 1e-30, or null"),
        ({"link": {"bytes_per_unit": 1e-300}}, "link.bytes_per_unit is 1e-300; expected at least 1e-30"),
        ({"memory_limit_bytes": "80G"}, "memory_limit_bytes is '80G'; expected a number from 0"),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes is 0; expected more, or null for no limit"),
        ({"format": "jaxpipe-costs/2"}, "'format' is 'jaxpipe-costs/2'; expected 'jaxpipe-costs/1'"),
        ({"unit": None}, "'unit' is None; expected one of"),
        ({"pieces": [{"kind": "k", "F": 1, "I": 1, "W": 1}]}, r"pieces\[0\]: missing fields \['name'\]"),
        ({"pieces": [{"name": None, "kind": "k", "F": 1, "I": 1, "W": 1}]}, r"pieces\[0\].name is None"),
        ({"state_factor": -1}, r"state_factor is -1; expected a number from 0 to 1e\+30"),
    ],
)
def test_errors_name_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        tables.from_json(tables.to_json(TABLE) | changes)


@pytest.mark.parametrize("value", [-1, "1", None, True, float("nan"), float("inf"), 10**400])
def test_a_cost_must_be_a_finite_number(value):
    data = tables.to_json(TABLE)
    data["pieces"][1]["I"] = value
    with pytest.raises(ValueError, match=r"pieces\[1\].I is .*; expected a number from 0 to 1e\+30"):
        tables.from_json(data)


def test_names_of_pieces_must_differ():
    data = tables.to_json(TABLE)
    data["pieces"][1]["name"] = "embed"
    with pytest.raises(ValueError, match=r"several pieces named \['embed'\]"):
        tables.from_json(data)


def test_errors_of_files_name_the_file(tmp_path):
    path = tmp_path / "costs.json"
    with pytest.raises(ValueError, match=r"cannot read .*costs\.json: No such file or directory"):
        tables.load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"costs\.json: a cost table must be a JSON object, not list"):
        tables.load(path)
    path.write_text("[")
    with pytest.raises(ValueError, match=r"costs\.json is not JSON \(Expecting value: line 1 column 2"):
        tables.load(path)
    # Python writes and reads NaN though JSON has none; -1e999 becomes an infinity.
    for text, value in (("NaN", "nan"), ("-1e999", "-inf")):
        written = json.dumps(tables.to_json(TABLE)).replace("7.25", text)
        path.write_text(written)
        with pytest.raises(ValueError, match=rf"costs\.json: pieces\[1\].I is {value}; expected a number"):
            tables.load(path)


def test_a_byte_order_mark_a_folder_and_deep_nesting(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(tables.to_json(TABLE)), "utf-8-sig")
    assert tables.load(path) == TABLE
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"costs\.json is nested too deeply; expected a cost table as JSON$"):
        tables.load(path)
    with pytest.raises(ValueError, match=r"cannot read .*: Is a directory$"):
        tables.load(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("stash_bytes", 1e300), ("F", 1e308)])
def test_a_number_may_not_be_so_large_that_sums_overflow(field, value):
    data = tables.to_json(TABLE)
    data["pieces"][0][field] = value
    with pytest.raises(ValueError, match=rf"pieces\[0\]\.{field} is 1e\+30\d; expected a number"):
        tables.from_json(data)
