"""The instructions that stand before a question."""

from __future__ import annotations

from typing import Literal, TypeAlias

from stepgym_search.actions import Actions

Instructions: TypeAlias = Literal["search-r1", "brief", "none"]

# To the letter, "as your want" included: models were trained on it.
_SEARCH_R1 = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)
_TOOLS = (
    "Answer the given question. Think first, and again every time you get new information. If you lack some knowledge, "
    "call `search` with a query: it shows you the documents that fit best, and you can search as many times as you "
    "want. When you need no further knowledge, give the answer between <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)
_BRIEF = {
    "tags": "<think></think> then <search>query</search> or <answer>answer</answer>",
    "tools": "Call search, or write <answer>answer</answer>",
}

TOOLS_REMARK = (
    "\n\nIn this run you search by calling the tool `search` instead of writing tags. The answer still stands between "
    "<answer> and </answer>."
)


def build_prompt(question: str, *, instructions: Instructions, actions: Actions) -> str:
    """The first user message.

    Args:
        question: In plain words.
        instructions: `search-r1` is the published prompt (with tool calls, the same in other words), `brief` has one
            line, `none` is the question alone.
        actions: Whether the agent searches with tags or with tool calls.
    """
    if instructions == "search-r1":
        return (_SEARCH_R1 if actions == "tags" else _TOOLS).replace("{question}", question)
    return question if instructions == "none" else f"{question}\n{_BRIEF[actions]}"
