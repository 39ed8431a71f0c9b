"""Clean runs have no findings, under the template of every family: the audit does not cry wolf.

They are played by real rollouts: by a tiny model of random weights, whose turns are mostly nonsense, and by the
environment's expert; in an environment of tags and stop strings, and in one of tools where the template shows tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
from colours import Colours
from guess import Guess

from stepgym.env.messages import user
from stepgym.env.worker import run_blocking
from stepgym.inspect.audit import audit
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.model.renderer import Renderer
from stepgym.model.renderer_files import save_renderer
from stepgym.record.store import TrajectoryStore
from stepgym.run.rollouts import RolloutConfig, rollout


def tiny_model(tokenizer: Any) -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def play(folder: Path, family: Any, env: Any, *, expert: bool, agent: Any = None, **options: Any) -> Path:
    tokenizer = families.tokenizer_for(family)
    renderer = Renderer(tokenizer, **options)
    save_renderer(renderer, folder / "renderer")
    config = RolloutConfig(samples=2, max_response_tokens=24 if not expert else 200)
    tasks = env().tasks("train")[:4]
    with TrajectoryStore(folder / "trajectories", "a") as store:
        if expert:
            rollout(env, tasks, renderer=renderer, expert={}, store=store, config=config, phase="expert")
            return folder
        engine = TransformersEngine.wrap(tiny_model(tokenizer), tokenizer, name="tiny", context_length=1024)
        run_blocking(engine.open())
        try:
            rollout(env, tasks, engine, agent=agent, renderer=renderer, store=store, config=config, phase="train")
        finally:
            run_blocking(engine.close())
    return folder


GAMES = [
    *((name, Colours, expert) for name in families.FAMILIES for expert in (False, True)),
    *((name, Guess, expert) for name, family in families.FAMILIES.items() if family.tools for expert in (False, True)),
]


@pytest.mark.parametrize(
    ("name", "env", "expert"),
    GAMES,
    ids=[f"{name}-{env.__name__.lower()}-{'expert' if expert else 'model'}" for name, env, expert in GAMES],
)
def test_clean_runs_have_no_findings(name: str, env: Any, expert: bool, tmp_path: Path) -> None:
    family = families.FAMILIES[name]
    found = audit(play(tmp_path, family, env, expert=expert))
    assert [f for f in found.findings if f.severity != "note"] == []
    assert found.trajectories == 8
    assert found.steps >= 8
    assert {c.check for c in found.checks if c.status == "skipped"} == {"logprob_gap"}


@pytest.mark.parametrize("name", [name for name, family in families.FAMILIES.items() if family.reasoning != "none"])
def test_clean_runs_that_keep_thinking_have_no_findings(name: str, tmp_path: Path) -> None:
    found = audit(play(tmp_path, families.FAMILIES[name], Colours, expert=False, history="append"))
    assert [f for f in found.findings if f.severity != "note"] == []


@pytest.mark.parametrize("game", ["colours", "guess", "dated"])
def test_the_games_that_faults_are_planted_in_are_clean(game: str, request: pytest.FixtureRequest) -> None:
    bench: Any = request.getfixturevalue(game)
    found = bench.audit(bench.clean)
    assert [f for f in found.findings if f.severity != "note"] == []
    assert found.trajectories == 6
    assert found.steps == sum(len(t.steps) for t in bench.clean)
    assert found.statistics["renderings"]["first"] == 6


class Restless:
    """An agent with a helper beside it, that samples every turn twice and now and then rewrites what was said."""

    def __init__(self) -> None:
        self.turns = 0

    async def run(self, episode: Any) -> None:
        helper = [user("You help. Ünïcödé ✓ \n")]
        while not episode.done:
            answer = await episode.session.chat(helper)
            helper = [*helper, answer, user("And now? \n")]
            await episode.session.chat(episode.messages, tools=episode.tools, stop=episode.stop)
            said = await episode.session.chat(episode.messages, tools=episode.tools, stop=episode.stop, max_tokens=9)
            self.turns += 1
            if self.turns % 3 == 0 and len(episode.messages) > 2:
                rewritten = [
                    {"role": m["role"], "content": "rewritten" if m["role"] == "assistant" else m["content"]}
                    for m in episode.messages
                ]
                await episode.session.chat(rewritten, stop=episode.stop)
            await episode.step(said)


@pytest.mark.parametrize("history", ["template", "append"])
@pytest.mark.parametrize("name", ["chatml", "thinking_kept", "last_differs", "headers"])
def test_agents_with_several_conversations_have_no_findings(name: str, history: str, tmp_path: Path) -> None:
    folder = play(tmp_path, families.FAMILIES[name], Colours, expert=False, agent=Restless(), history=history)
    found = audit(folder)
    assert [f for f in found.findings if f.severity != "note"] == []
    assert found.statistics["renderings"]["agent_rewrote_history"] > 0


def test_a_family_of_the_library_has_no_findings(tmp_path: Path) -> None:
    """The library's renderer for Qwen3, for a tokenizer that has all that it needs."""
    family = families.FAMILIES["thinking_stripped"]
    for expert in (False, True):
        found = audit(play(tmp_path / str(expert), family, Guess, expert=expert, kind="qwen3"))
        assert [f for f in found.findings if f.severity != "note"] == []
        settings = (tmp_path / str(expert) / "renderer" / "renderer.json").read_text()
        assert '"kind": "qwen3"' in settings
