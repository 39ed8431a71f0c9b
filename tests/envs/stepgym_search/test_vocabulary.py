from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgym_search.retrievers.vocabulary import Vocabulary


@settings(max_examples=80, deadline=None)
@given(
    words=st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1, max_size=40),
    other=st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
def test_every_word_has_its_number_and_no_other_has_one(
    tmp_path_factory: pytest.TempPathFactory, words: set[str], other: str
) -> None:
    folder = tmp_path_factory.mktemp("words")
    ordered = Vocabulary.write(folder, words)
    vocabulary = Vocabulary(folder)
    assert len(vocabulary) == len(words)
    assert [vocabulary.number(word) for word in ordered] == list(range(len(words)))
    assert [vocabulary[number].decode() for number in range(len(words))] == ordered
    assert set(ordered) == words
    if other not in words:
        assert vocabulary.number(other) is None
    vocabulary.close()


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    Vocabulary.write(tmp_path, ["one", "two"])
    (tmp_path / "vocabulary.bin").write_bytes(b"onetw")
    with pytest.raises(ValueError, match="do not fit"):
        Vocabulary(tmp_path)
    np.save(tmp_path / "vocabulary.npy", np.zeros((1, 1)))
    with pytest.raises(ValueError, match="do not fit"):
        Vocabulary(tmp_path)
    (tmp_path / "vocabulary.bin").unlink()
    with pytest.raises(FileNotFoundError):
        Vocabulary(tmp_path)
