"""What simple byte statistics reach on the held-out text: the yardstick for a trained model.

Each order falls back on the one below it. n() counts what stands before and at targets inside
documents, a context as often as a target follows it:

    p1(c)      = (n(c)   + 1)            / (n    + 256)
    p2(c|b)    = (n(bc)  + A * p1(c))    / (n(b) + A)
    p3(c|ab)   = (n(abc) + A * p2(c|b))  / (n(ab) + A)

(Dirichlet smoothing: MacKay and Peto, "A hierarchical Dirichlet language model", 1995, eq. 14, with a
fixed concentration A.)
"""

from typing import NamedTuple

import numpy as np

from jaxpipe.training.corpus import Documents
from jaxpipe.training.data import HostBatch

V = 256
CONCENTRATION = 8.0
"""A: how many observations the lower order is worth."""


class Counts(NamedTuple):
    """Occurrences of one, two and three successive bytes: int64[256], [256, 256], [256, 256, 256].

    The last byte of each is a target; the first byte of a document is none.
    """

    unigram: np.ndarray
    bigram: np.ndarray
    trigram: np.ndarray


def count(documents: Documents) -> Counts:
    """Counts successive bytes that lie within one document."""
    tokens, starts = documents
    place = np.arange(len(tokens)) - np.repeat(starts[:-1], np.diff(starts))
    code = tokens.astype(np.int32)
    pairs = code[:-1] * V + code[1:]
    triples = pairs[:-1] * V + code[2:]
    bigram = np.bincount(pairs[place[1:] >= 1], minlength=V**2).reshape(V, V)
    trigram = np.bincount(triples[place[2:] >= 2], minlength=V**3).reshape(V, V, V)
    return Counts(bigram.sum(0), bigram, trigram)


def nats_per_byte(counts: Counts, batches: list[HostBatch]) -> dict[str, float]:
    """Mean negative log-likelihood of the targets with weight 1, by order: "uniform" to "trigram".

    As for a model, the context is what stands before the target in the same window and document; at
    its first position the trigram has one byte of context only and uses p2.
    """
    uses_b, uses_ab = counts.bigram.sum(-1), counts.trigram.sum(-1)
    totals, targets = np.zeros(3), 0
    for batch in batches:
        tokens_GxS, targets_GxS = batch["tokens"], batch["targets"]
        before_GxS = np.roll(tokens_GxS, 1, axis=1)
        counted = batch["weights"] > 0
        c, b, a = targets_GxS[counted], tokens_GxS[counted], before_GxS[counted]
        p1 = (counts.unigram[c] + 1) / (counts.unigram.sum() + V)
        p2 = (counts.bigram[b, c] + CONCENTRATION * p1) / (uses_b[b] + CONCENTRATION)
        p3 = (counts.trigram[a, b, c] + CONCENTRATION * p2) / (uses_ab[a, b] + CONCENTRATION)
        p3 = np.where(batch["positions"][counted] > 0, p3, p2)
        totals += [-np.log(p).sum() for p in (p1, p2, p3)]
        targets += len(c)
    orders = dict(zip(("unigram", "bigram", "trigram"), (totals / targets).tolist()))
    return {"uniform": float(np.log(V))} | orders
