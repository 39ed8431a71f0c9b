from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepgym_search.actions import parse_action
from stepgym_search.env import SearchEnv
from stepgym_search.scoring import is_match

from stepgym.env.messages import Message
from stepgym.env.shared import close_shared
from stepgym.env.task import Task
from stepgym.errors import UnscorableTask, UserError
from stepgym.record.outcome import Outcome

THINK = "<think>so</think>"
SEARCH = f"{THINK}<search>poet Velor</search>"
TRAP = f"{THINK}<search>trap thieves</search>"
RIGHT = f"{THINK}<answer>the town of Narn</answer>"
GOLD = ["Town of Narn", "Narn"]
INVALID = "\nMy previous action is invalid. If I want to search,"

Play = Callable[..., tuple[SearchEnv, list[Any]]]


@pytest.fixture(scope="module", autouse=True)
def _close_everything() -> Iterator[None]:
    yield
    close_shared(SearchEnv)


@pytest.fixture
def play(passages: Path) -> Play:
    """play(turns, gold=…, **config) -> the environment and the results of its steps."""

    def play(*turns: object, gold: Any = GOLD, **config: Any) -> tuple[SearchEnv, list[Any]]:
        env = SearchEnv(corpus=str(passages), **config)
        task = Task("t", "Where was the poet Velor born?", gold, {"articles": ["velor", "narn"]})
        env.reset(seed=0, options={"task": task})
        return env, [env.step(turn) for turn in turns]  # type: ignore[arg-type]

    return play


def call(name: object, arguments: object, call_id: str = "call_1") -> Message:
    function = {"name": name, "arguments": arguments}
    tool_calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def query(text: str) -> str:
    return json.dumps({"query": text})


def test_searching_then_answering(play: Play) -> None:
    env, (search, end) = play(SEARCH, RIGHT, topk=1)
    assert search[:4] == (
        [
            {
                "role": "user",
                "content": '\n\n<information>Doc 1(Title: "Velor") Velor was a poet. He was born in Narn and died in '
                "Ost.</information>\n\n",
            }
        ],
        0.0,
        False,
        False,
    )
    assert end[:4] == ([], 1.0, True, False)
    assert end[4]["success"] is True
    assert end[4]["reward_parts"] == {"correct": 1.0}
    metrics = end[4]["metrics"]
    assert metrics.pop("retrieval_s") > 0
    assert metrics == {"searches": 1, "empty_results": 0, "documents": 1, "gold_retrieved": 0.5}
    assert env.stop == ("</search>", "</answer>")
    assert env.reward_range == (0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "gold", "reward"),
    [
        ("narn!", GOLD, 1.0),
        ("Ost", GOLD, 0.0),
        ("Narn or Ost", GOLD, 0.0),
        ("", GOLD, 0.0),
        ("the", GOLD, 0.0),
        ("CAFE\u0301", ["café"], 1.0),
        ("１２", 12, 1.0),
        ("京都。", "京都", 1.0),
        ("<answer>Narn", GOLD, 1.0),
        ("<b>Narn</b>", GOLD, 0.0),
    ],
)
def test_the_answer_is_right_when_it_is_a_golden_one(play: Play, answer: str, gold: Any, reward: float) -> None:
    _, (end,) = play(f"{THINK}<answer>{answer}</answer>", gold=gold)
    assert end[1:4] == (reward, True, False)
    assert end[4]["success"] is (reward == 1.0)


def test_substring_and_format_score_are_options(play: Play) -> None:
    said = f"{THINK}<answer>It is Narn, I think</answer>"
    assert play(said)[1][0][1] == 0.0
    assert play(said, match="substring")[1][0][1] == 1.0
    _, (end,) = play(said, format_score=0.1)
    assert end[1] == 0.1
    assert end[4]["reward_parts"] == {"correct": 0.0, "format": 0.1}
    assert end[4]["success"] is False
    _, (end,) = play(RIGHT, format_score=0.1)
    assert end[1] == 1.0
    assert end[4]["reward_parts"] == {"correct": 1.0, "format": 0.0}
    assert play(f"{THINK}<answer> </answer>", format_score=0.1)[1][0][1] == 0.0
    assert play("no answer", format_score=0.1, max_turns=1)[1][0][1] == 0.0


