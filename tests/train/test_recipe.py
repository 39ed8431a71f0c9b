"""A recipe is read whole: overrides, defaults, paths, digests; what is wrong is said before anything is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepgym.config import config_model
from stepgym.errors import UserError
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.record.outcome import Outcome
from stepgym.train.recipe import PretrainedModel, Recipe, TinyModel, check_recipe, engine_fields, load_recipe

SMALL: dict[str, Any] = {"env": {"kind": "sql"}, "model": {"kind": "tiny"}}
RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))


def check(**changes: Any) -> Recipe:
    return check_recipe({**SMALL, **changes}, Path("x.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_recipe_of_the_repository_is_valid(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.learner_config().total_updates
    assert all(recipe.sft_config(stage).updates > 0 for stage in range(len(recipe.warm_start)))
    assert check_recipe(recipe.model_dump(mode="json"), path).digest == recipe.digest


def test_a_warm_start_is_one_stage_or_several() -> None:
    one, two = {"tasks": 3, "sft": {"updates": 5}}, {"tasks": 4, "sft": {"updates": 6}}
    assert check(warm_start=one).warm_start == check(warm_start=[one]).warm_start
    several = check(warm_start=[one, two])
    assert [several.sft_config(stage).updates for stage in (0, 1)] == [5, 6]
    assert several.warm_start_tasks == 7
    with pytest.raises(UserError, match=r"^warm_start.1.sft"):
        check(warm_start=[one, {"tasks": 1, "sft": {"updates": 0}}]).sft_config(1)


def test_sections_have_defaults(tmp_path: Path) -> None:
    recipe = check()
    assert (recipe.agent, recipe.engine, recipe.seed, recipe.warm_start) == (
        {"kind": "chat"},
        {"kind": "transformers"},
        0,
        (),
    )
    assert isinstance(recipe.model, TinyModel)
    assert recipe.sampling.sampling.temperature == 1.0
    assert check(engine={"context_length": 64}).engine == {"kind": "transformers", "context_length": 64}


def test_overrides_change_and_switch(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(SMALL))
    recipe = load_recipe(
        path, ["rollout.samples=3", "model={kind: pretrained, path: a/b}", "env.max_turns=2", "seed=5"]
    )
    assert (recipe.rollout.samples, recipe.env_config, recipe.seed) == (3, {"max_turns": 2}, 5)
    assert recipe.model == PretrainedModel(path="a/b")
    switched = load_recipe(path, ["env.max_turns=2", "env=sql"])
    assert switched.env == {"kind": "sql"}
    assert (
        load_recipe(path, ["outcomes.turn_limit={reward: lowest}"]).outcome_policy[Outcome.TURN_LIMIT].reward
        == "lowest"
    )


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "model").mkdir(parents=True)
    (home / "dbs").mkdir()
    (home / "t.jinja").write_text("x")
    (home / "r.yaml").write_text(
        "env: {kind: sql, dataset: missing/name, database_root: dbs}\n"
        "model: {kind: pretrained, path: model}\nrenderer: {chat_template: t.jinja}\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("home/r.yaml")
    assert recipe.model == PretrainedModel(path=str(home / "model"))
    assert recipe.env_config == {"dataset": "missing/name", "database_root": str(home / "dbs")}
    assert recipe.renderer.chat_template == str(home / "t.jinja")
    assert engine_fields(recipe)["model"] == str(home / "model")


def test_a_critics_model_is_relative_to_the_recipe_and_its_warm_up_leaves_updates(tmp_path: Path) -> None:
    (tmp_path / "reward-model").mkdir()
    critic = {"path": "reward-model", "warmup_batches": 4}
    fields = {
        **SMALL,
        "algorithm": {"credit": "gae", "critic": critic, "mini_batches": 2},
        "budget": {"iterations": 10},
    }
    config = check_recipe(fields, tmp_path / "r.yaml").learner_config()
    assert config.critic is not None
    assert config.critic.path == str(tmp_path / "reward-model")
    assert (config.total_updates, config.critic_updates) == (12, 20)
    for more in ({}, {"total_updates": 8}):
        never = {**fields, "algorithm": {**fields["algorithm"], **more}, "budget": {"iterations": 4}}
        with pytest.raises(
            UserError, match=r"^algorithm.critic.warmup_batches: with 4 of 4 iterations the policy would never"
        ):
            check_recipe(never, tmp_path / "r.yaml").learner_config()


def test_data_sets_of_all_splits_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "test.jsonl").write_text("{}")
    (tmp_path / "run #2").mkdir()
    env = {"kind": "sql", "dataset": "rows", "validation_dataset": "rows#dev", "test_dataset": "test.jsonl"}
    numbered = check_recipe({**SMALL, "env": {**env, "dataset": "run #2"}}, tmp_path / "r.yaml")
    assert numbered.env_config["dataset"] == str(tmp_path / "run #2")
    recipe = check_recipe({**SMALL, "env": {**env, "database_root": "owner/name#x"}}, tmp_path / "r.yaml")
    assert recipe.env_config == {
        "dataset": str(tmp_path / "rows"),
        "validation_dataset": f"{tmp_path / 'rows'}#dev",
        "test_dataset": str(tmp_path / "test.jsonl"),
        "database_root": "owner/name#x",
    }


def test_paths_in_sections_inside_a_section_are_relative_to_the_recipe_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from colours import Colours

    class Sorted(Colours):
        """Colours that are looked up."""

        def __init__(self, *, shelf: dict[str, Any] | None = None) -> None:
            super().__init__()
            self.shelf = shelf

    monkeypatch.setattr("stepgym.train.recipe.env_class", lambda kind: Sorted)
    (tmp_path / "shelves" / "deep").mkdir(parents=True)
    shelf = {"index_path": "shelves", "model": "hub/name", "kind": "shelves", "inner": {"data_root": "shelves/deep"}}
    recipe = check_recipe({**SMALL, "env": {"kind": "sorted", "shelf": shelf}}, tmp_path / "r.yaml")
    assert recipe.env_config["shelf"] == {
        "index_path": str(tmp_path / "shelves"),
        "model": "hub/name",
        "kind": "shelves",
        "inner": {"data_root": str(tmp_path / "shelves" / "deep")},
    }


def test_turns_are_set_and_refused_where_they_cannot_be() -> None:
    renderer = check(renderer={"turns": "continue", "max_observation_tokens": 500}).renderer
    assert (renderer.turns, renderer.max_observation_tokens) == ("continue", 500)
    assert check().renderer.turns == "conversation"
    hosted = {"kind": "chat", "base_url": "http://127.0.0.1:1/v1", "model": "m"}
    assert check(engine=hosted).renderer.history == "template"
    for setting in ({"turns": "continue"}, {"history": "append"}):
        with pytest.raises(UserError, match=r"renderer.*needs an engine that takes token ids"):
            check(engine=hosted, renderer=setting)


def test_the_digest_is_that_of_what_it_says(tmp_path: Path) -> None:
    one, two = tmp_path / "a.yaml", tmp_path / "b.yaml"
    one.write_text("env: {kind: sql}\nmodel: {kind: tiny, width: 64}\n")
    two.write_text("# a comment\nmodel:\n  width: 64\n  kind: tiny\nenv: {kind: sql}\nseed: 0\n")
    assert load_recipe(one).digest == load_recipe(two).digest
    assert load_recipe(one, ["seed=1"]).digest != load_recipe(one).digest


def test_the_schedule_is_laid_out_for_the_budget() -> None:
    budget = {"iterations": 6}
    assert check(budget=budget, algorithm={"mini_batches": 4, "epochs": 2}).learner_config().total_updates == 48
    assert check(budget=budget, algorithm={"total_updates": 7}).learner_config().total_updates == 7
    assert check(budget={"iterations": 0}).learner_config().total_updates == 1
    assert check(seed=9).learner_config().seed == 9
    assert check(seed=9, algorithm={"seed": 2}).learner_config().seed == 2
    assert check(seed=9, warm_start={"tasks": 1}).sft_config().seed == 9


def test_every_field_of_the_engine_can_be_set() -> None:
    fields = set(config_model(TransformersEngine).model_fields)
    assert {"context_length", "model"} <= fields
    with pytest.raises(UserError, match="did you mean 'context_length'"):
        check(engine={"kind": "transformers", "context_lenght": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {}}, "env: a 'kind' is missing"),
        ({"env": {"kind": 3}}, "env: a 'kind' is missing"),
        ({"env": "sql"}, "env: expected"),
        ({"agent": {"kind": "nobody"}}, "agent.kind: unknown agent"),
        ({"engine": {"kind": "openai"}}, "base_url"),
        ({"model": {"kind": "pretrained"}}, "path"),
        ({"model": {"width": 3}}, "model"),
        ({"algorithm": 3}, "algorithm"),
        ({"budget": {"iterations": 1.5}}, "budget.iterations"),
        ({"renderer": {"template_date": "soon"}}, "renderer.template_date"),
        ({"renderer": {"history": "keep"}}, "renderer.history"),
        ({"renderer": {"turns": "one"}}, "renderer.turns"),
        ({"renderer": {"max_observation_tokens": 5}}, "set turns: continue"),
        ({"renderer": {"turns": "continue", "max_observation_tokens": 0}}, "renderer.max_observation_tokens"),
        ({"renderer": {"turns": "continue", "history": "append"}}, "append has no place under turns: continue"),
        ({"warm_start": {}}, "'tasks' is missing"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_where(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check(**changes)
    assert str(caught.value).startswith("x.yaml: ")
    assert "\n" not in str(caught.value)


def test_algorithms_are_refused_by_their_place() -> None:
    with pytest.raises(UserError, match=r"^algorithm"):
        check(algorithm={"credit": "gae"}).learner_config()
    with pytest.raises(UserError, match=r"^warm_start.sft"):
        check(warm_start={"tasks": 1, "sft": {"updates": 0}}).sft_config()
