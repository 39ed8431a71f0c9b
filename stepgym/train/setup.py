"""From a recipe to the things that a run works with: environments, model, renderer, engine."""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgym.config import validate_kwargs
from stepgym.env.base import Env
from stepgym.env.messages import Message
from stepgym.env.task import Task
from stepgym.env.worker import run_blocking, threads
from stepgym.errors import UserError
from stepgym.model.engines import ENGINES
from stepgym.model.engines.base import ChatEngine, Engine
from stepgym.model.open_turn import refuse_for_chat
from stepgym.model.progress_bars import quiet_transformers
from stepgym.model.renderer import Renderer
from stepgym.run import AGENTS
from stepgym.run.agent import Agent
from stepgym.run.env_source import EnvSource
from stepgym.run.evaluation import split_tasks
from stepgym.seeds import derive_seed
from stepgym.train.recipe import Recipe, RendererConfig, TinyModel, engine_fields

if TYPE_CHECKING:
    from stepgym.train.parallel.processes import Processes

logger = logging.getLogger(__name__)


def env_source(recipe: Recipe) -> EnvSource:
    """Where the recipe's environments come from."""
    return EnvSource.of(recipe.env_kind, **recipe.env_config)


def make_agent(recipe: Recipe) -> Agent:
    """The recipe's agent."""
    fields = {name: value for name, value in recipe.agent.items() if name != "kind"}
    cls: Any = AGENTS.get(recipe.agent["kind"])
    agent: Agent = cls(**validate_kwargs(cls, fields, "agent"))
    return agent


def make_renderer(config: RendererConfig, tokenizer: Any) -> Renderer:
    """The renderer for a tokenizer. Raises `UserError` for a template file that is missing or does not work."""
    source = None
    if config.chat_template is not None:
        try:
            source = Path(config.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"renderer.chat_template: {config.chat_template}: {error.strerror}") from None
    return Renderer(
        tokenizer,
        chat_template=source,
        chat_template_kwargs=config.chat_template_kwargs,
        today=config.template_date,
        kind=config.kind,
        history=config.history,
        turns=config.turns,
        max_observation_tokens=config.max_observation_tokens,
    )


def renderer_for(config: RendererConfig, engine: Engine | ChatEngine) -> Renderer | None:
    """The renderer for an engine; None for one that speaks only chat, which has no use for it.

    Raises `UserError` as `make_renderer`, and for settings that such an engine cannot follow.
    """
    if isinstance(engine, Engine):
        return make_renderer(config, engine.tokenizer)
    refuse_for_chat(config.turns, config.history)
    return None


async def make_engine(recipe: Recipe, source: EnvSource) -> Engine | ChatEngine:
    """The recipe's engine, not yet open, for runs that do not train.

    A tiny model is built here. The engine `transformers` runs it in this process; `vllm` is given a temporary folder
    with it, which goes when the engine does.
    """
    fields = engine_fields(recipe)
    cls: Any = ENGINES.get(recipe.engine["kind"])
    engine: Engine | ChatEngine
    tiny = isinstance(recipe.model, TinyModel)
    if tiny and recipe.engine["kind"] == "transformers":
        model, tokenizer = await load_model(recipe, source)
        engine = cls.wrap(model, tokenizer, name=fields.pop("model"), **fields)
    elif tiny and recipe.engine["kind"] == "vllm" and "model" not in recipe.engine:
        from stepgym.model.tiny import save_tiny_model

        model, tokenizer = await load_model(recipe, source)
        folder = tempfile.TemporaryDirectory(prefix="stepgym-model-")
        fields["model"] = str(save_tiny_model(folder.name, model, tokenizer))
        fields.setdefault("dtype", "float32")  # vLLM's own choice for float32 weights is a narrower type
        engine = cls(**fields)
        engine.model = "tiny"  # in records, in place of a folder that will be gone
        weakref.finalize(engine, folder.cleanup)
    else:
        engine = cls(**fields)
    return engine


def set_threads(recipe: Recipe, share: int = 1) -> None:
    """Let torch use the recipe's threads on the CPU; by default as many as there are, divided by `share` processes."""
    import torch

    torch.set_num_threads(recipe.threads or max(1, len(os.sched_getaffinity(0)) // share))


async def load_model(recipe: Recipe, source: EnvSource) -> tuple[Any, Any]:
    """`(model, tokenizer)` of the recipe. Raises `UserError` for a model that cannot be loaded."""
    if isinstance(recipe.model, TinyModel):
        return await _build_tiny(recipe, recipe.model, source)
    return _load_pretrained(recipe.model.path)


def load_model_everywhere(recipe: Recipe, source: EnvSource, processes: Processes) -> tuple[Any, Any]:
    """`(model, tokenizer)` on every rank; see `load_model`. A tiny model is built on rank 0, which plays for it."""
    if processes.size == 1 or isinstance(recipe.model, TinyModel):
        return processes.lead(lambda: run_blocking(load_model(recipe, source)))
    return _load_pretrained(recipe.model.path)


async def _build_tiny(recipe: Recipe, config: TinyModel, source: EnvSource) -> tuple[Any, Any]:
    from stepgym.model.tiny import build_tiny_model

    tasks = await split_tasks(source, "train", config.corpus_tasks)
    options = recipe.warm_start[-1].expert if recipe.warm_start else {}
    corpus = await expert_texts(source, tasks, options, seed=recipe.seed)
    return build_tiny_model(
        corpus,
        seed=derive_seed(recipe.seed, "weights"),
        vocab_size=config.vocab_size,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        feed_forward_width=config.feed_forward_width,
        initializer_range=config.initializer_range,
        special_tokens=config.special_tokens,
        context_length=config.context_length,
    )


def _load_pretrained(path: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise UserError(f"model.path: there is no folder {path}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"model.path: {path!r} cannot be loaded: {reason}") from None
    return model, tokenizer


async def expert_texts(source: EnvSource, tasks: Sequence[Task], options: Mapping[str, Any], *, seed: int) -> list[str]:
    """The contents of all messages of the expert's episodes: what a tokenizer made for the environment has to know.

    No model and no tokenizer is needed: the expert's messages go straight to the environment.
    """
    texts: list[str] = []
    failures: list[str] = []
    for task in tasks:
        try:
            await _play_expert(source, task, options, seed, texts)
        except UserError:
            raise
        except Exception as error:  # one failing episode ends nothing: the tokenizer is made from the others
            failures.append(f"task {task.id!r}: {type(error).__name__}: {error}")
    if failures and not texts:
        raise UserError(f"model: the environment's expert fails on every task; the first: {failures[0]}")
    if failures:
        logger.warning("the expert failed on %d of %d tasks; the first: %s", len(failures), len(tasks), failures[0])
    return texts


async def _play_expert(source: EnvSource, task: Task, options: Mapping[str, Any], seed: int, texts: list[str]) -> None:
    env = source.make()
    try:
        bare: Env = env.unwrapped  # type: ignore[assignment]
        observation, _ = await bare.areset(seed=derive_seed(seed, "corpus", task.id), options={"task": task})
        texts += _contents(observation)
        for message in bare.expert(task, **options):
            texts += _contents([message] if isinstance(message, dict) else [{"text": message}])
            observation, _, terminated, truncated, _ = await bare.astep(message)
            texts += _contents(observation)
            if terminated or truncated:
                break
    finally:
        await threads.run(env.close)


def _contents(messages: Sequence[Message]) -> list[str]:
    return [str(message.get("text") or message.get("content") or "") for message in messages]
