"""A recipe: everything that a run depends on, in one YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from stepgym.config import (
    apply_overrides,
    config_digest,
    keyword_parameters,
    load_yaml,
    validate,
    validate_kwargs,
)
from stepgym.env.registry import env_class
from stepgym.errors import UserError
from stepgym.model.engines import ENGINES
from stepgym.model.engines.base import ChatEngine
from stepgym.model.open_turn import check_turns, refuse_for_chat
from stepgym.plugins import Registry
from stepgym.record.outcome import OutcomePolicy
from stepgym.record.step import Sampling
from stepgym.run import AGENTS
from stepgym.run.rollouts import RolloutConfig
from stepgym.train.overlap import OverlapConfig
from stepgym.train.refill import RefillConfig
from stepgym.train.sinks.config import MetricsConfig

if TYPE_CHECKING:
    from stepgym.train.config import LearnerConfig
    from stepgym.train.sft import SFTConfig

KINDS = ("env", "agent", "model", "engine")
"""Sections that have a `kind`: `engine=openai` on the command line switches it and resets the section."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TinyModel(_Section):
    """A model of random weights with a tokenizer of its own, both built from the run's seed.

    Attributes:
        vocab_size, layers, width, heads, feed_forward_width: Sizes; see `stepgym.model.tiny`.
        initializer_range: Standard deviation of the random weights.
        context_length: Most tokens that it takes.
        special_tokens: Tags that shall be one token each.
        corpus_tasks: The tokenizer is trained on the expert's episodes of this many training tasks.
    """

    kind: Literal["tiny"] = "tiny"
    vocab_size: int = 576
    layers: int = 2
    width: int = 128
    heads: int = 4
    feed_forward_width: int | None = None
    initializer_range: float = 0.02
    context_length: int = 1024
    special_tokens: tuple[str, ...] = ()
    corpus_tasks: int = Field(default=512, ge=1)


class PretrainedModel(_Section):
    """A model of `transformers`.

    Attributes:
        path: A folder, or a hub name.
    """

    kind: Literal["pretrained"] = "pretrained"
    path: str


class RendererConfig(_Section):
    """How messages become prompts.

    Attributes:
        kind: Who renders. `auto`: the `renderers` library's renderer of the model's family, where it writes the ids of
            the model's own template, else that template; `template`: the template; or a family's name (`qwen3`).
        history: What becomes of earlier turns that the template would rewrite, by stripping their thinking, say.
            `template`: the template is followed; `append`: what was sampled stays.
        turns: What a turn of the model is. `conversation`: a message of its own; `continue`: a part of one assistant
            turn, in which observations stand as they are (as Search-R1 was published).
        max_observation_tokens: Under `turns: continue`, most tokens of one observation; null: all stay.
        chat_template: A Jinja file that replaces the model's own template.
        chat_template_kwargs: Variables for the template, such as `enable_thinking`.
        template_date: What a template that asks for the date is told; null: the day the run started.
    """

    kind: str = "auto"
    history: Literal["template", "append"] = "template"
    turns: Literal["conversation", "continue"] = "conversation"
    max_observation_tokens: int | None = Field(default=None, ge=1)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    template_date: date | None = None


