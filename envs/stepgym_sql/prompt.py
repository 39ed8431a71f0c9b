"""The instructions that stand before a question."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

Instructions: TypeAlias = Literal["full", "brief", "none"]
Actions: TypeAlias = Literal["tags", "tools"]

_FULL = """\
You are an expert in databases. Answer the question below with one SQLite query. You may look at the database first: \
you have at most {max_turns} turns, and every query takes one of them.

{schema}Question:
{question}

In each turn, {how}

Rules:
- The database is read-only: write SELECT statements, one at a time.
- The rows of your final query are compared with the right answer: return the columns that are asked for, in the \
order in which they are asked for, and no others.
- Names and values may be spelled otherwise than in the question: look before you answer."""

_TAGS = """\
first think between <think> and </think>. Then do one of two things:
- look at the database: <sql>a query</sql>. You get the result between <observation> and </observation>.
- finish: <solution>the final query</solution>. Write exactly one, and no other tags inside it."""

_TOOLS = """\
think, then call one of the tools: `sql` shows you the result of a query, `solution` hands in the final query."""

_SCHEMA = "Database schema:\n{schema}\n\n"

_BRIEF = {
    "tags": "<think></think> then <sql>look</sql> or <solution>answer</solution>",
    "tools": "SQLite. Call sql to look, solution to answer.",
}

TOOLS_REMARK = (
    "\n\nIn this run you act by calling tools instead of writing tags: `sql` shows you the result of a query, "
    "`solution` hands in the final query."
)


def build_prompt(
    question: str, *, instructions: Instructions, actions: Actions, max_turns: int, schema: str | None
) -> str:
    """The first user message.

    Args:
        question: In plain words.
        instructions: `full` explains the protocol, `brief` has one line, `none` is the question alone.
        actions: Whether the agent writes tags or calls tools.
        max_turns: Turns of the episode.
        schema: CREATE statements to show, or None where the agent has to look for them.
    """
    shown = _SCHEMA.format(schema=schema) if schema is not None else ""
    if instructions == "full":
        how = _TAGS if actions == "tags" else _TOOLS
        return _FULL.format(max_turns=max_turns, schema=shown, question=question, how=how)
    lines = [schema or "", question]
    if instructions == "brief":
        lines.append(_BRIEF[actions])
    return "\n".join(line for line in lines if line)


def tool_schemas() -> list[dict[str, Any]]:
    """The tools `sql` and `solution` as JSON schemas in the OpenAI format."""
    return [
        _tool("sql", "Run one read-only SQLite query and see its result.", "The query to run."),
        _tool("solution", "Hand in the final SQLite query; this ends the episode.", "The final query."),
    ]


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": argument}},
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