@pytest.mark.parametrize("actions", ["tags", "tools"])
@pytest.mark.parametrize("observation_format", ["search-r1", "skyrl", "brief"])
def test_an_answer_in_a_document_never_scores(play: Play, actions: str, observation_format: str) -> None:
    """Narn is the right answer, and stands in a document, in tags, behind a forged end of the observation."""
    look: Any = TRAP if actions == "tags" else call("search", query("trap thieves"))
    for last in ("I have no idea", f"{THINK}<answer>Ost</answer>", look):
        _, results = play(
            look, look, last, actions=actions, observation_format=observation_format, format_score=0.2, max_turns=3
        )
        assert "<answer>Narn</answer>" in results[0][0][0]["content"]
        total = sum(result[1] for result in results)
        assert total == (0.2 if last == f"{THINK}<answer>Ost</answer>" else 0.0)
        assert results[-1][4]["success"] is False
        assert results[-1][4]["reward_parts"]["correct"] == 0.0
    # And it does not keep a right answer from scoring.
    assert play(look, RIGHT, actions=actions, observation_format=observation_format)[1][1][1] == 1.0


def test_the_example_in_the_prompt_never_scores(play: Play) -> None:
    env, results = play("I do not know", "still not", max_turns=2, gold="Beijing")
    messages, _ = env.reset(seed=0, options={"task": env.task})
    assert "<answer> Beijing </answer>" in messages[0]["content"]
    assert sum(result[1] for result in results) == 0.0
    assert results[-1][4]["success"] is False


def test_a_turn_acts_on_its_text_up_to_the_stop_string(play: Play) -> None:
    assert play(f"{RIGHT} and <answer>Ost</answer>")[1][0][1] == 1.0
    taken_apart = {"role": "assistant", "content": "<answer>Narn</answer>", "reasoning_content": "so"}
    assert play(taken_apart)[1][0][1] == 1.0
    sampled = {"role": "assistant", "content": "", "text": RIGHT}
    assert play(sampled)[1][0][1] == 1.0


def test_a_turn_without_an_action_costs_a_turn_and_is_told(play: Play) -> None:
    _, results = play("just words", {"role": "assistant", "content": None}, f"{THINK}<search>Velor", RIGHT)
    for result in results[:3]:
        assert result[1:4] == (0.0, False, False)
        assert result[4]["action_status"] == "no_action"
        (message,) = result[0]
        assert message["role"] == "user"
        assert message["content"].startswith(INVALID)
    assert results[3][1] == 1.0
    brief = play("just words", observation_format="brief")[1][0][0][0]["content"]
    assert brief == "invalid: write <search></search> or <answer></answer>"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" ", "the query is empty"),
        ("x" * 2001, "the query has 2001 characters, and may have 2000"),
        ("x " * 50_000, "the query has 99999 characters"),
    ],
)
@pytest.mark.parametrize("actions", ["tags", "tools"])
def test_a_query_that_is_no_good_is_told(play: Play, text: str, said: str, actions: str) -> None:
    turn = f"<search>{text}</search>" if actions == "tags" else call("search", query(text))
    _, (result,) = play(turn, actions=actions)
    assert result[1:4] == (0.0, False, False)
    assert said in result[0][0]["content"]
    assert result[4]["action_error"]


def test_the_longest_query_is_searched(play: Play) -> None:
    _, (found,) = play(f"<search> {'poet'.ljust(1999, 'x')}y </search>")
    assert "action_error" not in found[4]
    assert found[4]["metrics"]["searches"] == 1


def test_an_environment_that_is_used_again_counts_anew(play: Play) -> None:
    env, _ = play(SEARCH, RIGHT)
    env.reset(seed=0, options={"task": env.task})
    *_, info = env.step(RIGHT)
    assert info["metrics"] == {"searches": 0, "empty_results": 0, "documents": 0, "retrieval_s": 0, "gold_retrieved": 0}


