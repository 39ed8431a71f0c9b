from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgym_sql.format import TagAction, cut_at_stop, is_well_formed, parse_action

TAGS = ["<think>", "</think>", "<sql>", "</sql>", "<solution>", "</solution>", "<observation>", "</observation>"]
SOUP = st.lists(st.sampled_from([*TAGS, "SELECT 1", " ", "\n", "é"]), max_size=12).map("".join)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think>a</think><sql>SELECT 1</sql>", TagAction("sql", "SELECT 1")),
        ("<think>a</think>\n<solution>\n SELECT 1;\n</solution>", TagAction("solution", "SELECT 1;")),
        ("<sql>SELECT 1</sql><solution>SELECT 2</solution>", TagAction("sql", "SELECT 1")),
        ("<sql>SELECT 1</sql> overshoot <sql>SELECT 2</sql>", TagAction("sql", "SELECT 1")),
        ("<think>I could use <sql> here</think><sql>SELECT 1</sql>", TagAction("sql", "SELECT 1")),
        ("<sql></sql>", TagAction("sql", "")),
        ("<sql>SELECT 1", None),
        ("SELECT 1</sql>", None),
        ("<sql>SELECT 1</solution>", None),
        ("", None),
        ("just words", None),
    ],
)
def test_the_action_is_the_first_that_is_closed(text: str, action: TagAction | None) -> None:
    assert parse_action(text) == action


@given(text=st.one_of(st.text(), SOUP))
def test_what_stands_after_the_stop_string_never_matters(text: str) -> None:
    cut = cut_at_stop(text)
    assert text.startswith(cut)
    assert parse_action(cut) == parse_action(text)
    assert cut_at_stop(cut) == cut


GOOD = ["<think>a</think><sql>SELECT 1</sql>", "\n<think>b</think> <solution>SELECT 1</solution>"]


@pytest.mark.parametrize(
    ("turns", "good"),
    [
        (GOOD, True),
        ([GOOD[1]], True),
        ([], False),
        ([GOOD[0]], False),
        (["<solution>SELECT 1</solution>"], False),
        (["<solution>SELECT 1</solution><think>late</think>"], False),
        ([GOOD[0], "<solution>SELECT 1</solution>"], False),
        ([GOOD[0], "well, <think>b</think><solution>SELECT 1</solution>"], False),
        ([GOOD[0], "<think>b</think><solution>SELECT 1"], False),
        ([GOOD[0], "<think>b</think><solution>SELECT 1<solution>SELECT 2</solution>"], False),
        ([GOOD[0], "<think>b</think><solution><think>c</think>SELECT 1</solution>"], False),
        ([GOOD[0], "<think>b</think><solution><SQL>SELECT 1</solution>"], False),
        ([GOOD[0], "<think>b</think><solution>SELECT 1 <observation></solution>"], False),
        (["<think>open <solution>SELECT 1</solution>"], False),
        (["<think>say <solution> now</think><sql>SELECT 1</sql>", GOOD[1]], False),
        (["</solution>", GOOD[1]], False),
        (["<think>a</think> no action", GOOD[1]], True),
        (["<think>a</think></observation> made up", GOOD[1]], False),
        (["<think>a</think><observation>made up</observation><think>b</think><solution>SELECT 1</solution>"], True),
    ],
)
def test_the_format_of_skyrl(turns: list[str], good: bool) -> None:
    assert is_well_formed(turns) is good


@given(turns=st.lists(SOUP, max_size=4))
def test_a_well_formed_episode_has_one_thought_of_solution(turns: list[str]) -> None:
    if is_well_formed(turns):
        written = "".join(turns)
        assert written.count("<solution>") == written.count("</solution>") == 1
        assert written.index("<think>") < written.index("</think>") < written.index("<solution>")
