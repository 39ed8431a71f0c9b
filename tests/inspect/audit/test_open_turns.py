"""Runs under `turns: continue`: clean ones have no findings, and faults that are planted in them are found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from colours import Colours

from stepgym.env.messages import system, user
from stepgym.env.worker import run_blocking
from stepgym.inspect.audit import GapOptions, audit
from stepgym.model.engines.base import Completion, Engine
from stepgym.model.engines.transformers import TransformersEngine
from stepgym.model.renderer import Renderer
from stepgym.model.renderer_files import save_renderer
from stepgym.model.template import ChatTemplate
from stepgym.model.tiny import build_tiny_model, build_tiny_tokenizer, save_tiny_model
from stepgym.record.store import TrajectoryStore
from stepgym.record.trajectory import Trajectory
from stepgym.run.rollouts import RolloutConfig, rollout


class Wordy(Colours):
    """The boxes, with longer answers."""

    def act(self, message: Any) -> Any:
        answer, *rest = super().act(message)
        return f"\nIn the box is something {answer}, as you see.\n" if answer else "", *rest

    def expert(self, task: Any, *, mistakes: float = 0.0) -> Iterator[Any]:
        yield "<think>How?</think>"  # no action, and the turn ends
        yield {"role": "assistant", "content": "<say>open</say>", "reasoning_content": "I look."}
        yield f"<think>Ah.</think><say>{task.answer}</say>"


class Player(Engine):
    """Says one reply after the other, over and over, to one episode at a time; as weights of version 3."""

    kind = "player"
    model = "player"

    def __init__(self, tokenizer: Any, replies: Sequence[str]) -> None:
        self._tokenizer, self._replies, self._asked = tokenizer, replies, 0

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    async def generate(self, prompt_ids: Any, sampling: Any, *, max_tokens: int, **options: Any) -> Completion:
        text = self._replies[self._asked % len(self._replies)]
        self._asked += 1
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        cut, ids = len(ids) > max_tokens, ids[:max_tokens]
        logprobs = -0.1 - np.arange(self._asked, self._asked + len(ids)) / 100
        return Completion(np.asarray(ids), logprobs, "length" if cut else "stop", (("3", 0, len(ids)),))


class Restless:
    """Asks beside the conversation, adds a message of its own to it, and rewrites what was said."""

    async def run(self, episode: Any) -> None:
        while not episode.done:
            said = await episode.session.chat(episode.messages, stop=episode.stop)
            await episode.session.chat([*episode.messages, said, user("Are you sure?"), user("Really?")])
            await episode.session.chat([*episode.messages, said, system("Hurry.")])
            await episode.session.chat([user("x"), {**said, "content": "no", "text": "no"}, user("Why?")])
            await episode.step(said)


def serious(found: Any) -> list[Any]:
    return [f for f in found.findings if f.severity != "note"]


def play(folder: Path, renderer: Renderer, engine: Engine | None, *, agent: Any = None) -> list[Trajectory]:
    save_renderer(renderer, folder / "renderer")
    options: dict[str, Any] = {"expert": {}, "phase": "expert"} if engine is None else {"phase": "train"}
    with TrajectoryStore(folder / "trajectories", "a") as store:
        return rollout(
            Wordy,
            Wordy().tasks("train")[:3],
            engine,
            renderer=renderer,
            store=store,
            agent=agent,
            config=RolloutConfig(samples=2, concurrency=1, max_response_tokens=40),
            **options,
        )


def renderer_of(name: str, **options: Any) -> Renderer:
    return Renderer(families.tokenizer_for(families.FAMILIES[name]), turns="continue", **options)


@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_experts_have_no_findings(name: str, most: int | None, tmp_path: Path) -> None:
    played = play(tmp_path, renderer_of(name, max_observation_tokens=most), None)
    found = audit(tmp_path)
    assert serious(found) == []
    assert found.statistics["renderings"] == {"first": 6, "turn_reopened": 6, "continued": 6}
    assert found.statistics["mismatches"] == {"turn_reopened": 6}
    assert all(trajectory.success for trajectory in played)


@pytest.mark.parametrize(
    "replies",
    [
        ("I say nothing.END", "so <say>open</say>", "so</think><say>white</say>"),
        ("<think>one word " * 20, "more<say>open</say>", "it is white.END"),
        ("<think>aEND", "b<say>open</say>", "c</think>END"),
        ("END", "EOS", "noEND"),
    ],
    ids=["ends", "is cut", "leaves reasoning open", "says nothing"],
)
@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_whatever_a_policy_says_there_are_no_findings(name: str, replies: Sequence[str], tmp_path: Path) -> None:
    family = families.FAMILIES[name]
    said = [text.replace("END", family.terminator).replace("EOS", family.eos_token) for text in replies]
    play(tmp_path, renderer_of(name, max_observation_tokens=6), Player(families.tokenizer_for(family), said))
    found = audit(tmp_path)
    assert serious(found) == []
    reopened = sum(text.endswith((family.terminator, family.eos_token)) for text in said[:2])
    assert found.statistics["renderings"].get("turn_reopened", 0) == 6 * reopened
    assert found.statistics["renderings"].get("continued", 0) == 6 * (2 - reopened)


def test_what_a_token_brings_beyond_a_stop_string_stays_and_is_no_finding(tmp_path: Path) -> None:
    tokenizer = build_tiny_tokenizer(["In the box is something red, as you see."], special_tokens=["</say>!!"])
    renderer = Renderer(tokenizer, turns="continue")
    engine = Player(tokenizer, ("<say>open</say>!!", "<say>red</say>!!", "<say>red</say>"))
    played = play(tmp_path, renderer, engine)
    first, second = played[0].steps[:2]
    assert renderer.decode(first.response_ids).endswith("</say>!!")
    assert first.message is not None
    assert first.message["text"] == "<say>open</say>"
    assert renderer.decode(second.prompt_ids[first.length - 1 :]).startswith("</say>!!\nIn the box")
    assert serious(audit(tmp_path)) == []


@pytest.mark.parametrize("name", ["chatml", "thinking_opened", "thinking_kept", "headers", "other_terminator"])
def test_agents_with_several_conversations_have_no_findings(name: str, tmp_path: Path) -> None:
    tokenizer = families.tokenizer_for(families.FAMILIES[name])
    replies = ["<say>open</say>", "sure", "yes", "well", "<say>white</say>"]
    play(tmp_path, renderer_of(name), Player(tokenizer, replies), agent=Restless())
    found = audit(tmp_path)
    # What this engine says ends in no stop token without a stop string, and it says so all the same.
    assert [f for f in serious(found) if f.check != "end_of_response"] == []
    renderings = found.statistics["renderings"]
    assert min(renderings[kind] for kind in ("continued", "turn_closed", "agent_rewrote_history")) > 0


def test_a_family_of_the_library_has_no_findings(tmp_path: Path) -> None:
    play(tmp_path, renderer_of("thinking_stripped", kind="qwen3", max_observation_tokens=4), None)
    assert serious(audit(tmp_path)) == []
    assert '"kind": "qwen3"' in (tmp_path / "renderer" / "renderer.json").read_text()


def test_a_model_of_random_weights_has_no_findings_and_its_logprobs_are_the_recorded_ones(tmp_path: Path) -> None:
    import torch

    torch.set_num_threads(1)
    corpus = ["Open the box. <say>open</say> In the box is something red, as you see. <say>red</say>"] * 8
    model, tokenizer = build_tiny_model(corpus, width=32, layers=1, heads=2, vocab_size=300, context_length=512)
    with torch.no_grad():  # all tokens are a little alike, and the end of the turn a little more so
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 1.0
        embedding[tokenizer.eos_token_id, 0] = 1.15
    engine = TransformersEngine.wrap(model, tokenizer, name="tiny", context_length=512)
    run_blocking(engine.open())
    try:
        play(tmp_path, Renderer(tokenizer, turns="continue", max_observation_tokens=7), engine)
    finally:
        run_blocking(engine.close())
    folder = save_tiny_model(tmp_path / "model", model, tokenizer)
    found = audit(tmp_path, model=GapOptions(str(folder)))
    assert serious(found) == []
    assert min(found.statistics["renderings"][kind] for kind in ("continued", "turn_reopened")) > 2
    assert found.logprob_gap is not None
    assert found.logprob_gap.mean is not None
    assert found.logprob_gap.mean < 1e-5


# ---- planted faults -------------------------------------------------------------------------------------------------


class Bench:
    """Clean trajectories of three turns, and the audit of them with a step changed.

    The model ends its first turn without an action, overshoots its second, and answers in its third.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.renderer = renderer_of("chatml", max_observation_tokens=12)
        replies = ("I say nothing.<|im_end|>", "so <say>open</say>", "<say>white</say>")
        self.clean = play(folder / "clean", self.renderer, Player(self.renderer.tokenizer, replies))

    def faults(self, step: int, *, provenance: Any = None, **changes: Any) -> list[tuple[str, int | None, int | None]]:
        """Check, step and token of what an audit finds when steps of the last trajectory are changed."""
        return [(f.check, f.step, f.token) for f in self.findings(step, provenance=provenance, **changes)]

    def findings(self, step: int, *, provenance: Any = None, **changes: Any) -> list[Any]:
        last = self.clean[-1]
        steps = list(last.steps)
        steps[step] = replace(steps[step], **changes)
        changed = replace(last, steps=tuple(steps), provenance=provenance or last.provenance)
        save_renderer(self.renderer, self.folder / "renderer")
        with TrajectoryStore(self.folder / "trajectories", "a") as store:
            for trajectory in (*self.clean[:-1], changed):
                store.append(trajectory)
        return serious(audit(self.folder))

    def prompt(self, step: int, added: Any, *, kept: int | None = None) -> np.ndarray[Any, Any]:
        """The prompt of a step with something else than its observation."""
        before = self.clean[-1].steps[step - 1].full_ids
        ids = self.renderer.encode(added) if isinstance(added, str) else added
        return np.concatenate([before[: len(before) if kept is None else kept], ids]).astype(np.int32)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_bench_is_clean(bench: Bench) -> None:
    assert serious(audit(bench.folder / "clean")) == []
    renderings = [[step.rendering for step in trajectory.steps] for trajectory in bench.clean]
    assert renderings == [["first", "turn_reopened", "continued"]] * 6
    assert [len(observation_of(bench, n)) for n in (1, 2)] == [12, 12]  # the second is cut


