from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.training.corpus import join
from jaxpipe.training.data import Windows, heldout_batches, training_batches

documents_strategy = st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=8)


def naive_window(texts: list[bytes], first: int, length: int) -> dict[str, list]:
    """Byte by byte: (document, byte) pairs, then segments and positions by counting."""
    stream = [(d, byte) for d, text in enumerate(texts) for byte in text]
    window = {"tokens": [], "targets": [], "segments": [], "positions": [], "weights": []}
    segment, position = 0, 0
    for i in range(first, first + length):
        if i > first and stream[i][0] != stream[i - 1][0]:
            segment, position = segment + 1, 0
        window["tokens"].append(stream[i][1])
        window["targets"].append(stream[i + 1][1])
        window["segments"].append(segment)
        window["positions"].append(position)
        window["weights"].append(float(stream[i][0] == stream[i + 1][0]))
        position += 1
    return window


@settings(deadline=None)
@given(documents_strategy, st.integers(1, 9))
def test_windows_equal_counting_byte_by_byte(texts, length):
    windows = Windows(join(texts), length)
    assert len(windows) == max(0, sum(map(len, texts)) - 1) // length
    for index in range(len(windows)):
        window = windows[index]
        for name, expected in naive_window(texts, index * length, length).items():
            assert window[name].tolist() == expected, name


def test_dtypes_and_shapes():
    batch = training_batches(join([bytes(200)]), 8, 4, seed=0)[3]
    kinds = {name: (value.dtype.name, value.shape) for name, value in batch.items()}
    integers = dict.fromkeys(("tokens", "targets", "segments", "positions"), ("int32", (4, 8)))
    assert kinds == integers | {"weights": ("float32", (4, 8))}


def order(batches, steps) -> list[int]:
    """The windows taken, by their first byte, which tells them apart in `COUNTING`."""
    return [int(first) for step in steps for first in batches[step]["tokens"][:, 0]]


COUNTING = join([bytes(range(241))])  # 60 windows of 4: first bytes 0, 4, 8, ...


def test_every_epoch_takes_each_window_once_in_a_new_order():
    batches = training_batches(COUNTING, 4, 6, seed=3)
    epochs = [order(batches, range(10 * e, 10 * e + 10)) for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 240, 4))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != sorted(epochs[0])


def test_a_batch_depends_on_seed_and_step_only():
    first, second = (training_batches(COUNTING, 4, 7, seed=3) for _ in range(2))
    forwards = [order(first, [step]) for step in range(30)]
    backwards = [order(second, [step]) for step in reversed(range(30))]
    assert forwards == backwards[::-1]
    assert order(training_batches(COUNTING, 4, 7, seed=4), range(30)) != order(first, range(30))


def test_batches_span_epochs():
    batches = training_batches(COUNTING, 4, 7, seed=0)
    taken = order(batches, range(60))  # 420 windows: seven epochs
    assert [taken.count(first) for first in range(0, 240, 4)] == [7] * 60


def test_heldout_batches_are_spread_evenly():
    batches = heldout_batches(COUNTING, 4, 3, count=2)
    assert order(batches, range(2)) == [0, 40, 80, 120, 160, 200]
    assert len(batches) == 2


def test_heldout_batches_take_all_there_is_and_fill_up_with_weight_zero():
    batches = heldout_batches(COUNTING, 4, 32, count=5)
    assert [batch["tokens"].shape for batch in batches] == [(32, 4), (32, 4)]
    assert sum(batch["weights"].sum() for batch in batches) == 240
    assert not batches[1]["weights"][28:].any()
    assert order(batches, range(2))[:60] == list(range(0, 240, 4))
