from __future__ import annotations

import re
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgym_search.retrievers import analyzer as analyzer_module
from stepgym_search.retrievers.analyzer import LONGEST_WORD, Analyzer

from stepgym.errors import UserError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The running dogs' can't", ["run", "dog", "can't"]),
        ("O'Neil’s it's ships' x'", ["o'neil", "ship", "x"]),
        ("U.S. 3.14 1,000 foo_bar a.b x2 2x _ _a_", ["u.", "3.14", "1,000", "foo_bar", "a.b", "x2", "2x", "_a_"]),
        ("us is", ["us"]),
        ("naïve Straße İstanbul ΣΟΦΟΣ", ["naïv", "straße", "istanbul", "σοφοσ"]),
        ("東京タワー すごい", ["東", "京", "タワー", "す", "ご", "い"]),
        ("한국어 हिन्दी العربية ไทย", ["한국어", "हिन्दी", "العربية", "ไทย"]),
        ("iPhoneราคาถูก ค่ะTH", ["iphon", "ราคาถูก", "ค่ะ", "th"]),
        ("aー ータ צה\"ל ג'", ["ー", "ータ", 'צה"ל', "ג'"]),
        ("soft\u00adhyphen zero\ufeff 👍 🏽", ["soft\u00adhyphen", "zero\ufeff", "👍", "🏽"]),
        ("e\u0301te\u0301", ["e\u0301te\u0301"]),
        ("😀👍🏽 👨\u200d👩\u200d👧 🇩🇪", ["😀", "👍🏽", "👨\u200d👩\u200d👧", "🇩🇪"]),
        ("", []),
        (" \t\n the of", []),
        ("\x00\x01 \ud800 ?!", []),
        ("a\x00bc", ["bc"]),
    ],
)
def test_words_are_those_of_lucene(text: str, words: list[str]) -> None:
    assert Analyzer()(text) == words


def test_stemmer_and_stop_words_can_be_chosen() -> None:
    assert Analyzer(stemmer="none")("The running dogs") == ["running", "dogs"]
    assert Analyzer(stop_words="none")("The running dogs") == ["the", "run", "dog"]
    assert Analyzer(stemmer="german")("Häusern") == ["haus"]
    with pytest.raises(UserError, match="unknown stemmer 'portr'; did you mean 'porter'"):
        Analyzer(stemmer="portr")


def test_a_long_word_is_cut_into_words() -> None:
    words = Analyzer(stemmer="none")("x" * (2 * LONGEST_WORD + 7))
    assert [len(word) for word in words] == [LONGEST_WORD, LONGEST_WORD, 7]


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("aZ9_.,:;'- \n#@é"), max_size=40))
def test_ascii_is_cut_as_by_the_pattern_for_all_scripts(text: str) -> None:
    import regex

    ascii_text = text.replace("é", "e")
    everything = regex.findall(analyzer_module._WORDS, ascii_text)
    assert analyzer_module._ASCII_WORDS.findall(ascii_text) == everything


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_gives_words_that_utf8_can_write(text: str) -> None:
    for word in Analyzer()(text):
        assert word
        assert not re.search(r"\s", word)
        word.encode()


@pytest.mark.parametrize("unit", ["a", "a.", "1,", "'", "_", "\u0301", "1\u0301.", "東", "😀", "\u200d", "🇩", "a'"])
def test_no_text_takes_for_ever(unit: str) -> None:
    # A pattern that tries all ways to cut would need years for this.
    Analyzer()(unit * 100_000)


def test_threads_share_one_analyzer() -> None:
    analyzer = Analyzer()
    texts = [" ".join(f"running{n}ings flies{n}" for n in range(start, start + 200)) for start in range(0, 1600, 200)]
    expected = [Analyzer()(text) for text in texts]
    found: dict[int, list[str]] = {}
    threads = [threading.Thread(target=lambda n=n: found.setdefault(n, analyzer(texts[n]))) for n in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(len(texts))] == expected


def test_the_stop_words_are_lucenes() -> None:
    assert len(analyzer_module.LUCENE_STOP_WORDS) == 33
    assert sys.intern("their") in analyzer_module.LUCENE_STOP_WORDS