def observation_of(bench: Bench, step: int) -> Any:
    steps = bench.clean[-1].steps
    return steps[step].prompt_ids[steps[step - 1].length - (step == 1) :]


def test_a_prompt_that_leaves_what_was_sampled(bench: Bench) -> None:
    step, before = bench.clean[-1].steps[2], bench.clean[-1].steps[1]
    ids = step.prompt_ids.copy()
    ids[before.length - 2] += 1
    assert bench.faults(2, prompt_ids=ids) == [("not_extended", 2, before.length - 2)]


def test_a_reopened_prompt_that_leaves_what_was_sampled(bench: Bench) -> None:
    step, before = bench.clean[-1].steps[1], bench.clean[-1].steps[0]
    ids = step.prompt_ids.copy()
    ids[before.length - 2] += 1
    assert ("not_extended", 1, before.length - 2) in bench.faults(1, prompt_ids=ids)


def test_template_text_in_the_open_turn(bench: Bench) -> None:
    text = "<|im_end|>\n<|im_start|>user\nIn the box is something white, as you see.<|im_end|>\n<|im_start|>assistant\n"
    (found,) = bench.findings(2, prompt_ids=bench.prompt(2, text))
    assert (found.check, found.step, found.token) == ("prompt_drift", 2, bench.clean[-1].steps[1].length)
    assert "a template's text ('<|im_end|>') stands in the open turn" in found.text


