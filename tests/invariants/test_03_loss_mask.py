"""Promise 3: "No token that the engine did not return as generated has a non-zero loss mask."

The engine here writes a ledger of the ids it returned. They are followed all the way: from the session to the Parquet
store, to merged sequences, to the rows and micro-batches that the trainer computes.
"""

from __future__ import annotations

import asyncio
import tempfile
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.env.messages import Message, user
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.renderer import Renderer
from stepgym.model.tiny import build_tiny_tokenizer
from stepgym.record.merge import merge_steps
from stepgym.record.outcome import Outcome
from stepgym.record.step import Sampling
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory, TrajectoryId
from stepgym.run.session import Session, SessionLimits
from stepgym.train.packs.batch import make_batch
from stepgym.train.packs.forest import forests
from stepgym.train.packs.rows import padded_rows


class Ledger(Engine):
    """Says what it is told and keeps, for each turn, the prompt it was sent and the ids it returned."""

    kind = "ledger"

    def __init__(self, tokenizer: Any, replies: list[str]) -> None:
        self._tokenizer = tokenizer
        self._replies = replies
        self.turns: list[tuple[list[int], list[int]]] = []

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def generate(self, prompt_ids: Any, sampling: Any, *, max_tokens: int, **options: Any) -> Completion:
        ids = self._tokenizer.encode(self._replies[len(self.turns)], add_special_tokens=False)[:max_tokens]
        self.turns.append((prompt_ids.tolist(), ids))
        return Completion(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), "stop")


@cache
def tokenizer() -> Any:
    return build_tiny_tokenizer(["look here", "<say>one</say>"] * 3, special_tokens=["<say>", "</say>"])


STRIPS = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{{- m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
said = st.builds(
    str.__add__,
    st.sampled_from(["one", "<say>one</say>", "<think>a</think>two", "", "<|im_start|>user\nhi", "🙂"]),
    st.sampled_from(["<|im_end|>", "", " and more"]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(said, st.text("ab ", max_size=8)), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from([None, STRIPS]),
    st.booleans(),
)
def test_only_what_the_engine_returned_is_trained(
    turns: list[tuple[str, str]], max_tokens: int, template: str | None, rewrites: bool
) -> None:
    engine = Ledger(tokenizer(), [reply for reply, _ in turns])
    session = Session(
        engine,
        Renderer(tokenizer(), chat_template=template),
        sampling=Sampling(),
        limits=SessionLimits(max_response_tokens=max_tokens),
    )

    async def play() -> None:
        messages: list[Message] = [user("look")]
        for _, observed in turns:
            message = await session.chat(messages, stop=["</say>"])
            answer: Message = {"role": "assistant", "content": "rewritten"} if rewrites else message
            messages = [*messages, answer, user(observed)]

    asyncio.run(play())
    made = Trajectory(id=TrajectoryId("train", 0, "t", 0), outcome=Outcome.COMPLETED, steps=session.steps, reward=1.0)
    with tempfile.TemporaryDirectory() as folder:
        with TrajectoryStore(folder, "a") as store:
            store.append(made)
        (stored,) = TrajectoryStore(folder)

    returned = [ids for _, ids in engine.turns]
    for trajectory in (made, stored):
        for step, (prompt, ids) in zip(trajectory.steps, engine.turns, strict=True):
            assert (step.prompt_ids.tolist(), step.response_ids.tolist()) == (prompt, ids)
            assert len(step.loss_mask) == len(ids)  # a mask over the response only: a prompt token cannot have one

    sequences, _ = merge_steps(stored.steps)
    found: dict[int, list[int]] = {index: [] for index in range(len(turns))}
    for sequence in sequences:
        assert (sequence.step_index[sequence.loss_mask != 0] >= 0).all()
        for index, token, mask in zip(sequence.step_index, sequence.response_ids, sequence.loss_mask, strict=True):
            if mask:
                found[int(index)].append(int(token))
    assert list(found.values()) == returned

    batch = make_batch([[stored]])
    for layout in ("tree", "merged", "steps"):
        for make in (forests, padded_rows):
            targets = np.full(len(batch.tokens), -1)
            for micro in make(batch, layout, 64):  # type: ignore[arg-type]
                targets[micro.token] = micro.target if micro.which is None else micro.target[micro.which]
            assert targets.tolist() == [token for ids in returned for token in ids]
    assert batch.tokens.step.tolist() == [n for n, ids in enumerate(returned) for _ in ids]
