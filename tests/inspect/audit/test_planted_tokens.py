"""Faults in tokens, planted one at a time in clean runs: each is named, at its trajectory, step and token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepgym.record.step import Step

TURN_END = "<|im_end|>"


def longer(step: Step, more: list[int], **changes: Any) -> dict[str, Any]:
    """A step's changes that put more tokens after its response, as sampled and trained as the rest."""
    ids = [*step.response_ids.tolist(), *more]  # type: ignore[union-attr]
    return {
        "response_ids": ids,
        "loss_mask": np.ones(len(ids)),
        "logprobs": np.linspace(-0.3, -0.2, len(ids)),
        "weights_versions": (("3", 0, len(ids)),),
        **changes,
    }


def place(finding: Any) -> tuple[str, str, int | None, int | None]:
    return finding.check, finding.trajectory, finding.step, finding.token


def test_a_mask_that_is_neither_0_nor_1(guess: Any) -> None:
    step = guess.clean[1].steps[2]
    mask = np.ones(len(step.response_ids))
    mask[3] = 2
    found = guess.only(guess.step(1, 2, loss_mask=mask))
    assert place(found) == ("unsampled_token_trained", "train/1/1/1/0", 2, len(step.prompt_ids) + 3)
    assert "neither 0 nor 1" in found.text


def test_a_trained_token_that_no_weights_sampled(guess: Any) -> None:
    step = guess.clean[1].steps[2]
    changes = longer(step, [5, 6], weights_versions=step.weights_versions)
    changes["response_ids"] = [5, 6, *step.response_ids.tolist()]
    changes["weights_versions"] = (("3", 2, len(step.response_ids) + 2),)
    found = [f for f in guess.audit(guess.step(1, 2, **changes)).findings if f.check == "unsampled_token_trained"]
    assert [place(f) for f in found] == [("unsampled_token_trained", "train/1/1/1/0", 2, len(step.prompt_ids))]


def test_an_end_of_turn_appended_after_a_stop_string(colours: Any) -> None:
    step = colours.clean[3].steps[1]
    end = colours.renderer.terminator_id
    found = colours.only(colours.step(3, 1, **longer(step, [end])))
    assert place(found) == ("appended_end_of_turn", "train/1/train-1/1/0", 1, step.length)
    assert f"⟦{TURN_END}⟧" in found.context


def test_an_end_of_turn_appended_with_a_logprob_of_zero(guess: Any) -> None:
    step = guess.clean[0].steps[1]
    logprobs = step.logprobs.copy()
    logprobs[-1] = 0.0
    found = guess.only(guess.step(0, 1, logprobs=logprobs))
    assert place(found) == ("appended_end_of_turn", "train/1/1/0/0", 1, step.length - 1)
    assert f"⟦{TURN_END}⟧" in found.context


def test_logprobs_of_zero_are_no_fault_where_they_are_common(guess: Any) -> None:
    """A model that is sure gives many tokens a logprob of exactly 0; then those of ends of turns prove nothing."""

    def sure(step: Step) -> Step:
        assert step.logprobs is not None
        return replace(step, logprobs=np.where(np.arange(len(step.logprobs)) % 3 == 0, 0.0, -0.2))

    trajectories = [replace(t, steps=tuple(map(sure, t.steps))) for t in guess.clean]
    assert [f for f in guess.audit(trajectories).findings if f.severity != "note"] == []


def test_an_end_of_turn_appended_with_a_logprob_of_zero_shows_without_a_tokenizer(guess: Any) -> None:
    step = guess.clean[0].steps[1]
    logprobs = step.logprobs.copy()
    logprobs[-1] = 0.0
    found = guess.only(guess.step(0, 1, logprobs=logprobs), renderer=False)
    assert place(found) == ("appended_end_of_turn", "train/1/1/0/0", 1, step.length - 1)
    audit = guess.audit([], renderer=False)
    assert next(c for c in audit.checks if c.check == "appended_end_of_turn").skipped.startswith(
        "in part: no tokenizer"
    )


