"""The search recipes: those for two cores run in short form, the one for GPUs on the CPU, in both turn modes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepgym.inspect.audit import audit
from stepgym.model.tiny import build_tiny_model, save_tiny_model
from stepgym.record.store import TrajectoryStore
from stepgym.run.folder import RunFolder
from stepgym.train.loop import train
from stepgym.train.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes" / "search"
QUESTION = "Where was Velor born?"
# What recipes/search/README.md says for a conversation instead of one open turn.
CONVERSATION = [
    "renderer.turns=conversation",
    "renderer.max_observation_tokens=null",
    "env.max_turns=4",
    "env.final_turn=false",
]


@pytest.fixture(autouse=True)
def home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPGYM_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_reads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.learner_config().credit.kind == "grpo"
    assert recipe.env_kind == "search"


def test_the_published_numbers_are_those_of_search_r1() -> None:
    recipe = load_recipe(RECIPES / "qwen2.5-3b.yaml")
    learner = recipe.learner_config()
    assert (recipe.env["topk"], recipe.env["max_turns"], recipe.env["final_turn"]) == (3, 2, True)
    assert (recipe.rollout.samples, recipe.rollout.max_response_tokens, recipe.rollout.max_prompt_tokens) == (
        5,
        500,
        4096,
    )
    assert (recipe.renderer.turns, recipe.renderer.max_observation_tokens) == ("continue", 500)
    assert (recipe.budget.tasks_per_iteration, learner.mini_batches) == (512, 2)
    assert (learner.kl.kind, learner.kl.coef) == ("k3", 0.001)
    assert learner.optimizer.learning_rate == 1e-6
    assert learner.optimizer.warmup(learner.total_updates) == 573  # 0.285 of 2 x 1005 updates
    assert recipe.sampling.temperature == 1.0


def test_the_readme_says_how_to_play_it_as_a_conversation() -> None:
    text = (RECIPES / "README.md").read_text()
    assert all(override in text for override in CONVERSATION)


def run(recipe: Recipe, path: Path) -> RunFolder:
    folder = RunFolder(path, config=recipe.model_dump(mode="json"), digest=recipe.digest)
    result = train(recipe, folder)
    folder.close()
    assert result.updates == 2
    return folder


@pytest.mark.parametrize("mode", [[], CONVERSATION], ids=["continue", "conversation"])
def test_the_gpu_recipe_makes_two_updates_on_the_cpu(tmp_path: Path, mode: list[str]) -> None:
    """Rows as `PeterJinGo/nq_hotpotqa_train` has them, wiki-18's kind of corpus, a model of random weights."""
    corpus = tmp_path / "corpus.jsonl"
    passages = [{"id": str(i), "contents": f'"Velor {i}"\nVelor {i} was born in Narn.'} for i in range(20)]
    corpus.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Answer the given question. Question: {QUESTION}\n"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Narn"]}},
        "extra_info": {"split": "train", "index": 0},
    }
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    tags = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
    model, tokenizer = build_tiny_model([row["prompt"][0]["content"], "Velor was born"], special_tokens=tags, width=64)
    path = save_tiny_model(tmp_path / "model", model, tokenizer)
    recipe = load_recipe(
        RECIPES / "qwen2.5-3b.yaml",
        [
            f"model.path={path}",
            "engine=transformers",
            f"env.dataset={tmp_path / 'train.jsonl'}",
            f"env.test_dataset={tmp_path / 'test.jsonl'}",
            f"env.corpus={corpus}",
            "env.retriever=bm25s",
            "policy.device=cpu",
            "rollout.max_response_tokens=24",
            "budget.iterations=1",
            "budget.tasks_per_iteration=2",
            "evaluation.test_tasks=2",
            "threads=1",
            *mode,
        ],
    )
    folder = run(recipe, tmp_path / "run")
    with TrajectoryStore(folder.trajectories) as store:
        found = list(store.read(phase="train"))
    assert len(found) == 10
    renderings = {step.rendering for trajectory in found for step in trajectory.steps}
    assert renderings <= ({"first", "continued", "turn_reopened"} if not mode else {"first", "extended"})
    assert len(renderings) > 1
    assert all(len(trajectory.steps) <= (3 if not mode else 4) for trajectory in found)
    assert audit(folder.path).count("error") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "harder"])
def test_the_tiny_recipes_train_and_their_audit_is_clean(tmp_path: Path, name: str) -> None:
    """A short form: how much they learn is measured by benchmarks/learning.py."""
    recipe = load_recipe(
        RECIPES / f"{name}.yaml",
        [
            "env.articles=2000",
            "model.corpus_tasks=64",
            "warm_start.0.tasks=64",
            "warm_start.0.sft.updates=20",
            "warm_start.1.tasks=32",
            "warm_start.1.sft.updates=5",
            "rollout.samples=4",
            "budget.iterations=2",
            "budget.tasks_per_iteration=4",
            "evaluation.test_tasks=8",
            "evaluation.every=0",
            "algorithm.zero_variance=keep",
            "threads=1",
        ],
    )
    folder = run(recipe, tmp_path / "run")
    with TrajectoryStore(folder.trajectories) as store:
        shown = list(store.read(phase="expert"))
        assert any(trajectory.reward == 1.0 for trajectory in shown)
    found = audit(folder.path)
    assert found.count("error") == 0, found.findings
    assert found.count("warning") == 0, found.findings
