import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.training.corpus import join
from jaxpipe.training.data import heldout_batches
from jaxpipe.training.ngrams import CONCENTRATION, count, nats_per_byte

texts_strategy = st.lists(st.text("abc", min_size=1, max_size=30).map(str.encode), min_size=1, max_size=6)


def slow_counts(texts: list[bytes]) -> tuple[Counter, Counter, Counter]:
    ones, twos, threes = Counter(), Counter(), Counter()
    for text in texts:
        for i in range(1, len(text)):
            ones[text[i]] += 1
            twos[text[i - 1], text[i]] += 1
            if i > 1:
                threes[text[i - 2], text[i - 1], text[i]] += 1
    return ones, twos, threes


def slow_nats(texts: list[bytes], windows: list[list[bytes]]) -> tuple[float, float, float]:
    """Dictionaries and formulas; a window is a list of document parts, the last with the extra target."""
    ones, twos, threes = slow_counts(texts)
    before_one, before_two = Counter(), Counter()
    for (b, _), n in twos.items():
        before_one[b] += n
    for (a, b, _), n in threes.items():
        before_two[a, b] += n
    sums, targets = [0.0, 0.0, 0.0], 0
    for part in (part for window in windows for part in window):
        for i in range(1, len(part)):
            b, c = part[i - 1], part[i]
            p1 = (ones[c] + 1) / (sum(ones.values()) + 256)
            p2 = (twos[b, c] + CONCENTRATION * p1) / (before_one[b] + CONCENTRATION)
            p3 = p2
            if i > 1:
                a = part[i - 2]
                p3 = (threes[a, b, c] + CONCENTRATION * p2) / (before_two[a, b] + CONCENTRATION)
            sums = [s - math.log(p) for s, p in zip(sums, (p1, p2, p3))]
            targets += 1
    return tuple(s / targets for s in sums)


@settings(max_examples=15, deadline=None)
@given(texts_strategy)
def test_counts_equal_dictionaries(texts):
    counts = count(join(texts))
    ones, twos, threes = slow_counts(texts)
    for table, expected in ((counts.unigram[:, None], ones), (counts.bigram, twos), (counts.trigram, threes)):
        assert table.sum() == sum(expected.values())
    assert all(counts.unigram[c] == n for c, n in ones.items())
    assert all(counts.bigram[pair] == n for pair, n in twos.items())
    assert all(counts.trigram[triple] == n for triple, n in threes.items())


def test_nats_equal_dictionaries():
    train = [b"abcabcabd", b"b", b"aabbccdd", b"xyz"]
    # Two windows of six tokens: "abcab|x" + "c", then "cabab|a" + "b".
    heldout = [b"abcab", b"xcabab", b"ab"]
    windows = [[b"abcab", b"xc"], [b"cabab", b"ab"]]
    found = nats_per_byte(count(join(train)), heldout_batches(join(heldout), 6, 1, count=9))
    expected = slow_nats(train, windows)
    assert [found[name] for name in ("unigram", "bigram", "trigram")] == pytest.approx(expected)
    assert found["uniform"] == pytest.approx(math.log(256))


def test_a_period_of_three_needs_three_bytes():
    """In "aab" repeated, b follows a half the time, but always follows "aa"."""
    documents = join([b"aab" * 40_000])
    nats = nats_per_byte(count(documents), heldout_batches(documents, 60, 4, count=4))
    assert nats["unigram"] == pytest.approx(math.log(3) - 2 / 3 * math.log(2), rel=0.02)
    assert nats["bigram"] == pytest.approx(2 / 3 * math.log(2), rel=0.02)
    # Every window opens with "aa", whose second a has one byte of context only; the rest is certain.
    assert nats["trigram"] == pytest.approx(math.log(2) / 60, rel=0.05)