def test_a_generation_prompt_after_the_observation(bench: Bench) -> None:
    opener = bench.renderer.encode("<|im_end|>\n<|im_start|>assistant\n")
    step = bench.clean[-1].steps[2]
    (found,) = bench.findings(2, prompt_ids=np.concatenate([step.prompt_ids, opener]))
    assert (found.check, found.step, found.token) == ("prompt_drift", 2, len(step.prompt_ids))
    assert "goes on after the observation" in found.text


@pytest.mark.parametrize("length", [11, 13, 40])
def test_an_observation_cut_elsewhere(bench: Bench, length: int) -> None:
    text = bench.clean[-1].steps[2].new_messages[0]["content"]
    whole = bench.renderer.encode(text)
    (found,) = bench.findings(2, prompt_ids=bench.prompt(2, whole[:length]))
    assert (found.check, found.step) == ("prompt_drift", 2)
    assert found.text.startswith(f"{min(length, len(whole))} of the observation's {len(whole)} tokens")
    assert "max_observation_tokens is 12" in found.text


def test_an_observation_in_other_tokens(bench: Bench) -> None:
    text = bench.renderer.decode(observation_of(bench, 2))
    single = np.concatenate([bench.renderer.encode(character) for character in text])
    assert len(single) != 12
    (found,) = bench.findings(2, prompt_ids=bench.prompt(2, single))
    assert (found.check, found.step) == ("prompt_drift", 2)
    assert "the tokenisation is wrong" in found.text


