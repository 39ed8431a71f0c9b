"""What a recipe names is made as it says: model, tokenizer, renderer, agent, engine; each from the seed alone."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgym.env.base import Env
from stepgym.env.task import Task
from stepgym.errors import UserError
from stepgym.model.engines.chat import OpenAIChatEngine
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.model.tiny import build_tiny_tokenizer
from stepgym.run.agent import ChatAgent
from stepgym.run.env_source import EnvSource
from stepgym.train.recipe import Recipe, RendererConfig, check_recipe
from stepgym.train.setup import (
    expert_texts,
    load_model,
    make_agent,
    make_engine,
    make_renderer,
    renderer_for,
    set_threads,
)

MODEL = {
    "kind": "tiny",
    "vocab_size": 300,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context_length": 64,
    "corpus_tasks": 8,
}


class Parrots(Env):
    """Says what was said; its expert says the word, with one mistake before it where asked."""

    broken: Sequence[str] = ()

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=str(n), prompt=f"word{n}", answer=f"word{n}") for n in range(20)]

    def act(self, message: Any) -> Any:
        if self.task.id in self.broken:
            raise RuntimeError("moulting")
        right = message["text"] == self.task.answer
        return "squawk" if not right else [], float(right), right, False, {}

    def expert(self, task: Task, *, mistakes: float = 0.0) -> Iterator[str]:
        if mistakes:
            yield "oops"
        yield task.answer


def recipe(**changes: Any) -> Recipe:
    return check_recipe({"env": {"kind": "sql"}, "model": MODEL, **changes}, Path("x.yaml"))


def test_a_tiny_model_comes_from_the_seed_and_the_experts_words() -> None:
    source = EnvSource.of(Parrots)
    model, tokenizer = asyncio.run(load_model(recipe(), source))
    again, _ = asyncio.run(load_model(recipe(), source))
    other, _ = asyncio.run(load_model(recipe(seed=1), source))
    weights = [torch.cat([p.detach().flatten() for p in each.parameters()]) for each in (model, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert len(tokenizer.encode("word")) == 1  # the expert says it, so it is one token
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (16, 1)


def test_the_corpus_is_what_the_expert_and_the_environment_say() -> None:
    source, tasks = EnvSource.of(Parrots), Parrots().tasks("train")[:2]
    assert asyncio.run(expert_texts(source, tasks, {}, seed=0)) == ["word0", "word0", "word1", "word1"]
    texts = asyncio.run(expert_texts(source, tasks[:1], {"mistakes": 1.0}, seed=0))
    assert texts == ["word0", "oops", "squawk", "word0"]


def test_failing_episodes_leave_the_corpus_to_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, tasks = EnvSource.of(Parrots), Parrots().tasks("train")[:3]
    monkeypatch.setattr(Parrots, "broken", ("1",))
    with caplog.at_level(logging.WARNING):
        texts = asyncio.run(expert_texts(source, tasks, {}, seed=0))
    assert texts.count("word2") == 2
    assert "failed on 1 of 3 tasks; the first: task '1': RuntimeError: moulting" in caplog.text


def test_an_environment_without_an_expert_cannot_have_a_tiny_model() -> None:
    class Mute(Parrots):
        def expert(self, task: Task, **options: Any) -> Any:
            return super(Parrots, self).expert(task)

    with pytest.raises(UserError, match="has no expert"):
        asyncio.run(load_model(recipe(), EnvSource.of(Mute)))

    class Nailed(Parrots):
        def begin(self, task: Task) -> Any:
            raise RuntimeError("nailed shut")

    with pytest.raises(UserError, match="fails on every task; the first: task '0': RuntimeError: nailed shut"):
        asyncio.run(load_model(recipe(), EnvSource.of(Nailed)))


def test_a_model_that_is_not_there() -> None:
    missing = recipe(model={"kind": "pretrained", "path": "/no/model"})
    with pytest.raises(UserError, match=r"model\.path: there is no folder /no/model"):
        asyncio.run(load_model(missing, EnvSource.of(Parrots)))


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    empty = recipe(model={"kind": "pretrained", "path": str(tmp_path)})
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        asyncio.run(load_model(empty, EnvSource.of(Parrots)))
    assert "\n" not in str(caught.value)


def test_a_renderer_with_a_template_of_its_own(tmp_path: Path) -> None:
    tokenizer = build_tiny_tokenizer(["x y"] * 3)
    template = tmp_path / "t.jinja"
    template.write_text(
        "{{- strftime_now('%Y') + mark }}{%- for m in messages %}{{- m.content + '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'Go:' }}{%- endif %}"
    )
    config = RendererConfig(
        chat_template=str(template), chat_template_kwargs={"mark": "!"}, template_date=date(2001, 2, 3)
    )
    assert make_renderer(config, tokenizer).prompt([{"role": "user", "content": "hi"}]).text == "2001!hi<|im_end|>Go:"
    with pytest.raises(UserError, match=r"renderer.chat_template: .*No such file"):
        make_renderer(RendererConfig(chat_template=str(tmp_path / "none")), tokenizer)


def test_who_renders_and_what_becomes_of_history() -> None:
    tokenizer = build_tiny_tokenizer(["x y"] * 3)
    plain = make_renderer(RendererConfig(), tokenizer)
    assert (plain.kind, plain.history) == ("template", "template")
    chosen = make_renderer(RendererConfig(kind="qwen3", history="append"), tokenizer)
    assert (chosen.kind, chosen.history) == ("qwen3", "append")
    with pytest.raises(UserError, match=r"renderer.kind: 'qwen' is not known"):
        make_renderer(RendererConfig(kind="qwen"), tokenizer)


def test_engines_and_agents() -> None:
    assert isinstance(make_agent(recipe()), ChatAgent)
    engine = asyncio.run(make_engine(recipe(), EnvSource.of(Parrots)))
    assert isinstance(engine, TransformersEngine)
    asyncio.run(engine.open())
    assert engine.context_length == 64
    asyncio.run(engine.close())
    pretrained = {"kind": "pretrained", "path": "name"}
    chat = recipe(model=pretrained, engine={"kind": "chat", "base_url": "http://127.0.0.1:9/v1"})
    made = asyncio.run(make_engine(chat, EnvSource.of(Parrots)))
    assert isinstance(made, OpenAIChatEngine)
    assert made.model == "name"


def test_a_tiny_model_is_given_to_servers_in_a_folder_that_goes_with_the_engine() -> None:
    plan = recipe(engine={"kind": "vllm", "context_length": 64})
    engine: Any = asyncio.run(make_engine(plan, EnvSource.of(Parrots)))
    folder = Path(engine._served)
    served, _ = load_model_folder(folder)
    model, _ = asyncio.run(load_model(plan, EnvSource.of(Parrots)))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in served.state_dict().items())
    assert (engine.model, engine._server_fields["dtype"]) == ("tiny", "float32")
    del engine
    gc.collect()
    assert not folder.exists()
    other: Any = asyncio.run(make_engine(recipe(engine={"kind": "vllm", "model": "name"}), EnvSource.of(Parrots)))
    assert (other._served, other._server_fields["dtype"]) == ("name", "auto")


def load_model_folder(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_threads_are_those_of_the_recipe() -> None:
    set_threads(recipe(threads=1))
    assert torch.get_num_threads() == 1


def test_an_engine_that_speaks_only_chat_has_no_renderer_and_cannot_go_on_from_ids() -> None:
    hosted = OpenAIChatEngine(base_url="http://127.0.0.1:1/v1", model="m")
    assert renderer_for(RendererConfig(), hosted) is None
    for config in (RendererConfig(turns="continue"), RendererConfig(history="append")):
        with pytest.raises(UserError, match="needs an engine that takes token ids"):
            renderer_for(config, hosted)


def test_a_renderer_has_the_turns_of_its_config() -> None:
    config = RendererConfig(turns="continue", max_observation_tokens=7)
    made = make_renderer(config, build_tiny_tokenizer(["word"]))
    assert (made.turns, made.max_observation_tokens) == ("continue", 7)
