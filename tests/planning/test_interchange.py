import csv
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.planning.interchange import (
    LARGEST_BYTES,
    Message,
    read_csv,
    read_file,
    read_sheet,
    write_csv,
)
from jaxpipe.planning.plan import Action
from jaxpipe.planning.schedules import SCHEDULES

DATA = Path(__file__).parent.parent / "data"
CASES = json.loads((DATA / "pytorch_lowering_cases.json").read_text())
COMPUTE = (DATA / "pytorch_zb1p_2rank_2stagep_compute.csv").read_text()
COMMS = (DATA / "pytorch_zb1p_2rank_2stagep_comms.csv").read_text()


@st.composite
def schedules(draw):
    """Stages dealt out to devices so that none has none, and every stage with the same micro-batches."""
    devices, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    microbatches = draw(st.sets(st.integers(0, 999), min_size=1, max_size=3))
    phases = draw(st.sampled_from(["FB", "FIW"]))
    homes = draw(st.permutations(list(range(devices)) * chunks))
    rows = [[] for _ in range(devices)]
    for stage, device in enumerate(homes):
        rows[device] += [Action(stage, phase, m) for phase in phases for m in microbatches]
    return tuple(tuple(draw(st.permutations(row))) for row in rows)


@given(schedules())
def test_round_trip(schedule):
    assert read_csv(write_csv(schedule)) == schedule


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_named_schedules_are_expressible(name):
    schedule = SCHEDULES[name](4, 8)
    assert read_csv(write_csv(schedule)) == schedule


def test_text_and_idle_cells():
    schedule = read_csv("0F0,0F1,,0B0,,0B1\r\n, 1F0 ,1I0,1W0,1F1,1B1\n")
    assert write_csv(schedule) == "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n"
    assert len(read_csv("0F0,0B0\n\n1F0,1B0\n\n\n")) == 3


@pytest.mark.parametrize(
    "path",
    sorted(p for p in DATA.rglob("*.csv") if re.search("torch|dualpipe", str(p))),
    ids=lambda p: p.name,
)
def test_files_keep_every_action(path):
    """The actions of a file in order, found here by another reader and another grammar."""
    rows = list(csv.reader(io.StringIO(path.read_text())))
    actions = [re.findall(r"(?<!\w)\d+[FIWB]\d+", ",".join(row)) for row in rows]
    sheet = read_file(path)
    assert [list(map(str, row)) for row in sheet.schedule] == actions
    assert not sheet.older
    pairs = sum(len(cell.actions) == 2 for row in sheet.rows for cell in row)
    assert pairs == path.read_text().count("OVERLAP_F_B")


def test_messages_are_left_out_and_counted():
    # Lowering the first file gives the second: same actions, where I right before its W became B.
    split = [
        [str(b)] if b.phase != "B" else [f"{b.stage}I{b.microbatch}", f"{b.stage}W{b.microbatch}"]
        for b in (action for row in read_csv(COMMS) for action in row)
    ]
    assert [text for part in split for text in part] == [str(a) for row in read_csv(COMPUTE) for a in row]
    sheet = read_sheet(COMMS)
    # 3 borders between the 4 stages, 8 micro-batches.
    assert sheet.skipped == dict.fromkeys(["SEND_F", "RECV_F", "SEND_B", "RECV_B"], 24)
    assert sheet.rows[0][1].message == Message(0, "SEND_F", 0)
    assert str(sheet.rows[0][1].message) == sheet.rows[0][1].text == "0SEND_F0"


@pytest.mark.parametrize("text", CASES["parse_roundtrip"])
def test_every_kind_of_cell_is_read(text):
    (cell,) = read_sheet(text).rows[0]
    assert cell.text == text
    assert "".join(map(str, cell.actions)) + (str(cell.message) if cell.message else "") in (text, "")


@pytest.mark.parametrize("case", CASES["unshard_reshard"] + CASES["reduce_grad_nmb2"], ids=str)
def test_what_lowering_adds_is_no_computation(case):
    assert read_csv(case["expect"]) == read_csv(case["compute"])
    added = sum(read_sheet(case["expect"]).skipped.values())
    assert added == case["expect"].count(",") + 1 - len(read_csv(case["compute"])[0])


@pytest.mark.parametrize("case", CASES["send_recv"], ids=lambda case: case["name"])
def test_messages_of_lowered_schedules(case):
    compute, comms = (read_csv("\n".join(case[name])) for name in ("compute", "comms"))
    assert compute == comms