def test_a_query_of_100_kilobytes_is_searched_where_it_is_allowed(play: Play) -> None:
    _, (nothing, found) = play(
        f"<search>{'x ' * 50_000}</search>", f"<search>{'poet ' * 20_000}</search>", max_query_chars=200_000
    )
    assert nothing[0][0]["content"] == "\n\n<information></information>\n\n"
    assert "Velor was a poet" in found[0][0]["content"]
    assert found[4]["metrics"]["empty_results"] == 1


@pytest.mark.parametrize("text", ["qqqq", "?!", "\0", "\ud83d", "🎉", "Ω", "the"])
def test_a_search_that_finds_nothing_is_an_honest_empty_result(play: Play, text: str) -> None:
    _, (result,) = play(f"<search>{text}</search>")
    assert result[0][0]["content"] == "\n\n<information></information>\n\n"
    assert result[4]["metrics"]["empty_results"] == 1
    assert "action_error" not in result[4]
    _, (result,) = play(call("search", query(text)), actions="tools")
    assert result[0][0]["content"] == "No document fits this query."


def test_other_scripts_are_searched(play: Play) -> None:
    _, (result,) = play("<search>京都</search>", topk=1)
    assert 'Doc 1(Title: "京都")' in result[0][0]["content"]


def test_the_turn_limit_ends_an_episode(play: Play) -> None:
    env, results = play(SEARCH, SEARCH, max_turns=2)
    observation, reward, terminated, truncated, info = results[-1]
    assert (observation, reward, terminated, truncated) == ([], 0.0, False, True)
    assert info["turn_limit"]
    assert info["success"] is False
    assert info["reward_parts"] == {"correct": 0.0}
    assert info["metrics"]["searches"] == 1  # nobody would have seen what the second one finds
    assert play(SEARCH, RIGHT, max_turns=2)[1][1][1] == 1.0
    assert env.conclude(Outcome.CONTEXT_OVERFLOW) == {"correct": 0.0}


@pytest.mark.parametrize("actions", ["tags", "tools"])
def test_a_final_turn_is_for_the_answer(play: Play, actions: str) -> None:
    search: Any = SEARCH if actions == "tags" else call("search", query("poet Velor"))
    config = {"max_turns": 2, "final_turn": True, "actions": actions}
    env, results = play(search, search, search, **config)
    assert env.max_turns == 3
    assert "Velor was a poet" in results[1][0][0]["content"]
    assert results[2][:4] == ([], 0.0, False, True)
    assert results[2][4]["metrics"]["searches"] == 2
    assert results[2][4]["success"] is False
    assert play(search, search, RIGHT, **config)[1][2][1] == 1.0


def test_searching_can_be_refused(play: Play) -> None:
    _, (refused, end) = play(SEARCH, RIGHT, allow_search=False)
    assert "searching is not allowed here" in refused[0][0]["content"]
    assert "poet" not in refused[0][0]["content"]
    assert refused[4]["action_error"]
    assert end[1] == 1.0
    assert end[4]["metrics"]["searches"] == 0


def test_tool_calls(play: Play) -> None:
    env, (search, end) = play(
        call("search", query("poet Velor")),
        {"role": "assistant", "content": "It is <answer>Narn</answer>."},
        actions="tools",
        topk=1,
    )
    text = 'Doc 1(Title: "Velor") Velor was a poet. He was born in Narn and died in Ost.'
    assert search[0] == [{"role": "tool", "tool_call_id": "call_1", "content": text}]
    assert end[1:4] == (1.0, True, False)
    assert env.stop == ()
    assert [tool["function"]["name"] for tool in env.tools] == ["search"]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>Ost</answer> no: <answer>Narn</answer>", 1.0),
        ("<answer>Narn</answer> no: <answer>Ost</answer>", 0.0),
        ("<think><answer>Narn</answer></think> I give up.", 0.0),
        ("Narn", 0.0),
        ("", 0.0),
        (SEARCH, 0.0),
    ],
)
def test_a_message_without_calls_is_final(play: Play, text: str, reward: float) -> None:
    _, (end,) = play(text, actions="tools")
    assert end[1:4] == (reward, True, False)