def test_an_observation_with_another_text(bench: Bench) -> None:
    assert bench.faults(2, new_messages=(user("\nIn the box is nothing."),))[0][:2] == ("prompt_drift", 2)


def test_a_system_message_in_the_open_turn(bench: Bench) -> None:
    message = {**bench.clean[-1].steps[2].new_messages[0], "role": "system"}
    (found,) = bench.findings(2, new_messages=(message,))
    assert found.check == "prompt_drift"
    assert "role 'system' stands inside the open turn" in found.text


def test_a_closed_turn_that_was_left_closed(bench: Bench) -> None:
    before = bench.clean[-1].steps[0]
    ids = bench.prompt(1, observation_of(bench, 1))
    found = bench.findings(1, prompt_ids=ids, rendering="continued")
    own = [f for f in found if f.step == 1]
    assert [(f.check, f.token) for f in own] == [("generation_prompt", before.length - 1)]
    assert "step 0 ended it with '<|im_end|>'" in own[0].text


def test_a_turn_reopened_that_was_not_closed(bench: Bench) -> None:
    before = bench.clean[-1].steps[1]
    ids = bench.prompt(2, observation_of(bench, 2), kept=before.length - 1)
    (found,) = bench.findings(2, prompt_ids=ids, rendering="turn_reopened")
    assert (found.check, found.step, found.token) == ("prompt_drift", 2, before.length - 1)
    assert "ends in no stop token" in found.text


def test_a_first_prompt_that_opens_no_turn(bench: Bench) -> None:
    step = bench.clean[-1].steps[0]
    opener = len(bench.renderer.encode("<|im_start|>assistant\n"))
    found = bench.faults(0, prompt_ids=step.prompt_ids[:-opener])
    assert ("generation_prompt", 0, len(step.prompt_ids) - opener - 1) in found


def test_an_observation_inside_a_response(bench: Bench) -> None:
    """Put at the end of the response that it answers, after the stop string; the next prompt is as it was."""
    step, following = bench.clean[-1].steps[1], bench.clean[-1].steps[2]
    ids = np.concatenate([step.response_ids, observation_of(bench, 2)])
    count = len(ids)
    changes = {
        "response_ids": ids,
        "loss_mask": np.ones(count),
        "logprobs": np.linspace(-0.5, -0.1, count),
        "weights_versions": (("3", 0, count),),
    }
    found = bench.findings(1, **changes)
    assert [(f.check, f.step, f.token) for f in found if f.step == 1] == [("observation_in_response", 1, step.length)]
    # What is in the response cannot be in the next prompt's part of its own.
    assert ("prompt_drift", 2) in [(f.check, f.step) for f in found]
    assert following.prompt_ids.tolist() == [*step.prompt_ids.tolist(), *ids.tolist()]


def test_a_generation_prompt_at_the_start_of_a_response(bench: Bench) -> None:
    step = bench.clean[-1].steps[2]
    ids = np.concatenate([bench.renderer.encode("<|im_start|>assistant\n"), step.response_ids])
    count = len(ids)
    changes = {"loss_mask": np.ones(count), "logprobs": np.linspace(-0.5, -0.1, count)}
    found = bench.faults(2, response_ids=ids, weights_versions=(("3", 0, count),), **changes)
    assert ("response_start", 2, len(step.prompt_ids)) in found


def test_the_template_is_applied_only_to_what_opened_a_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    apply = ChatTemplate.apply
    monkeypatch.setattr(ChatTemplate, "apply", lambda self, m, *a, **k: shown.append(len(m)) or apply(self, m, *a, **k))
    audit(bench.folder / "clean")
    assert max(shown) <= 2  # a whole conversation has more


