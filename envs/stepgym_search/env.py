"""The search environment: an agent answers questions by searching a corpus, several times if need be."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from stepgym.env.base import ActResult, Env
from stepgym.env.messages import Message, call_id, tool_result, user
from stepgym.env.task import Task
from stepgym.errors import ActionError, UnscorableTask, UserError
from stepgym.record.outcome import Outcome
from stepgym_search import actions as acting
from stepgym_search import expert, observation, prompt
from stepgym_search.actions import Actions
from stepgym_search.encyclopedia import SPLITS, EncyclopediaConfig
from stepgym_search.encyclopedia.config import Wording
from stepgym_search.encyclopedia.names import NameStyle
from stepgym_search.observation import ObservationFormat
from stepgym_search.prompt import Instructions
from stepgym_search.retrievers import check_retriever
from stepgym_search.scoring import Match, golden_texts, is_match
from stepgym_search.shared import SearchShared


class SearchEnv(Env):
    """Answer a question: search as often as needed, read what is found, give the answer.

    The protocol is Search-R1's: `<think>…</think>`, then `<search>…</search>` or `<answer>…</answer>`; what a search
    finds comes back between `<information>` tags. The reward comes at the end: 1 where the answer is one of the golden
    ones, 0 where it is not or there is none. Only what the assistant itself wrote is scored: an `<answer>` in a
    document or in the prompt counts for nothing.

    Questions are about a generated encyclopedia (seeded, offline, nothing that a model could know), or the rows of a
    data set with a corpus or a retrieval server.

    Args:
        actions: `tags` in the text, or the tool `search`; then a message without calls is final and its last
            `<answer>` counts.
        topk: Documents that a search shows.
        max_turns: Turns of an episode. The last one is for the answer: a search in it is not made any more.
        final_turn: Whether one more turn follows, for the answer only, as Search-R1 was published. Without, `max_turns`
            includes it.
        allow_search: Whether searches are made at all; without, they are refused. Shows what searching is worth.
        on_malformed: Whether a tool call that does not parse costs a turn (`observe`) or ends the episode (`end`).
        max_query_chars: Characters of the longest query that is searched for.
        max_document_chars: Characters of a document that are shown.
        match: `exact`, or `substring`: a golden answer stands somewhere in the answer.
        format_score: Reward of a wrong answer that is given in its tags; 0 or more, less than 1.
        instructions: How much the first message explains: `search-r1` is the published prompt, `brief` one line, `none`
            the question alone. Rows of data sets that bring their own messages keep them.
        observation_format: `search-r1` and `skyrl` are the published wordings, `brief` has the same tags and fewer
            words.
        retriever: What searches: `bm25s`, `pyserini`, `dense`, `http`, or a mapping with the name as `kind` and its
            fields.
        corpus: What is searched, a file of JSON lines, `{"id", "contents"}`; None for the generated encyclopedia.
        dataset: Rows to train on: a file, a folder or a name on the hub; None for generated questions.
        validation_dataset: The same for the validation split.
        test_dataset: The same for the test split.
        seed: Of the generated encyclopedia.
        articles: How many it has, from 200 to a million; a multiple of 20.
        kinds: Kinds of questions, out of one_hop, two_hop, three_hop, date, comparison, unanswerable; None for all.
        wording: Whether articles and questions say a thing in one way only (`plain`) or in several (`varied`).
        names: `full`, of two words or more, or `short`, of one.
        distractors: From 0, an article states at most one thing of a kind, to 3; see `EncyclopediaConfig`.
        aliases: Whether about half of the entities have another name.
        sentences: Sentences in each article.
        gaps: Whether some articles leave out a fact; unanswerable questions need it.
        relations: What articles state; None for all.
        asked: What questions ask for; None for all that is stated.

    Raises:
        UserError: A value is out of range, or a name does not exist.
    """

    splits: tuple[str, ...] = SPLITS
    success_threshold = 1.0

    def __init__(
        self,
        *,
        actions: Actions = "tags",
        topk: int = 3,
        max_turns: int = 4,
        final_turn: bool = False,
        allow_search: bool = True,
        on_malformed: Literal["observe", "end"] = "observe",
        max_query_chars: int = 2000,
        max_document_chars: int = 8000,
        match: Match = "exact",
        format_score: float = 0.0,
        instructions: Instructions = "search-r1",
        observation_format: ObservationFormat = "search-r1",
        retriever: str | dict[str, Any] = "bm25s",
        corpus: str | None = None,
        dataset: str | None = None,
        validation_dataset: str | None = None,
        test_dataset: str | None = None,
        seed: int = 0,
        articles: int = 2000,
        kinds: list[str] | None = None,
        wording: Wording = "varied",
        names: NameStyle = "full",
        distractors: int = 1,
        aliases: bool = True,
        sentences: int = 4,
        gaps: bool = True,
        relations: list[str] | None = None,
        asked: list[str] | None = None,
    ) -> None:
        for name, value, choices in (
            ("actions", actions, get_args(Actions)),
            ("on_malformed", on_malformed, ("observe", "end")),
            ("match", match, get_args(Match)),
            ("instructions", instructions, get_args(Instructions)),
            ("observation_format", observation_format, get_args(ObservationFormat)),
        ):
            if value not in choices:
                raise UserError(f"search: {name} must be one of {', '.join(choices)}, not {value!r}")
        for name, number in (
            ("topk", topk),
            ("max_turns", max_turns),
            ("max_query_chars", max_query_chars),
            ("max_document_chars", max_document_chars),
        ):
            if number < 1:
                raise UserError(f"search: {name} must be at least 1, not {number}")
        if not 0.0 <= format_score < 1.0:
            raise UserError(f"search: format_score must be from 0 to below 1, not {format_score}")
        self.actions: Actions = actions
        self.topk = topk
        self.max_turns = max_turns + final_turn
        self.allow_search = allow_search
        self.on_malformed = on_malformed
        self.max_query_chars = max_query_chars
        self.max_document_chars = max_document_chars
        self.match: Match = match
        self.format_score = format_score
        self.instructions: Instructions = instructions
        self.observation_format: ObservationFormat = observation_format
        self.tools = [acting.search_tool()] if actions == "tools" else ()
        self.stop = acting.STOP if actions == "tags" else ()
        self.splits = tuple(_datasets(dataset, validation_dataset, test_dataset)) or SPLITS
        _encyclopedia(self.config)  # what is wrong with the options shows here, not in the first episode
        _check_retriever(json.dumps(retriever, sort_keys=True, default=str))
        self._begin_counting()

    @classmethod
    def open_shared(cls, **config: Any) -> SearchShared:
        """The corpus, its index and the tables of tasks of one configuration. Raises `UserError`."""
        return SearchShared(
            retriever=config["retriever"] if config["allow_search"] else None,
            corpus=config["corpus"],
            encyclopedia=_encyclopedia(config),
            datasets=_datasets(config["dataset"], config["validation_dataset"], config["test_dataset"]),
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split; generated ones are made when they are asked for. Raises `UserError`."""
        shared: SearchShared = self.shared
        return shared.tasks(split)

    def begin(self, task: Task) -> list[Message]:
        """The instructions and the question. Raises `UnscorableTask` where there is no golden answer."""
        self._begin_counting()
        self._golden = golden_texts(task.answer)
        if not self._golden:
            raise UnscorableTask(f"task {task.id}: there is no golden answer that an answer could match")
        shared: SearchShared = self.shared
        self._shared = shared
        if "messages" in task.data:
            messages = [dict(message) for message in task.data["messages"]]
            if self.actions == "tools":
                last = max(index for index, message in enumerate(messages) if message["role"] == "user")
                messages[last]["content"] += prompt.TOOLS_REMARK
            return messages
        return [user(prompt.build_prompt(task.prompt, instructions=self.instructions, actions=self.actions))]

    async def act(self, message: Message) -> ActResult:
        """Search, or score the answer."""
        if self.actions == "tools":
            return await self._act_on_calls(message)
        action = acting.parse_action(acting.written_text(message))
        if action is None:
            raise ActionError(observation.INVALID_ACTION, status="no_action")
        if action.name == "answer":
            return self._finish(action.text)
        if self.turns_left == 0:
            return self._last_search()
        found = await self._search(action.text)
        return [user(observation.wrap(found, self.observation_format))], 0.0, False, False, self._info()

    def conclude(self, outcome: Outcome) -> dict[str, float]:
        """The reward of an episode without an answer: 0."""
        return self._parts(answered=False, correct=False)

    def expert(self, task: Task, **options: Any) -> Iterator[Message | str]:
        """Scripted turns that solve a generated task: see `expert.play` for `mistakes` and `decisions`."""
        unknown = sorted(set(options) - {"mistakes", "decisions"})
        if unknown:
            raise UserError(f"search: expert: unknown option {unknown[0]!r}; known: decisions, mistakes")
        return expert.play(self, task, **options)

    def error_observation(self, message: Message, error: ActionError) -> list[Message]:
        """The error where the agent expects an answer: a result of each call, or a message as the protocol has it."""
        calls = message.get("tool_calls") or ()
        if self.actions == "tools":
            return [tool_result(str(error), call_id(call, i)) for i, call in enumerate(calls)] or [user(str(error))]
        if error.status != "ok":
            return [user(observation.invalid_action(self.observation_format))]
        text = observation.error_text(str(error), self.observation_format)
        return [user(observation.wrap(text, self.observation_format))]

    async def _act_on_calls(self, message: Message) -> ActResult:
        calls = message.get("tool_calls")
        if not calls:
            return self._finish(acting.last_answer(acting.written_text(message)))
        if self.turns_left == 0:
            return self._last_search()
        results: list[Message] = []
        errors: list[ActionError] = []
        for index, call in enumerate(calls):
            try:
                text = await self._search(acting.parse_call(call)) or observation.NOTHING_FOUND
            except ActionError as error:
                errors.append(error)
                text = str(error)
            results.append(tool_result(text, call_id(call, index)))
        info = self._info()
        if errors:
            malformed = sum(error.status == "malformed" for error in errors)
            info["action_error"] = "; ".join(map(str, errors))
            info["action_status"] = "malformed" if malformed == len(results) else "ok"
        return results, 0.0, False, False, info

    async def _search(self, query: str) -> str:
        """What a search finds, as text. Raises `ActionError` for a query that is not searched for."""
        if not self.allow_search:
            raise ActionError(observation.SEARCH_REFUSED)
        if not query:
            raise ActionError(observation.EMPTY_QUERY)
        if len(query) > self.max_query_chars:
            raise ActionError(f"the query has {len(query)} characters, and may have {self.max_query_chars}")
        started = time.perf_counter()
        try:
            documents = await self._shared.search(query, self.topk)
        finally:
            self._seconds += time.perf_counter() - started
        self._searches += 1
        self._empty += not documents
        self._documents += len(documents)
        self._found.update(document.id for document in documents)
        return observation.documents_text(documents, self.observation_format, self.max_document_chars)

    def _last_search(self) -> ActResult:
        """A search in the last turn: nobody would see what it finds, so it is not made."""
        return [], 0.0, False, False, self._info()

    def _finish(self, answer: str | None) -> ActResult:
        correct = answer is not None and is_match(answer, self._golden, self.match)
        parts = self._parts(answered=bool(answer), correct=correct)
        info = {"success": correct, "reward_parts": parts, **self._info()}
        return [], sum(parts.values()), True, False, info

    def _parts(self, *, answered: bool, correct: bool) -> dict[str, float]:
        parts = {"correct": float(correct)}
        if self.format_score:
            parts["format"] = self.format_score if answered and not correct else 0.0
        return parts

    def _begin_counting(self) -> None:
        self._searches = self._empty = self._documents = 0
        self._seconds = 0.0
        self._found: set[str] = set()

    def _info(self) -> dict[str, Any]:
        metrics = {
            "searches": float(self._searches),
            "empty_results": float(self._empty),
            "documents": float(self._documents),
            "retrieval_s": self._seconds,
        }
        proof = self.task.data.get("articles")
        if proof:
            metrics["gold_retrieved"] = len(self._found.intersection(proof)) / len(set(proof))
        return {"metrics": metrics}


def _datasets(train: str | None, validation: str | None, test: str | None) -> dict[str, str]:
    """The splits that come from data sets; empty where questions are generated."""
    given = {"train": train, "validation": validation, "test": test}
    return {split: source for split, source in given.items() if source is not None}


def _encyclopedia(config: Mapping[str, Any]) -> EncyclopediaConfig:
    """The options of the generated encyclopedia. Raises `UserError` for one that is wrong."""
    chosen = {name: config[name] for name in EncyclopediaConfig.__dataclass_fields__}
    return _checked_encyclopedia(json.dumps(chosen, sort_keys=True, default=str))


# An environment is made for every episode, so what a config means is found out once.


@lru_cache(maxsize=64)
def _checked_encyclopedia(config: str) -> EncyclopediaConfig:
    return EncyclopediaConfig(**json.loads(config))


@lru_cache(maxsize=64)
def _check_retriever(config: str) -> None:
    check_retriever(json.loads(config))
