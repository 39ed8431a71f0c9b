from __future__ import annotations

import asyncio

import numpy as np
import pytest

from stepgym.errors import EngineError
from stepgym.model.engines import ENGINES
from stepgym.model.engines.scripted import ScriptedEngine
from stepgym.record.step import Sampling

PROMPT = np.array([1, 2, 3], dtype=np.int32)


def encode(message):
    text = message if isinstance(message, str) else message["content"]
    return [ord(letter) for letter in text]


def test_the_script_is_said_one_message_a_call_and_read_no_further():
    said = []

    def script():
        for text in ("ab", {"role": "assistant", "content": "cde"}):
            said.append(text)
            yield text

    async def main():
        engine = ScriptedEngine(script(), encode=encode)
        first = await engine.generate(PROMPT, Sampling(), max_tokens=9)
        assert said == ["ab"]
        second = await engine.generate(PROMPT, Sampling(), max_tokens=2)
        with pytest.raises(EngineError, match="the script has no more messages"):
            await engine.generate(PROMPT, Sampling(), max_tokens=9)
        return engine, first, second

    engine, first, second = asyncio.run(main())
    assert engine.sampler == "scripted"
    assert (first.response_ids.tolist(), first.logprobs, first.finish_reason) == ([97, 98], None, "stop")
    assert first.response_ids.dtype == np.int32
    assert (second.response_ids.tolist(), second.finish_reason) == ([99, 100], "length")


def test_engines_are_found_by_their_kind():
    for kind in ("openai", "chat", "transformers", "scripted"):
        assert ENGINES.get(kind).kind == kind
