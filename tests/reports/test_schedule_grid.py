from pathlib import Path

from rich.console import Console

from jaxpipe.planning.interchange import read_file, read_sheet
from jaxpipe.planning.judge import judge
from jaxpipe.reports.schedule_grid import MARK, schedule_grid, verdict_lines, verdict_table

DATA = Path(__file__).parent.parent / "data"


def lines_of(sheet, width=80, color=None):
    console = Console(width=width, color_system=color, force_terminal=color is not None)
    with console.capture() as capture:
        console.print(schedule_grid(sheet, judge(sheet).places, width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_wrong_action_stands_between_brackets():
    sheet = read_sheet("0F0,0F1,,0B0,0B1\n1F0,1B0,1B1,1F1\n")
    assert lines_of(sheet) == [
        "column     1    2    3    4    5",
        "device 0   0F0  0F1       0B0  0B1",
        "device 1   1F0  1B0 >1B1< 1F1",
    ]


def test_it_is_red_on_a_terminal():
    sheet = read_sheet("0B0,0F0\n")
    grid = schedule_grid(sheet, judge(sheet).places, 80)
    assert [grid.plain[span.start : span.end] for span in grid.spans if span.style == MARK] == [">0B0<"]
    (line,) = [line for line in lines_of(sheet, color="standard") if "0B0" in line]
    assert "\x1b[1;37;41m>0B0<\x1b[0m" in line


def test_every_device_of_a_deadlock_is_marked():
    sheet = read_sheet("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    marked = [word for line in lines_of(sheet) for word in line.split() if word.startswith(">")]
    assert marked == [">0B0<", ">1F1<"]


def test_what_is_missing_is_marked_at_the_end_of_its_row():
    sheet = read_sheet("0F0,0B0,0F1,0B1\n1F0,1B0\n")
    assert lines_of(sheet)[2] == "device 1   1F0  1B0 >?<"


def test_a_wide_schedule_is_cut_to_a_window_around_the_mistake():
    text = (DATA / "torch" / "dualpipev_p4_v2_m8.csv").read_text()
    good, bad = text, text.replace("2I6,", "2I6,2I6,")
    assert good != bad
    sheet = read_sheet(bad)
    (place,) = judge(sheet).places
    for width in (40, 60, 100):
        lines = lines_of(sheet, width)
        assert len(lines) == 5
        assert all(len(line) <= width for line in lines)
        assert ">2I6<" in lines[3]
        assert str(place.column) in lines[0].split()
        assert all(line[9] == "…" for line in lines[1:])
    # The number stands above its cell.
    assert lines[0].index(f" {place.column} ") == lines[3].index(">2I6<")


def test_pairs_are_short():
    sheet = read_sheet("0F0,(0F1;0B0)OVERLAP_F_B,0B1,0B1\n")
    assert lines_of(sheet)[1] == "device 0   0F0  0F1;0B0  0B1 >0B1<"


def test_a_valid_schedule():
    sheet = read_file(DATA / "dualpipe_p4_m8.csv")
    verdict = judge(sheet)
    assert verdict_lines(sheet, verdict, "unit") == [
        "valid: 4 devices, 8 stages, 8 micro-batches",
        "makespan 26.0, bubble 7.69%",
        "2 chains of 4 stages, each with micro-batches of its own",
    ]
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(verdict_table(verdict, "unit", (1024.0, 2048.0, 2048.0, 1024.0)))
    rows = [line.split() for line in capture.get().splitlines()]
    assert ["0", "0", "7", "24.0", "2.00", "5", "1.00", "KiB"] in rows
    assert ["3", "3", "4", "24.0", "2.00", "5", "1.00", "KiB"] in rows


def test_what_was_left_out_or_translated_is_said():
    comms = read_file(DATA / "pytorch_zb1p_2rank_2stagep_comms.csv")
    assert verdict_lines(comms, judge(comms), "unit")[-1] == (
        "cells that take no time here: 24 RECV_B, 24 RECV_F, 24 SEND_B, 24 SEND_F"
    )
    older = read_sheet("0F0,0BW0\n")
    assert "B was read as the input gradient" in verdict_lines(older, judge(older), "unit")[-1]
    floating = read_sheet("0F0,0F1,1F1,1B1,0B0,0B1\n1F0,1B0\n")
    assert verdict_lines(floating, judge(floating), "unit")[-1] == "on several devices: stages 1"