def test_padded_tokens_that_are_trained(guess: Any) -> None:
    step = guess.clean[0].steps[1]
    logprobs = step.logprobs.copy()
    logprobs[5:9] = 0.0
    found = guess.only(guess.step(0, 1, logprobs=logprobs))
    assert place(found) == ("unsampled_token_trained", "train/1/1/0/0", 1, len(step.prompt_ids) + 5)
    assert found.text.startswith("4 trained tokens in a row")


def test_an_end_of_turn_appended_beyond_the_tokens_asked_for(guess: Any) -> None:
    step = guess.clean[0].steps[2]
    asked = len(step.response_ids) - 1
    found = guess.only(guess.step(0, 2, max_tokens=asked))
    assert place(found) == ("appended_end_of_turn", "train/1/1/0/0", 2, step.length - 1)


def test_ends_of_turns_that_are_never_trained(guess: Any) -> None:
    def masked(step: Step) -> Step:
        mask = np.ones(len(step.response_ids))  # type: ignore[arg-type]
        mask[-1] = 0
        return replace(step, loss_mask=mask)

    trajectories = [replace(t, steps=tuple(map(masked, t.steps))) for t in guess.clean]
    audit = guess.audit(trajectories)
    found = [f for f in audit.findings if f.severity == "warning"]
    assert [f.check for f in found] == ["end_of_turn_untrained"]
    assert audit.statistics["end_of_turn"] == {"trained": 0, "masked": 18, "open": 0}


def test_one_masked_end_of_turn_is_a_note(guess: Any) -> None:
    step = guess.clean[4].steps[0]
    mask = np.ones(len(step.response_ids))
    mask[-1] = 0
    (found,) = guess.audit(guess.step(4, 0, loss_mask=mask)).findings[:1]
    assert found.severity == "note"
    assert place(found) == ("end_of_turn_untrained", "train/1/3/0/0", 0, step.length - 1)


def test_a_response_without_tokens(guess: Any) -> None:
    step = guess.clean[0].steps[2]
    none = {"response_ids": [], "loss_mask": [], "logprobs": [], "weights_versions": ()}
    message = {"role": "assistant", "content": "", "text": ""}
    found = guess.only(guess.step(0, 2, **none, message=message))
    assert place(found)[:3] == ("empty_response", "train/1/1/0/0", 2)
    assert found.token == len(step.prompt_ids)


@pytest.mark.parametrize("value", [0.25, float("nan"), float("-inf")])
def test_a_logprob_that_is_none(guess: Any, value: float) -> None:
    step = guess.clean[5].steps[0]
    logprobs = step.logprobs.copy()
    logprobs[4] = value
    found = guess.only(guess.step(5, 0, logprobs=logprobs))
    assert place(found) == ("logprob_values", "train/1/3/1/0", 0, len(step.prompt_ids) + 4)
    assert found.severity == ("warning" if value == float("-inf") else "error")


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_logprobs_that_are_one_number_stand_in_for_none(guess: Any, value: float) -> None:
    """Of the whole run, as an engine's that returns none; and of one response."""
    filled = [
        replace(t, steps=tuple(replace(s, logprobs=np.full(len(s.response_ids), value)) for s in t.steps))  # type: ignore[arg-type]
        for t in guess.clean
    ]
    found = [f for f in guess.audit(filled).findings if f.check == "logprob_values" and not f.trajectory]
    assert [f.severity for f in found] == ["error"]
    assert "none was recorded" in found[0].text


def test_a_response_with_one_number_for_all_logprobs(guess: Any) -> None:
    step = guess.clean[4].steps[1]
    found = guess.only(guess.step(4, 1, logprobs=np.full(len(step.response_ids), -1.0)))
    assert place(found) == ("logprob_values", "train/1/3/0/0", 1, len(step.prompt_ids))
    assert found.severity == "error"