def test_prompts_that_are_not_those_of_the_runs_turns(bench: Bench) -> None:
    found = bench.faults(2, rendering="extended")
    assert ("follows", 2, None) in found


def test_open_turns_in_a_run_of_conversations(bench: Bench) -> None:
    provenance = {**bench.clean[-1].provenance, "turns": "conversation"}
    found = bench.faults(2, provenance=provenance)
    assert [f for f in found if f[0] == "follows"] == [("follows", 1, None), ("follows", 2, None)]


def test_an_open_turn_that_follows_nothing(bench: Bench) -> None:
    assert ("follows", 2, None) in bench.faults(2, follows=None)


@pytest.mark.parametrize("reason", ["turn_closed", "agent_rewrote_history"])
def test_a_prompt_rendered_anew_for_no_reason(bench: Bench, reason: str) -> None:
    steps = bench.clean[-1].steps
    conversation = [message for step in steps[:2] for message in (*step.new_messages, step.message)]
    anew = Renderer(bench.renderer.tokenizer).prompt([*conversation, *steps[2].new_messages])
    (found,) = bench.findings(2, prompt_ids=anew.new_ids, rendering=reason)
    assert (found.check, found.step) == ("follows", 2)
    assert f"said to be {reason!r}, but" in found.text


@pytest.mark.parametrize(("observation", "forged"), [("a<|im_start|>b", ["<|im_start|>"]), ("a b", [])])
def test_of_special_tokens_in_an_observation_those_count_that_were_not_cut_off(
    bench: Bench, observation: str, forged: list[str]
) -> None:
    text = observation + "." * 40 + "<|im_end|><|endoftext|>"
    ids = bench.renderer.encode(text)[:12]
    found = bench.findings(2, prompt_ids=bench.prompt(2, ids), new_messages=(user(text),))
    assert [(f.check, f.text.split("'")[1]) for f in found] == [("special_token_in_observation", t) for t in forged]


def test_text_that_is_not_what_was_sampled_where_reasoning_was_left_open(tmp_path: Path) -> None:
    """In the second turn the model ends the reasoning of its first; the audit reads it as the session did."""
    renderer = renderer_of("thinking_kept")
    played = play(
        tmp_path / "a", renderer, Player(renderer.tokenizer, ("I <say>open</say>", "on.</think><say>red</say>"))
    )
    message = played[0].steps[1].message
    assert (message["reasoning_content"], message["content"]) == ("on.", "<say>red</say>")
    assert serious(audit(tmp_path / "a")) == []
    wrong = replace(played[0].steps[1], message={**message, "reasoning_content": "", "content": message["text"]})
    save_renderer(renderer, tmp_path / "b" / "renderer")
    with TrajectoryStore(tmp_path / "b" / "trajectories", "a") as store:
        store.append(replace(played[0], steps=(played[0].steps[0], wrong, *played[0].steps[2:])))
    assert [f.check for f in serious(audit(tmp_path / "b")) if f.check == "message_text"] == ["message_text"]


def test_without_a_tokenizer_ids_are_still_compared(bench: Bench) -> None:
    step, before = bench.clean[-1].steps[2], bench.clean[-1].steps[1]
    ids = step.prompt_ids.copy()
    ids[before.length - 2] += 1
    for number, each in enumerate((step, replace(step, prompt_ids=ids))):
        folder = bench.folder / str(number)
        last = bench.clean[-1]
        with TrajectoryStore(folder / "trajectories", "a") as store:
            store.append(replace(last, steps=(*last.steps[:2], each)))
        found = [(f.check, f.step) for f in serious(audit(folder)) if f.check != "missing_samples"]
        assert found == [("not_extended", 2)] * number


def test_where_observations_are_cut_is_in_the_record_and_not_in_the_tokenizer(bench: Bench, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    bench.renderer.tokenizer.save_pretrained(plain)
    assert serious(audit(bench.folder / "clean", tokenizer=plain)) == []
    provenance = {**bench.clean[-1].provenance, "max_observation_tokens": 13}
    found = bench.findings(0, provenance=provenance)
    assert [(f.check, f.step) for f in found] == [("prompt_drift", 1), ("prompt_drift", 2)]
    assert all(f.text.startswith("12 of the observation's") for f in found)
    assert all("max_observation_tokens is 13" in f.text for f in found)
