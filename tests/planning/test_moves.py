from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.planning.candidate import PLAIN, Candidate
from jaxpipe.planning.list_scheduler import ORDERS
from jaxpipe.planning.moves import (
    change_setting,
    move_stage,
    moves_of,
    shift_piece,
    shift_piece_only,
    split_stage,
    swap_stages,
    swap_stages_only,
    toggle_recompute,
)

ALL = (
    shift_piece, shift_piece_only, split_stage, move_stage, swap_stages, swap_stages_only, change_setting,
    toggle_recompute,
)  # fmt: skip
DEVICES = 3


@st.composite
def candidates(draw):
    """A candidate whose neighbouring stages are on different devices, and loads of the devices."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    homes = [draw(st.integers(0, DEVICES - 1))]
    while len(homes) < len(sizes):
        homes.append((homes[-1] + draw(st.integers(1, DEVICES - 1))) % DEVICES)
    bounds = (0, *np.cumsum(sizes).tolist())
    full = tuple(draw(st.lists(st.booleans(), min_size=bounds[-1], max_size=bounds[-1])))
    weight = draw(st.integers(0, 1))  # or nothing takes time
    load_D = np.bincount(homes, sizes, DEVICES) * weight
    return Candidate(bounds, tuple(homes), full, PLAIN), load_D


def changes(candidate, load_D, move, tries=30):
    """What a move makes of a candidate, with several seeds."""
    made = (move(candidate, load_D, Random(seed)) for seed in range(tries))
    return [changed for changed in made if changed is not None]


def device_of_pieces(candidate):
    return np.repeat(candidate.homes, np.diff(candidate.bounds)).tolist()


@pytest.mark.parametrize("move", ALL, ids=lambda move: move.__name__)
@settings(max_examples=40, deadline=None)
@given(candidates())
def test_moves_make_candidates(move, start):
    candidate, load_D = start
    for changed in changes(candidate, load_D, move):
        bounds, homes = changed.bounds, changed.homes
        assert (bounds[0], bounds[-1], len(bounds)) == (0, candidate.bounds[-1], len(homes) + 1)
        assert all(low < high for low, high in pairwise(bounds))
        assert all(here != there for here, there in pairwise(homes))
        assert all(0 <= home < DEVICES for home in homes)
        assert len(changed.full) == bounds[-1]
        hash(changed)


@settings(max_examples=40, deadline=None)
@given(candidates())
def test_moves_change_only_what_they_are_for(start):
    candidate, load_D = start
    for changed in changes(candidate, load_D, shift_piece_only):
        assert changed == candidate._replace(bounds=changed.bounds) != candidate
    for changed in changes(candidate, load_D, swap_stages_only):
        assert changed == candidate._replace(homes=changed.homes)
    for changed in changes(candidate, load_D, change_setting):
        assert changed == candidate._replace(setting=changed.setting)
        assert changed.setting.order in ORDERS
        assert changed.setting.forward > 0
        assert changed.setting.backward > 0
    for changed in changes(candidate, load_D, toggle_recompute):
        assert changed == candidate._replace(full=changed.full)
    for move in (move_stage, swap_stages):
        for changed in changes(candidate, load_D, move):
            assert changed == candidate._replace(bounds=changed.bounds, homes=changed.homes)
            assert set(changed.bounds) <= set(candidate.bounds)  # stages stay whole


@settings(max_examples=40, deadline=None)
@given(candidates())
def test_work_goes_from_one_stage_to_another(start):
    """Split and moved pieces are neighbours, all from one device to one other; shifts move bounds by one."""
    candidate, load_D = start
    before = device_of_pieces(candidate)
    for move in (split_stage, move_stage):
        for changed in changes(candidate, load_D, move):
            after = device_of_pieces(changed)
            moved = [i for i in range(len(before)) if before[i] != after[i]]
            assert moved == list(range(moved[0], moved[-1] + 1)) if moved else changed == candidate
            assert len({before[i] for i in moved}) == len({after[i] for i in moved}) <= 1
    for changed in changes(candidate, load_D, shift_piece_only):
        differences = [new - old for old, new in zip(candidate.bounds, changed.bounds)]
        assert set(differences) - {0} in ({1}, {-1})


def test_work_leaves_loaded_devices():
    """Without a light device that has less than its own a stage seldom moves there."""
    candidate = Candidate((0, 4, 5), (0, 1), (False,) * 5, PLAIN)
    load_D = np.array([4.0, 1.0])
    found = [move_stage(candidate, load_D, Random(seed)) for seed in range(400)]
    to_light, to_heavy = ((0, 5), (1,)), ((0, 5), (0,))
    counts = [sum((c.bounds, c.homes) == stages for c in found) for stages in (to_light, to_heavy)]
    assert counts[0] > 5 * counts[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), set()),
        (("attention", "head"), set()),
        (("partition",), {shift_piece_only}),
        (("placement",), {move_stage, swap_stages_only}),
        (("partition", "placement"), {shift_piece, split_stage, move_stage, swap_stages}),
        (("schedule",), {change_setting}),
        (("recompute",), {toggle_recompute}),
        (("partition", "schedule"), {shift_piece_only, change_setting}),
        (
            ("recompute", "schedule", "placement", "partition"),
            {shift_piece, split_stage, move_stage, swap_stages, change_setting, toggle_recompute},
        ),
    ],
)
def test_moves_of_words(words, expected):
    found = moves_of(words)
    assert set(found) == expected
    assert all(weight > 0 for weight in found.values())