def test_both_actions_of_a_pair():
    sheet = read_sheet("0F0,(0F7;7B3)OVERLAP_F_B,( 7F4 ; 0I0 )OVERLAP_F_B")
    assert [cell.column for cell in sheet.rows[0]] == [1, 2, 3]
    assert [list(map(str, cell.actions)) for cell in sheet.rows[0]] == [
        ["0F0"],
        ["0F7", "7B3"],
        ["7F4", "0I0"],
    ]


@pytest.mark.parametrize(
    ("text", "modern"),
    [
        ("0F0,0B0,0W0", "0F0 0I0 0W0"),
        ("0F0,0BW0,0F1,0B1,0W1", "0F0 0B0 0F1 0I1 0W1"),
        ("0F0,0BW0", "0F0 0B0"),
        ("0F0,0B0", "0F0 0B0"),
        ("0F0,0I0,0W0,0F1,0B1", "0F0 0I0 0W0 0F1 0B1"),
        # One W too many does not make a text old.
        ("0F0,0B0,0F1,0B1,0W1", "0F0 0B0 0F1 0B1 0W1"),
    ],
)
def test_older_grammar(text, modern):
    sheet = read_sheet(text)
    assert " ".join(map(str, sheet.schedule[0])) == modern
    assert sheet.older == (str(modern).replace(" ", ",") != text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0\n1F0,,1X0\n",
            "line 2 (device 1), column 3: '1X0' is not an action; expected stage, one of F I W B",
        ),
        ("0F0x", "line 1 (device 0), column 1: '0F0x' is not an action"),
        ("0FF0", "'0FF0' is not an action"),
        ("0F", "'0F' is not an action"),
        ("0SEND_F", "'0SEND_F' is not an action"),
        ("0UNSHARD0", "'0UNSHARD0' is not an action"),
        ("-1F0", "'-1F0' is not an action"),
        ("0F٣", "is not an action"),
        ("0F0;0F1", "'0F0;0F1' is not an action"),
        ('"0F0"', "is not an action"),
        ("0F9999999999", "'0F9999999999' is not an action"),
        (f"0F{'9' * 100_000}", f"line 1 (device 0), column 1: '0F{'9' * 58}...' is not an action"),
        ("__import__('os').abort()", "is not an action"),
        ("=cmd|'/c calc'!A0", "is not an action"),
        (
            "(0F0;0F1)OVERLAP_F_B",
            "line 1 (device 0), column 1: '(0F0;0F1)OVERLAP_F_B' is not an overlapped pair",
        ),
        ("(0B0;0F1)OVERLAP_F_B", "is not an overlapped pair; expected a forward and a backward"),
        ("(0F0;)OVERLAP_F_B", "is not an overlapped pair"),
        ("(0F0;0B1;0F2)OVERLAP_F_B", "is not an action"),
        ("(0F0;0B1)OVERLAP", "is not an action"),
        (
            "0F0,0BW0\n1F0,1I0,1W0",
            "line 2 (device 1), column 2: '1I0' mixes two grammars; expected F I W B, or F B W BW",
        ),
        ("", "an empty text is not a schedule"),
        ("\n \n", "an empty text is not a schedule"),
    ],
)
def test_errors_name_row_column_and_text(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_csv(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0F0,0B0\0\n", "byte 7 is 0, so this is no text"),
        (b"0F0,\xff\xfe", "byte 4 is not UTF-8"),
        (b"0F0,0B0\n" * (LARGEST_BYTES // 8 + 1), "larger than 16 MiB"),
        (b"0F0,oops\n", "line 1 (device 0), column 2: 'oops' is not an action"),
        (None, "No such file or directory; expected a schedule as CSV"),
    ],
)
def test_files_that_are_no_schedules(tmp_path, content, message):
    path = tmp_path / "schedule.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_file(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_a_folder_and_a_byte_order_mark(tmp_path):
    with pytest.raises(ValueError, match="Is a directory; expected a schedule as CSV"):
        read_file(tmp_path)
    (tmp_path / "a.csv").write_bytes("0F0,0B0\n".encode("utf-8-sig"))
    assert read_file(tmp_path / "a.csv").schedule == read_csv("0F0,0B0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n\n1F0,1B0", "device 1 has no action"),
        # Attention that floats: stage 1 of micro-batch 1 on the other device.
        ("0F0,0F1,1F1,1B1,0B1,0B0\n1F0,1B0", "stage 1 runs on devices 0 and 1 (1F0)"),
        ("0F0,0B0\n2F0,2B0", "no device runs stage 1"),
        ((DATA / "dualpipe_p4_m8.csv").read_text(), "of stages 0 and 4 only one runs micro-batch 0"),
    ],
)
def test_what_pytorch_cannot_express_is_not_exported(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        write_csv(read_csv(text))
    assert "PyTorch's CSV cannot express" in str(error.value)
    assert "\n" not in str(error.value)
