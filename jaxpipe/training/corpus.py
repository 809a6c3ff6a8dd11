"""Text corpora as bytes: files are documents, and every n-th file is held out."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

STDLIB_SUFFIXES = (".py",)
STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Documents(NamedTuple):
    """Documents laid end to end.

    tokens: uint8[N], their bytes. starts: int64[D + 1], where each begins, then N. None is empty.
    """

    tokens: np.ndarray
    starts: np.ndarray


class Corpus(NamedTuple):
    """The two parts of a corpus."""

    train: Documents
    heldout: Documents


def load_corpus(corpus: str, suffixes: tuple[str, ...], holdout_every: int, sequence_length: int) -> Corpus:
    """Reads a corpus; the result depends on relative paths and contents only.

    corpus: "stdlib" for the Python sources of the running interpreter's standard library without its
      tests (`suffixes` does not apply), or the path of a folder or of one file.
    holdout_every: of the sorted files, numbers n, 2n, 3n ... (from 1) are held out. A single file is
      cut instead, and its last n-th held out.
    sequence_length: both parts must be long enough for one sequence and its last target.

    Raises:
      ValueError: when the path is missing, holds no text file, or the text is empty or too short.
    """
    if corpus == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _files(root, STDLIB_SUFFIXES, skipped=STDLIB_SKIPPED)
    else:
        root = Path(corpus).expanduser()
        if not root.exists():
            raise ValueError(f"data.corpus {corpus!r} does not exist; expected 'stdlib', a folder or a file")
        files = [root] if root.is_file() else _files(root, suffixes, skipped=set())
    texts = [text for text in (_read(path) for path in files) if text]
    if not texts:
        what = "is an empty file" if root.is_file() else f"has {len(files)} files, all of them empty"
        raise ValueError(f"data.corpus {corpus!r} {what}; expected text")
    if len(texts) == 1:
        cut = len(texts[0]) - len(texts[0]) // holdout_every
        train, heldout = [texts[0][:cut]], [texts[0][cut:]]
    else:
        heldout = texts[holdout_every - 1 :: holdout_every]
        train = [text for i, text in enumerate(texts, 1) if i % holdout_every]
    for part, documents in (("training", train), ("held-out", heldout)):
        found = sum(map(len, documents))
        if found < sequence_length + 1:
            raise ValueError(
                f"data.corpus {corpus!r} has {found} {part} bytes in {len(documents)} files; expected "
                f"at least {sequence_length + 1} (data.sequence_length {sequence_length} and the last target)"
            )
    return Corpus(join(train), join(heldout))


def join(texts: list[bytes]) -> Documents:
    """Lays non-empty texts end to end."""
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return Documents(np.frombuffer(b"".join(texts), np.uint8), starts)


def _files(root: Path, suffixes: tuple[str, ...], skipped: set[str]) -> list[Path]:
    """Files under `root` with one of the suffixes, sorted by relative path."""
    found = []
    for folder, names, files in root.walk():
        names[:] = [name for name in names if name not in skipped and not name.startswith(".")]
        found += [folder / name for name in files if name.endswith(suffixes)]
    if not found:
        raise ValueError(
            f"data.corpus {str(root)!r} has no files ending in {', '.join(suffixes)}; see data.suffixes"
        )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"data.corpus: cannot read {str(path)!r}: {error.strerror}") from error