class SamplingConfig(_Section):
    """How responses are sampled in rollouts. Training refuses what truncates the distribution (DESIGN 4, Logprob)."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def sampling(self) -> Sampling:
        """The same as a record of sampling."""
        return Sampling(**self.model_dump())


class WarmStart(_Section):
    """One stage of imitating the environment's expert before reinforcement.

    Attributes:
        tasks: Training tasks that the expert plays, once each; every stage takes new ones.
        expert: Options of the environment's `expert`.
        sft: How the episodes are learned; see `stepgym.train.sft.SFTConfig`.
    """

    tasks: int = Field(ge=1)
    expert: dict[str, Any] = {}
    sft: dict[str, Any] = {}


class Budget(_Section):
    """How much reinforcement.

    Attributes:
        iterations: Batches of rollouts.
        tasks_per_iteration: Tasks in each; every task is sampled `rollout.samples` times.
    """

    iterations: int = Field(default=100, ge=0)
    tasks_per_iteration: int = Field(default=16, ge=1)


class EvaluationConfig(_Section):
    """Measuring success during and around training. Sampled as in rollouts; greedy as well where asked.

    Attributes:
        every: Iterations between evaluations on the validation split; 0 never.
        validation_tasks: How many of its tasks.
        test_tasks: Tasks of the test split, before and after reinforcement.
        samples: Episodes per task.
        greedy: Whether the test split is also played at temperature 0.
    """

    every: int = Field(default=0, ge=0)
    validation_tasks: int = Field(default=64, ge=1)
    test_tasks: int = Field(default=256, ge=0)
    samples: int = Field(default=1, ge=1)
    greedy: bool = False


class CheckpointConfig(_Section):
    """Attributes:
    every: Iterations between checkpoints. Between them, a resumed run learns again from the stored trajectories.
    keep: How many of the latest are kept, besides the best.
    """

    every: int = Field(default=10, ge=1)
    keep: int = Field(default=2, ge=1)


class Recipe(BaseModel):
    """A whole run.

    Attributes:
        env: `kind` names the environment; the rest is its config.
        agent: `kind` names the agent.
        model: A tiny model, or a pretrained one.
        engine: `kind` names the engine; the rest is its config.
        renderer, sampling, rollout: How episodes are played.
        outcomes: Changes to the outcome policy, `{outcome: {field: value}}`.
        warm_start: Imitation before reinforcement: one stage, a list of stages in their order, or null for none.
        policy: How the trained model is held and computed (`stepgym.train.policy.PolicyConfig`).
        algorithm: How batches become updates (`stepgym.train.config.LearnerConfig`).
        overlap: Whether rollouts go on while the policy is trained; a name, or a mapping with `kind`.
        refill: Whether groups that can teach nothing are replaced by others.
        budget, evaluation, checkpoint: How much, how often.
        metrics: Where metrics go besides the console and `metrics.jsonl`, and which alarms are raised.
        seed: Seeds everything.
        threads: Threads of torch on the CPU; null: as many as there are cores.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: dict[str, Any]
    agent: dict[str, Any] = {"kind": "chat"}
    model: TinyModel | PretrainedModel = Field(discriminator="kind")
    engine: dict[str, Any] = {"kind": "transformers"}
    renderer: RendererConfig = RendererConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    outcomes: dict[str, Any] = {}
    warm_start: tuple[WarmStart, ...] = ()
    policy: dict[str, Any] = {}
    algorithm: dict[str, Any] = {}
    overlap: OverlapConfig = OverlapConfig()
    refill: RefillConfig = RefillConfig()
    budget: Budget = Budget()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    seed: int = 0
    threads: int | None = Field(default=None, ge=1)

    @field_validator("warm_start", mode="before")
    @classmethod
    def _stages(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, Mapping) else value

    @field_validator("overlap", mode="before")
    @classmethod
    def _overlap(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @property
    def warm_start_tasks(self) -> int:
        """Training tasks that all stages of the warm start take together."""
        return sum(stage.tasks for stage in self.warm_start)

    @property
    def env_kind(self) -> str:
        """Name of the environment."""
        return str(self.env["kind"])

    @property
    def env_config(self) -> dict[str, Any]:
        """Config of the environment."""
        return _without_kind(self.env)

    @property
    def outcome_policy(self) -> OutcomePolicy:
        """What is retried, trained, masked, dropped."""
        return OutcomePolicy.from_config(self.outcomes)

    @property
    def digest(self) -> str:
        """Identifies the recipe: a run is resumed only by the one that began it, but for where its metrics go."""
        return config_digest(self.model_dump(mode="json", exclude={"metrics"}))

    def learner_config(self) -> LearnerConfig:
        """The algorithm, checked. Raises `UserError`. Imports torch."""
        from stepgym.train.config import LearnerConfig

        try:
            given = validate(LearnerConfig, {"seed": self.seed, **self.algorithm}, "algorithm")
        except UserError as error:  # an algorithm's own refusal does not know where in the recipe it stands
            text = str(error)
            raise UserError(text if text.startswith("algorithm") else f"algorithm: {text}") from None
        iterations = self.budget.iterations
        if given.critic is not None:
            if 0 < iterations <= given.critic.warmup_batches:
                raise UserError(
                    f"algorithm.critic.warmup_batches: with {given.critic.warmup_batches} of {iterations} iterations "
                    "the policy would never learn; use fewer"
                )
            iterations -= given.critic.warmup_batches
        if "total_updates" in self.algorithm:
            return given
        updates = iterations * given.mini_batches * given.epochs
        return given.model_copy(update={"total_updates": max(1, updates)})

    def sft_config(self, stage: int = 0) -> SFTConfig:
        """How a stage of the warm start learns, checked. Raises `UserError`. Imports torch."""
        from stepgym.train.sft import SFTConfig

        where = "warm_start.sft" if len(self.warm_start) == 1 else f"warm_start.{stage}.sft"
        return validate(SFTConfig, {"seed": self.seed, **self.warm_start[stage].sft}, where)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and check all of it that can be checked without loading a model.

    Args:
        path: A YAML file. Paths in it are relative to it.
        overrides: `section.field=value`, applied in order.

    Raises:
        UserError: The file is missing or not YAML, or a field is unknown or wrong; in one line that says where.
    """
    where = Path(path)
    fields = apply_overrides(load_yaml(where), overrides, sections=KINDS)
    return check_recipe(fields, where)


def check_recipe(fields: Mapping[str, Any], where: Path) -> Recipe:
    """Check the fields of a recipe; see `load_recipe`."""
    fields = dict(fields)
    for section in ("agent", "engine"):  # where one only changes a field of the default, its kind stays
        if isinstance(fields.get(section), Mapping):
            fields[section] = {**Recipe.model_fields[section].default, **fields[section]}
    recipe = validate(Recipe, fields, f"{where}:")
    for section in ("agent", "engine", "env"):
        if not isinstance(getattr(recipe, section).get("kind"), str):
            raise UserError(f"{where}: {section}: a 'kind' is missing, as in {{kind: ...}}")
    agent: Any = _get(AGENTS, recipe.agent["kind"], f"{where}: agent.kind")
    validate_kwargs(agent, _without_kind(recipe.agent), f"{where}: agent")
    engine_fields(recipe, where=f"{where}: ")
    _check_renderer(recipe, where)
    try:
        found: Any = env_class(recipe.env_kind)
    except UserError as error:
        raise UserError(f"{where}: env.kind: {error}") from None
    validate_kwargs(found, recipe.env_config, f"{where}: env")
    _ = recipe.outcome_policy
    return _with_absolute_paths(recipe, where.parent)


def _check_renderer(recipe: Recipe, where: Path) -> None:
    """Refuse settings of the renderer that do not go together, or that the engine has no ids for."""
    renderer = recipe.renderer
    engine: Any = ENGINES.get(recipe.engine["kind"])
    try:
        check_turns(renderer.turns, renderer.history, renderer.max_observation_tokens)
        if issubclass(engine, ChatEngine):
            refuse_for_chat(renderer.turns, renderer.history)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def engine_fields(recipe: Recipe, *, where: str = "") -> dict[str, Any]:
    """The engine's checked fields; an engine that takes a `model` is given the recipe's where it names none.

    Raises `UserError` for an unknown engine or field.
    """
    engine: Any = _get(ENGINES, recipe.engine["kind"], f"{where}engine.kind")
    fields = _without_kind(recipe.engine)
    if "model" in keyword_parameters(engine):
        fields.setdefault("model", recipe.model.path if isinstance(recipe.model, PretrainedModel) else "tiny")
    return validate_kwargs(engine, fields, f"{where}engine")


def _get(registry: Registry[Any], name: str, where: str) -> Any:
    try:
        return registry.get(name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _without_kind(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "kind"}


def _with_absolute_paths(recipe: Recipe, folder: Path) -> Recipe:
    """Paths that exist relative to the recipe become absolute; anything else (a hub name) stays."""
    changes: dict[str, Any] = {}
    if isinstance(recipe.model, PretrainedModel):
        changes["model"] = recipe.model.model_copy(update={"path": _absolute(recipe.model.path, folder)})
    if recipe.renderer.chat_template is not None:
        template = _absolute(recipe.renderer.chat_template, folder)
        changes["renderer"] = recipe.renderer.model_copy(update={"chat_template": template})
    for section in ("env", "engine", "algorithm"):
        config = getattr(recipe, section)
        changes[section] = _with_paths_in(config, folder)
    return recipe.model_copy(update=changes)


def _with_paths_in(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A section of the recipe, and the sections inside it (`env.retriever`), with absolute paths."""
    return {
        name: _with_paths_in(value, folder)
        if isinstance(value, Mapping)
        else _absolute(value, folder)
        if _is_path(name)
        else value
        for name, value in config.items()
    }


def _is_path(name: str) -> bool:
    known = ("path", "dataset", "tokenizer", "model", "corpus")
    return name in known or name.endswith(("_path", "_root", "_folder", "_dataset"))


def _absolute(value: Any, folder: Path) -> Any:
    if not isinstance(value, str) or not value:
        return value
    whole = folder / Path(value).expanduser()
    if whole.exists():
        return str(whole.resolve())
    path, mark, split = value.partition("#")  # a data set may name its split
    candidate = folder / Path(path).expanduser()
    return f"{candidate.resolve()}{mark}{split}" if path and candidate.exists() else value
