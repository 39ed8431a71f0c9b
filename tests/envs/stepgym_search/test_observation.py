from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgym_search.document import Document
from stepgym_search.observation import ObservationFormat, documents_text, error_text, invalid_action, wrap

FOUND = [Document("7", '"Velor"\nVelor was born in Narn.\nHe wrote.', 2.5), Document("9", "Narn", 1.0)]
FORMATS = get_args(ObservationFormat)


def shown(documents: list[Document], observation_format: ObservationFormat, max_chars: int = 8000) -> str:
    return wrap(documents_text(documents, observation_format, max_chars), observation_format)


def test_search_r1_to_the_letter() -> None:
    assert shown(FOUND, "search-r1") == (
        '\n\n<information>Doc 1(Title: "Velor") Velor was born in Narn.\nHe wrote.\nDoc 2(Title: Narn)'
        "</information>\n\n"
    )
    assert shown([], "search-r1") == "\n\n<information></information>\n\n"


def test_skyrl_to_the_letter() -> None:
    assert shown(FOUND, "skyrl") == (
        '\n<information>{"result": "Doc 1: \\"Velor\\"\\nVelor was born in Narn.\\nHe wrote.\\nDoc 2: Narn\\n"}'
        "</information>\n"
    )
    assert (
        shown([Document("1", " é\nx \n")], "skyrl")
        == '\n<information>{"result": "Doc 1: \\u00e9\\nx\\n"}</information>\n'
    )
    assert shown([], "skyrl") == '\n<information>{"result": ""}</information>\n'


def test_brief_has_the_contents_as_they_are() -> None:
    assert shown(FOUND, "brief") == f"<information>{FOUND[0].contents}\n{FOUND[1].contents}</information>"
    assert shown([], "brief") == "<information></information>"


def test_invalid_actions_to_the_letter() -> None:
    sentence = (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. "
        "Let me try again.\n"
    )
    assert invalid_action("search-r1") == invalid_action("skyrl") == sentence
    assert len(invalid_action("brief")) < 60


def test_errors_are_told_in_the_same_tags() -> None:
    assert json.loads(wrap(error_text("no", "skyrl"), "skyrl").split(">")[1].split("<")[0]) == {
        "result": "Search error: no"
    }
    assert wrap(error_text("no", "search-r1"), "search-r1") == "\n\n<information>Search error: no</information>\n\n"
    assert wrap(error_text("no", "brief"), "brief") == "<information>no</information>"


@pytest.mark.parametrize("observation_format", FORMATS)
def test_long_documents_are_cut_and_say_so(observation_format: ObservationFormat) -> None:
    long = [Document("1", "T\n" + "x" * 5000), Document("2", "U\nshort")]
    text = documents_text(long, observation_format, 100)
    assert text.count("x") == 98
    assert "x…" in text
    assert "short" in text
    assert "…" not in documents_text(long, observation_format, 5002)


ANY_TEXT = st.text(alphabet=st.one_of(st.characters(), st.sampled_from("\ud83d\ude00")))


@given(contents=st.lists(ANY_TEXT, max_size=3), observation_format=st.sampled_from(FORMATS))
def test_any_document_can_be_shown_and_sent(contents: list[str], observation_format: ObservationFormat) -> None:
    text = shown([Document(str(n), each) for n, each in enumerate(contents)], observation_format)
    assert text.encode()
    assert text.strip().startswith("<information>")
    assert text.strip().endswith("</information>")
