from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.planning.interchange import read_csv, write_csv
from jaxpipe.planning.plan import Action

DATA = Path(__file__).parent.parent / "data"
actions = st.builds(Action, st.integers(0, 99), st.sampled_from("FIWB"), st.integers(0, 999))


@given(st.lists(st.lists(actions, max_size=5).map(tuple), min_size=1, max_size=5).map(tuple))
def test_round_trip(schedule):
    assert read_csv(write_csv(schedule)) == schedule


def test_text_and_idle_cells():
    schedule = read_csv("0F0,0F1,,0B0,,0B1\r\n, 1F0 ,1I0,1W0\n")
    assert write_csv(schedule) == "0F0,0F1,0B0,0B1\n1F0,1I0,1W0\n"


def test_pytorch_files_keep_every_action():
    text = (DATA / "pytorch_zb1p_2rank_2stagep_compute.csv").read_text()
    cells = [cell for line in text.splitlines() for cell in line.split(",") if cell]
    schedule = read_csv(text)
    assert len(schedule) == 2
    assert [str(action) for row in schedule for action in row] == cells


def test_errors_name_row_and_column():
    with pytest.raises(ValueError, match="row 2, column 3: '1X0' is not an action"):
        read_csv("0F0,0B0\n1F0,,1X0\n")
    with pytest.raises(ValueError, match="row 1, column 2: '0SEND_F0' is not an action"):
        read_csv("0F0,0SEND_F0\n")
    with pytest.raises(ValueError, match=r"row 1, column 18: '\(0F7;7B3\)OVERLAP_F_B' is not an action"):
        read_csv((DATA / "torch" / "dualpipev_p4_v2_m8.csv").read_text())
    with pytest.raises(ValueError, match="empty text is not a schedule"):
        read_csv("")
