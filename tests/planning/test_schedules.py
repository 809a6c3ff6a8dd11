from pathlib import Path

import pytest

from jaxpipe.planning.interchange import read_csv
from jaxpipe.planning.plan import Action, Plan, check
from jaxpipe.planning.schedules import SCHEDULES, fuse_backward

DATA = Path(__file__).parent.parent / "data"


def test_1f1b_as_drawn_in_the_literature():
    rows = [" ".join(map(str, row)) for row in SCHEDULES["1f1b"](3, 4)]
    assert rows == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_zb_h1_as_drawn_in_the_paper():
    """Each stage s has s micro-batches whose I is done and whose W is not when it begins to alternate."""
    rows = [" ".join(map(str, row)) for row in SCHEDULES["zb_h1"](3, 4)]
    assert rows == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_splitting_puts_w_right_after_i():
    rows = [" ".join(map(str, row)) for row in SCHEDULES["1f1b_split"](2, 2)]
    assert rows == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    rows = [" ".join(map(str, row)) for row in SCHEDULES["gpipe_split"](2, 2)]
    assert rows == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I0 1W0 1I1 1W1"]


def test_fusing_takes_only_neighbours_of_one_stage_and_microbatch():
    texts = ["0F0 0F1 0I0 0W0 0I1 1I0 0W1 1W0", "2I0 3W0 2W0 3I0 3B1"]
    schedule = tuple(tuple(map(Action.parse, text.split())) for text in texts)
    rows = [" ".join(map(str, row)) for row in fuse_backward(schedule)]
    assert rows == ["0F0 0F1 0B0 0I1 1I0 0W1 1W0", "2I0 3W0 2W0 3I0 3B1"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fusing_undoes_splitting(name):
    schedule = SCHEDULES[name](3, 5)
    assert fuse_backward(SCHEDULES[f"{name}_split"](3, 5)) == schedule == fuse_backward(schedule)


def test_gpipe_equals_pytorch():
    assert SCHEDULES["gpipe"](4, 8) == read_csv((DATA / "torch" / "gpipe_p4_v1_m8.csv").read_text())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 11])
def test_complete_for_any_counts(name, stages, microbatches):
    schedule = SCHEDULES[name](stages, microbatches)
    pieces = tuple(f"p{i}" for i in range(stages))
    line = tuple(range(stages))
    check(Plan(name, stages, microbatches, pieces, (*line, stages), line, ("none",) * stages, schedule))
