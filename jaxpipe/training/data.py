"""Batches of packed documents, each a pure function of seed and step.

Documents are laid end to end and cut into windows of S tokens. Every byte but the first is a target
exactly once; where it opens a document its weight is 0, since nothing before it belongs to it.

Shape letters: G sequences in a global batch, S tokens in a sequence.
"""

import grain
import numpy as np

from jaxpipe.training.corpus import Documents

HostBatch = dict[str, np.ndarray]
"""`tokens`, `targets`, `segments`, `positions` int32[G, S]; `weights` float32[G, S]."""


class Windows:
    """The windows of a corpus as a random-access source; one costs O(S), wherever it lies.

    Window i holds tokens [i*S, i*S + S) and the same span shifted by one as targets. Segments number
    the documents from 0 within the window; positions count from 0 at each document and at the
    window's start.
    """

    def __init__(self, documents: Documents, sequence_length: int):
        self._documents = documents
        self._length = sequence_length

    def __len__(self) -> int:
        return max(0, len(self._documents.tokens) - 1) // self._length

    def __getitem__(self, index: int) -> HostBatch:
        first, length = index * self._length, self._length
        tokens, starts = self._documents
        span = tokens[first : first + length + 1].astype(np.int32)
        opens = np.zeros(length + 1, np.int32)
        inside = slice(*np.searchsorted(starts, (first + 1, first + length + 1)))
        opens[starts[inside] - first] = 1
        offsets = np.arange(length, dtype=np.int32)
        latest_open = np.maximum.accumulate(np.where(opens[:-1], offsets, 0))
        return {
            "tokens": span[:-1],
            "targets": span[1:],
            "segments": np.cumsum(opens[:-1], dtype=np.int32),
            "positions": offsets - latest_open,
            "weights": (1 - opens[1:]).astype(np.float32),
        }


def training_batches(
    documents: Documents, sequence_length: int, global_batch: int, seed: int
) -> grain.MapDataset:
    """An endless dataset whose element `step` is that step's HostBatch, whatever was read before.

    Every epoch takes all windows once, in an order of its own; a batch may span two epochs.
    """
    windows = grain.MapDataset.source(Windows(documents, sequence_length))
    return windows.seed(seed).shuffle().repeat().batch(global_batch)


def heldout_batches(
    documents: Documents, sequence_length: int, global_batch: int, count: int
) -> list[HostBatch]:
    """At most `count` batches of windows spread evenly over the documents, always the same ones.

    Where there are fewer windows than `count * global_batch`, all are taken, and the last batch is
    filled up with rows of weight 0.
    """
    windows = Windows(documents, sequence_length)
    total = min(count * global_batch, len(windows))
    rows = [windows[i * len(windows) // total] for i in range(total)]
    blank = {name: np.zeros_like(value) for name, value in rows[0].items()}
    rows += [blank] * (-total % global_batch)
    groups = [rows[i : i + global_batch] for i in range(0, len(rows), global_batch)]
    return [{name: np.stack([row[name] for row in group]) for name in blank} for group in groups]