def test_sampled_tokens_that_are_not_trained(guess: Any) -> None:
    step = guess.clean[1].steps[1]
    mask = np.ones(len(step.response_ids))
    mask[3:5] = 0
    found = guess.only(guess.step(1, 1, loss_mask=mask))
    assert place(found) == ("sampled_token_untrained", "train/1/1/1/0", 1, len(step.prompt_ids) + 3)
    assert found.severity == "warning"
    assert found.text.startswith("2 of ")


def test_policy_turns_without_logprobs(guess: Any) -> None:
    found = guess.only(guess.step(5, 1, logprobs=None))
    assert place(found) == ("logprobs_missing", "train/1/3/1/0", 1, None)


def test_scripted_turns_with_logprobs(guess: Any) -> None:
    scripted = [replace(s, sampler="scripted", logprobs=None, weights_versions=()) for s in guess.clean[5].steps]
    scripted[1] = replace(scripted[1], logprobs=guess.clean[5].steps[1].logprobs)
    found = guess.only(guess.trajectory(5, steps=tuple(scripted)))
    assert place(found) == ("logprobs_missing", "train/1/3/1/0", 1, None)
    assert "scripted" in found.text


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", 0.0, "temperature 0"),
        ("top_p", 0.9, "top_p 0.9"),
        ("top_k", 5, "top_k 5"),
        ("frequency_penalty", 0.5, "frequency_penalty 0.5"),
        ("logprobs_kind", "raw", "'raw'"),
    ],
)
def test_trained_turns_sampled_otherwise(guess: Any, field: str, value: Any, said: str) -> None:
    steps = [replace(s, sampling=replace(s.sampling, **{field: value})) for s in guess.clean[2].steps]
    audit = guess.audit(guess.trajectory(2, steps=tuple(steps)))
    found = [f for f in audit.findings if f.severity == "error"]
    assert [place(f) for f in found] == [("trained_as_sampled", "train/1/2/0/0", index, None) for index in range(3)]
    assert said in found[0].text


def test_turns_of_one_trajectory_sampled_in_two_ways(guess: Any) -> None:
    step = guess.clean[2].steps[1]
    found = guess.only(guess.step(2, 1, sampling=replace(step.sampling, temperature=0.7)))
    assert place(found) == ("sampling_changes", "train/1/2/0/0", 1, None)
    assert "temperature" in found.text


def test_a_prompt_over_the_limit(guess: Any) -> None:
    clean = guess.clean[2]
    limits = {**clean.provenance["limits"], "max_prompt_tokens": len(clean.steps[2].prompt_ids) - 10}
    found = guess.only(guess.trajectory(2, provenance={**clean.provenance, "limits": limits}))
    assert place(found) == ("over_limit", "train/1/2/0/0", 2, limits["max_prompt_tokens"])


def test_a_response_over_the_limit(guess: Any) -> None:
    clean = guess.clean[2]
    limits = {**clean.provenance["limits"], "max_response_tokens": 18}
    audit = guess.audit(guess.trajectory(2, provenance={**clean.provenance, "limits": limits}))
    found = [f for f in audit.findings if f.check == "over_limit"]
    assert [place(f) for f in found] == [("over_limit", "train/1/2/0/0", 1, len(clean.steps[1].prompt_ids) + 18)]


def test_a_turn_longer_than_its_own_max_tokens(guess: Any) -> None:
    step = guess.clean[2].steps[1]
    found = guess.only(guess.step(2, 1, max_tokens=12))
    assert place(found) == ("over_limit", "train/1/2/0/0", 1, len(step.prompt_ids) + 12)


def test_more_than_the_context_holds(guess: Any) -> None:
    clean = guess.clean[2]
    context = clean.steps[2].length - 3
    limits = {**clean.provenance["limits"], "context_length": context}
    found = guess.only(guess.trajectory(2, provenance={**clean.provenance, "limits": limits}))
    assert place(found) == ("over_limit", "train/1/2/0/0", 2, context)