def test_several_calls_run_in_order_and_one_bad_one_does_not_stop_the_others(play: Play) -> None:
    message = call("search", query("poet"))
    message["tool_calls"] += (
        call("search", "{", "b")["tool_calls"] + call("search", query("harbour"), "c")["tool_calls"]
    )
    _, (result,) = play(message, actions="tools", topk=1)
    assert [m["tool_call_id"] for m in result[0]] == ["call_1", "b", "c"]
    assert "Velor was a poet" in result[0][0]["content"]
    assert "not JSON" in result[0][1]["content"]
    assert "Ost is a harbour" in result[0][2]["content"]
    assert result[4]["action_error"]
    assert result[4]["action_status"] == "ok"
    assert result[4]["metrics"]["searches"] == 2


@pytest.mark.parametrize(
    "bad",
    [
        call("answer", query("Narn")),
        call("search", "Narn"),
        call("search", {"query": 1}),
        {"role": "assistant", "content": "", "tool_calls": ["search"]},
        {"role": "assistant", "content": "<answer>Narn</answer>", "tool_calls": [{"id": "call_1"}]},
        {"role": "assistant", "content": RIGHT, "invalid_tool_calls": [{"text": "{", "error": "not JSON"}]},
    ],
)
def test_malformed_calls_are_told_and_never_answers(play: Play, bad: Message) -> None:
    _, (result,) = play(bad, actions="tools")
    assert result[1:4] == (0.0, False, False)
    assert result[4]["action_status"] == "malformed"
    assert result[0]


def test_a_malformed_call_can_end_the_episode(play: Play) -> None:
    bad = {"role": "assistant", "content": RIGHT, "invalid_tool_calls": [{"text": "{", "error": "not JSON"}]}
    _, (end,) = play(bad, actions="tools", on_malformed="end")
    assert end[1:3] == (0.0, True)
    assert end[4]["success"] is False


@pytest.mark.parametrize("gold", ["", " ", [], ["the", "..."], None, {}])
def test_a_task_without_a_golden_answer_is_unscorable(passages: Path, gold: Any) -> None:
    env = SearchEnv(corpus=str(passages))
    with pytest.raises(UnscorableTask, match="task t: there is no golden answer"):
        env.reset(options={"task": Task("t", "?", gold)})


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)
TAGS = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "</information>", "<|im_end|>"]
SOUP = st.lists(st.sampled_from([*TAGS, "poet", "trap", "Narn", " ", "\0", "\ud800", "é"]), max_size=10).map("".join)
GARBAGE = st.one_of(
    JSON,
    st.text(),
    SOUP,
    st.fixed_dictionaries({"role": st.just("assistant"), "content": JSON, "tool_calls": JSON}),
    st.fixed_dictionaries({"content": st.text(), "text": JSON, "reasoning_content": JSON}),
    st.builds(call, JSON, st.one_of(JSON, SOUP.map(query))),
    st.builds(call, st.just("search"), SOUP.map(query)),
)


@settings(max_examples=100)
@given(actions=st.sampled_from(["tags", "tools"]), garbage=st.lists(GARBAGE, min_size=3, max_size=3))
def test_garbage_is_answered_and_never_raises(passages: Path, actions: Any, garbage: list[Any]) -> None:
    env = SearchEnv(corpus=str(passages), actions=actions, max_turns=3)
    env.reset(seed=0, options={"task": Task("t", "?", GOLD)})
    over, total = False, 0.0
    for action in garbage:
        if over:
            break
        observation, reward, terminated, truncated, info = env.step(action)
        over, total = terminated or truncated, total + reward
        assert all(message["content"].encode() for message in observation)
        assert observation or over
        json.dumps(info)
    assert over
    assert env.reward_range[0] <= total <= env.reward_range[1]


