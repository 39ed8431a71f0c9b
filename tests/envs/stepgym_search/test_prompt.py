from __future__ import annotations

from stepgym_search.prompt import build_prompt


def test_the_published_prompt_to_the_letter() -> None:
    assert build_prompt("who got the first nobel prize in physics?", instructions="search-r1", actions="tags") == (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get "
        "new information. After reasoning, if you find you lack some knowledge, you can call a search engine by "
        "<search> query </search> and it will return the top searched results between <information> and "
        "</information>. You can search as many times as your want. If you find no further external knowledge needed, "
        "you can directly provide the answer inside <answer> and </answer>, without detailed illustrations. "
        "For example, <answer> Beijing </answer>. Question: who got the first nobel prize in physics?\n"
    )


def test_with_tool_calls_it_asks_for_no_search_tags() -> None:
    text = build_prompt("who?", instructions="search-r1", actions="tools")
    assert "<search>" not in text
    assert "`search`" in text
    assert "<answer>" in text
    assert text.endswith("Question: who?\n")


def test_small_models_get_less() -> None:
    assert build_prompt("who?", instructions="none", actions="tags") == "who?"
    for actions in ("tags", "tools"):
        brief = build_prompt("who?", instructions="brief", actions=actions)  # type: ignore[arg-type]
        assert brief.startswith("who?\n")
        assert "<answer>" in brief
        assert len(brief) < 90
    assert build_prompt("{question}", instructions="search-r1", actions="tags").endswith("Question: {question}\n")