def test_a_length_stop_that_used_no_length(guess: Any) -> None:
    step = guess.clean[2].steps[2]
    changes = longer(step, [], finish_reason="length", status="truncated")
    for name in ("response_ids", "loss_mask", "logprobs"):
        changes[name] = changes[name][:-1]
    changes["weights_versions"] = (("3", 0, len(step.response_ids) - 1),)
    found = guess.only(guess.step(2, 2, **changes))
    assert place(found) == ("finish_reason", "train/1/2/0/0", 2, step.length - 2)


def test_a_stop_that_nothing_stopped(guess: Any) -> None:
    step = guess.clean[2].steps[2]
    changes = longer(step, [])
    for name in ("response_ids", "loss_mask", "logprobs"):
        changes[name] = changes[name][:-1]
    changes["weights_versions"] = (("3", 0, len(step.response_ids) - 1),)
    found = guess.only(guess.step(2, 2, **changes))
    assert place(found) == ("end_of_response", "train/1/2/0/0", 2, step.length - 2)


def test_weights_versions_with_a_hole(guess: Any) -> None:
    step = guess.clean[2].steps[1]
    count = len(step.response_ids)
    mask = np.ones(count)
    mask[8:10] = 0
    audit = guess.audit(guess.step(2, 1, loss_mask=mask, weights_versions=(("3", 0, 8), ("3", 10, count))))
    assert {place(f) for f in audit.findings if f.severity != "note"} == {
        ("weights_spans", "train/1/2/0/0", 1, len(step.prompt_ids) + 10),
        ("sampled_token_untrained", "train/1/2/0/0", 1, len(step.prompt_ids) + 8),
    }


def test_weights_that_go_back_within_a_response(guess: Any) -> None:
    step = guess.clean[2].steps[1]
    spans = (("3", 0, 8), ("2", 8, len(step.response_ids)))
    audit = guess.audit(guess.step(2, 1, weights_versions=spans))
    found = {place(f) for f in audit.findings if f.severity != "note"}
    at = ("train/1/2/0/0", 1, len(step.prompt_ids) + 8)
    assert found == {("weights_spans", *at), ("stale_weights", *at)}


def test_weights_that_change_while_responses_are_sampled_are_no_fault(guess: Any) -> None:
    """Versions 3 and 4 in one response: then older tokens are a note, not a warning."""
    step = guess.clean[2].steps[1]
    audit = guess.audit(guess.step(2, 1, weights_versions=(("3", 0, 8), ("4", 8, len(step.response_ids)))))
    stale = [f for f in audit.findings if f.check == "stale_weights"]
    assert [f.severity for f in stale] == ["note"]
    assert audit.count("error") == audit.count("warning") == 0


def test_stale_weights(guess: Any) -> None:
    step = guess.clean[2].steps[1]
    found = guess.only(guess.step(2, 1, weights_versions=(("2", 0, len(step.response_ids)),)))
    assert place(found) == ("stale_weights", "train/1/2/0/0", 1, len(step.prompt_ids))
    assert found.severity == "warning"


def test_older_weights_are_by_the_nature_of_rollouts_that_overlap_with_training(guess: Any) -> None:
    (guess.folder / "config.yaml").write_text("overlap:\n  kind: async\n")
    step = guess.clean[2].steps[1]
    audit = guess.audit(guess.step(2, 1, weights_versions=(("2", 0, len(step.response_ids)),)))
    assert [f.severity for f in audit.findings if f.check == "stale_weights"] == ["note"]
    assert audit.count("error") == audit.count("warning") == 0


def test_an_iteration_sampled_with_older_weights_than_the_one_before(guess: Any) -> None:
    later = [
        replace(
            t,
            id=replace(t.id, iteration=2),
            seeds={"env": 1, "sampler": 10 * n},
            steps=tuple(replace(s, weights_versions=(("1", 0, len(s.response_ids)),)) for s in t.steps),  # type: ignore[arg-type]
        )
        for n, t in enumerate(guess.clean)
    ]
    found = guess.only([*guess.clean, *later])
    assert place(found) == ("stale_weights", "train/2/1/0/0", 0, len(guess.clean[0].steps[0].prompt_ids))