@settings(max_examples=100)
@given(turns=st.lists(SOUP, min_size=3, max_size=3))
def test_the_reward_depends_on_nothing_but_what_the_assistant_wrote(passages: Path, turns: list[str]) -> None:
    """Whatever was searched, documents with answers in them included: told from the turns alone."""
    answers = [action.text for action in map(parse_action, turns) if action is not None and action.name == "answer"]
    expected = float(bool(answers) and is_match(answers[0], GOLD))
    env = SearchEnv(corpus=str(passages), max_turns=3)
    env.reset(seed=0, options={"task": Task("t", "?", GOLD)})
    total, over = 0.0, False
    for turn in turns:
        if not over:
            _, reward, terminated, truncated, _ = env.step(turn)
            total, over = total + reward, terminated or truncated
    assert total == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"actions": "tag"}, "search: actions must be one of tags, tools, not 'tag'"),
        ({"match": "fuzzy"}, "match must be one of exact, substring"),
        ({"instructions": "full"}, "instructions must be one of search-r1, brief, none"),
        ({"observation_format": "r1"}, "observation_format must be one of search-r1, skyrl, brief"),
        ({"max_turns": 0}, "max_turns must be at least 1"),
        ({"topk": 0}, "topk must be at least 1"),
        ({"max_query_chars": 0}, "max_query_chars must be at least 1"),
        ({"max_document_chars": 0}, "max_document_chars must be at least 1"),
        ({"format_score": 1.0}, "format_score must be from 0 to below 1"),
        ({"format_score": -0.1}, "format_score must be from 0 to below 1"),
        ({"retriever": "bm25"}, "unknown retriever 'bm25'; did you mean 'bm25s'"),
        ({"retriever": {"k1": 1}}, "a 'kind' is missing"),
        ({"retriever": {"kind": "bm25s", "k2": 1}}, "unknown field 'k2'"),
        ({"kinds": ["two_hops"]}, "did you mean 'two_hop'"),
        ({"articles": 7}, "articles must be"),
    ],
)
def test_bad_config_is_one_clear_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        SearchEnv(**config)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


ROW = {
    "question": "where was Velor born",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where was Velor born?"}],
    "data_source": "nq",
    "reward_model": {"ground_truth": {"target": GOLD}},
}


def test_an_episode_over_rows_of_a_data_set(tmp_path: Path, passages: Path) -> None:
    path = tmp_path / "rows.json"
    bare = {name: value for name, value in ROW.items() if name != "prompt"}
    path.write_text(json.dumps([ROW, bare, {**bare, "reward_model": {"ground_truth": {"target": []}}}]))
    config: dict[str, Any] = {"corpus": str(passages), "dataset": str(path), "test_dataset": str(path)}
    env = SearchEnv(**config)
    assert env.splits == ("train", "test")
    with pytest.raises(UserError, match="there is no split 'validation'; known: train, test"):
        env.tasks("validation")
    own, asked, empty = env.tasks("train")
    messages, _ = env.reset(seed=0, options={"task": own})
    assert messages == ROW["prompt"]
    env.step(SEARCH)
    *_, info = env.step(RIGHT)
    assert info["success"]
    assert "gold_retrieved" not in info["metrics"]
    messages, _ = env.reset(seed=0, options={"task": asked})
    assert messages[0]["content"].endswith("Question: where was Velor born?\n")
    with pytest.raises(UnscorableTask):
        env.reset(seed=0, options={"task": empty})
    with pytest.raises(UserError, match="only generated questions have a plan"):
        env.expert(own)
    by_call = SearchEnv(actions="tools", **config)
    messages, _ = by_call.reset(seed=0, options={"task": own})
    assert messages[0] == ROW["prompt"][0]
    assert messages[1]["content"].startswith("Where was Velor born?\n")
    assert "calling the tool `search`" in messages[1]["content"]
    assert own.data["messages"] == ROW["prompt"]


def test_what_is_missing_shows_before_the_first_episode(tmp_path: Path, passages: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROW]))
    with pytest.raises(UserError, match="a data set needs `corpus`"):
        SearchEnv(dataset=str(path)).tasks("train")
    with pytest.raises(UserError, match="there is no corpus at"):
        SearchEnv(corpus=str(tmp_path / "gone.jsonl")).tasks("train")
    with pytest.raises(UserError, match=r"there is no data set .*gone\.json"):
        SearchEnv(corpus=str(passages), dataset=str(tmp_path / "gone.json")).tasks("train")
    assert len(SearchEnv(dataset=str(path), allow_search=False).tasks("train")) == 1
    elsewhere = {"kind": "http", "url": "http://127.0.0.1:9"}  # it has the corpus
    assert len(SearchEnv(dataset=str(path), retriever=elsewhere).tasks("train")) == 1
