import sysconfig
from pathlib import Path

import numpy as np
import pytest

from jaxpipe.training.corpus import join, load_corpus


def write(root: Path, files: dict[str, bytes]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return str(root)


def texts(documents) -> list[bytes]:
    return [documents.tokens[a:b].tobytes() for a, b in zip(documents.starts[:-1], documents.starts[1:])]


def test_join_keeps_bytes_and_starts():
    documents = join([b"ab", b"\xff", b"cde"])
    assert documents.tokens.dtype == np.uint8
    np.testing.assert_array_equal(documents.starts, [0, 2, 3, 6])
    assert texts(documents) == [b"ab", b"\xff", b"cde"]


def test_sorted_by_relative_path_and_every_third_held_out(tmp_path):
    files = {
        "b.txt": b"bbbb",
        "a/z.txt": b"zzzz",
        "a/y.txt": b"yyyy",
        "c.txt": b"cccc",
        "empty.txt": b"",
        "image.png": b"no text",
        ".git/x.txt": b"hidden",
    }
    corpus = load_corpus(write(tmp_path, files), (".txt",), holdout_every=3, sequence_length=2)
    assert texts(corpus.train) == [b"yyyy", b"zzzz", b"cccc"]
    assert texts(corpus.heldout) == [b"bbbb"]


def test_a_single_file_is_cut(tmp_path):
    path = tmp_path / "book"
    path.write_bytes(bytes(range(100)))
    corpus = load_corpus(str(path), (".txt",), holdout_every=10, sequence_length=9)
    assert texts(corpus.train) == [bytes(range(90))]
    assert texts(corpus.heldout) == [bytes(range(90, 100))]


def test_stdlib_holds_whole_modules_and_no_tests():
    corpus = load_corpus("stdlib", (), holdout_every=10, sequence_length=256)
    sizes = [len(part.tokens) for part in corpus]
    assert sum(sizes) < 40e6
    assert 0.02 < sizes[1] / sum(sizes) < 0.3
    json_source = (Path(sysconfig.get_paths()["stdlib"]) / "json" / "__init__.py").read_bytes()
    everything = texts(corpus.train) + texts(corpus.heldout)
    assert everything.count(json_source) == 1
    assert not any(
        text.startswith(b'"""Tests for') or b"unittest.main()" in text[-40:] for text in everything
    )


@pytest.mark.parametrize(
    ("files", "length", "message"),
    [
        (None, 4, "does not exist; expected 'stdlib', a folder or a file"),
        ({"a.png": b"x"}, 4, r"has no files ending in \.txt, \.md; see data\.suffixes"),
        ({"a.txt": b"abc", "b.txt": b"defgh"}, 4, r"has 3 training bytes in 1 files; expected at least 5"),
        ({"a.txt": b"abcdefgh", "b.txt": b"def"}, 4, r"has 3 held-out bytes in 1 files; expected at least 5"),
        ({"a.txt": b"", "b.txt": b""}, 4, "has 2 files, all of them empty; expected text"),
    ],
)
def test_errors_say_what_is_missing(tmp_path, files, length, message):
    root = tmp_path / "text"
    if files is not None:
        write(root, files)
    with pytest.raises(ValueError, match=message) as error:
        load_corpus(str(root), (".txt", ".md"), holdout_every=2, sequence_length=length)
    assert str(root) in str(error.value)


def test_an_empty_file(tmp_path):
    (tmp_path / "book").touch()
    with pytest.raises(ValueError, match="book' is an empty file; expected text"):
        load_corpus(str(tmp_path / "book"), (".txt",), holdout_every=2, sequence_length=4)
