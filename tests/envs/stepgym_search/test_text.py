from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from stepgym_search.text import well_formed


def test_halves_of_characters_are_replaced_and_pairs_of_them_joined() -> None:
    assert well_formed("a\ud83d b") == "a\ufffd b"
    assert well_formed("\ude00\ud83d") == "\ufffd\ufffd"
    assert well_formed("\ud83d\ude00") == "😀"
    assert well_formed("\ud800😀") == "\ufffd😀"


@given(st.text(st.characters()))
def test_any_text_can_be_encoded_and_good_text_is_left_alone(text: str) -> None:
    made = well_formed(text)
    made.encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert made == text
