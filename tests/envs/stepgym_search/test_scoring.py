from __future__ import annotations

import re
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgym_search.scoring import golden_texts, is_match, normalize_answer


def squad(text: str) -> str:
    """SQuAD's normalisation, written down a second time from its rules."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(word for word in re.sub(r"\b(a|an|the)\b", " ", kept).split())


@pytest.mark.parametrize(
    ("answer", "golden"),
    [
        ("The Beatles", "beatles"),
        ("  the   Duke of  Narn. ", "Duke of Narn"),
        ("twenty-one", "Twentyone"),
        ("a U.S.A. an", "USA"),
        ("$5", "5"),
        ("CAFÉ", "café"),
        (unicodedata.normalize("NFD", "Café"), "café"),
        ("STRASSE", "Straße"),
        ("１９４５", "1945"),
        ("Ｎａｒｎ", "narn"),
        ("“Narn”", "Narn"),
        ("1914–1918", "1914-1918"),
        ("東京。", "東京"),
        ("「東京」", "東京"),
        ("ΑΘΗΝΑ", "αθηνα"),
        ("МОСКВА", "Москва"),
        ("موسكو؟", "موسكو"),
        ("na\u200bme", "name"),
        ("Cafe\u200b\u0301", "café"),
        ("Narn\u3000City", "narn city"),
        ("🎉", "🎉"),
    ],
)
def test_what_readers_take_for_the_same_matches(answer: str, golden: str) -> None:
    assert is_match(answer, [golden])
    assert is_match(golden, ["something else", answer])


@pytest.mark.parametrize(
    ("answer", "golden"),
    [
        ("cafe", "café"),
        ("Narn City", "Narn"),
        ("Narn", "Narn City"),
        ("1945", "1946"),
        ("東京", "京都"),
        ("then", "n"),
        ("not Narn", "Narn"),
    ],
)
def test_what_differs_does_not(answer: str, golden: str) -> None:
    assert not is_match(answer, [golden])


@pytest.mark.parametrize("nothing", ["", " ", "the", "A", "...", "the ... a", "。", "\u200b", "—"])
def test_what_normalises_to_nothing_never_matches(nothing: str) -> None:
    assert not is_match(nothing, [nothing, "", "the"])
    assert not is_match("Narn", [nothing], "substring")
    assert not is_match(nothing, ["Narn"], "substring")
    assert golden_texts(nothing) == golden_texts([nothing, nothing]) == ()


def test_substring_wants_a_golden_answer_in_the_answer() -> None:
    assert is_match("It is the Duke of Narn!", ["x", "duke of narn"], "substring")
    assert not is_match("Duke", ["Duke of Narn"], "substring")
    assert is_match("party", ["art"], "substring")  # as published: even inside a word


@pytest.mark.parametrize(
    ("answers", "golden"),
    [
        ("Narn", ("Narn",)),
        (["Narn", "the", "Velor"], ("Narn", "Velor")),
        (("Narn",), ("Narn",)),
        ([1945, 2.5], ("1945", "2.5")),
        (None, ()),
        ([], ()),
        ([None, True, {}], ()),
        ({"target": "Narn"}, ()),
    ],
)
def test_golden_answers_come_in_several_forms(answers: object, golden: tuple[str, ...]) -> None:
    assert golden_texts(answers) == golden


@given(text=st.text(alphabet=st.characters(max_codepoint=127)))
def test_ascii_is_normalised_as_published(text: str) -> None:
    assert normalize_answer(text) == squad(text)


@given(text=st.text())
def test_an_answer_matches_itself_in_every_spelling(text: str) -> None:
    normal = normalize_answer(text)
    assert normal == " ".join(normal.split())
    spellings = [text, f" {text}\n", f'"{text}"', *(unicodedata.normalize(form, text) for form in ("NFC", "NFD"))]
    for spelled in spellings:
        assert is_match(spelled, [text]) is bool(normal)
        assert is_match(spelled, [text], "substring") is bool(normal)


@given(answer=st.text(), golden=st.lists(st.text(), max_size=3))
def test_exact_matches_are_substring_matches(answer: str, golden: list[str]) -> None:
    assert is_match(answer, golden, "substring") or not is_match(answer, golden)
    assert is_match(answer, golden) == is_match(answer, golden_texts(golden))
