from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stepgym.errors import UserError
from stepgym.train.forward_module import _hidden_from_kernels, decoder_layers
from stepgym.train.packs.batch import make_batch
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig


def scored_alone(policy: Policy, steps: list, temperature: float) -> torch.Tensor:
    """Log-probabilities of all responses through the whole model, one step at a time."""
    parts = []
    for step in steps:
        ids = torch.from_numpy(step.full_ids.astype("int64"))
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0] / temperature
        table = torch.log_softmax(logits, -1)
        start = len(step.prompt_ids)
        parts.append(table[torch.arange(start - 1, len(ids) - 1), ids[start:]])
    return torch.cat(parts)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "gemma2", "granite"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_the_plain_model(make: SimpleNamespace, architecture: str, temperature: float) -> None:
    options = {"logits_scaling": 4.0} if architecture == "granite" else {}
    policy = Policy(make.model(architecture, **options), PolicyConfig(device="cpu", micro_batch_tokens=80))
    trajectory = make.trajectory(4, turns=4, breaks=(2,), temperature=temperature)
    batch = make_batch([[trajectory]])
    found = policy.logprobs(policy.micro_batches(batch), len(batch.tokens))
    with torch.no_grad():
        expected = scored_alone(policy, list(trajectory.steps), temperature)
    assert torch.allclose(found, expected, atol=2e-5)
    assert policy.forward_module._head_form is not None  # soft cap and scaled logits included


def test_dropout_is_off_and_the_model_is_left_in_evaluation_mode(make: SimpleNamespace) -> None:
    model = make.model("llama", attention_dropout=0.5)
    policy = Policy(model, PolicyConfig(device="cpu", gradient_checkpointing=True))
    batch = make_batch([[make.trajectory(turns=3)]])
    (micro_batch,) = policy.micro_batches(batch)
    with policy.training():
        assert policy.model.training
        one, two = policy.score(micro_batch).logprob, policy.score(micro_batch).logprob
    assert torch.equal(one, two)
    assert not policy.model.training


def test_gradient_checkpointing_gives_the_same_gradient(make: SimpleNamespace) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = Policy(make.model(), PolicyConfig(device="cpu", gradient_checkpointing=checkpointing))
        (micro_batch,) = policy.micro_batches(make_batch([[make.trajectory(turns=3)]]))
        with policy.training():
            policy.score(micro_batch).logprob.sum().backward()
        gradients.append(make.gradient(policy))
    assert torch.allclose(*gradients, atol=1e-6)


def test_models_with_recurrent_layers_are_given_padded_rows_and_say_so(make: SimpleNamespace) -> None:
    import transformers

    config = transformers.MambaConfig(vocab_size=89, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0)
    torch.manual_seed(0)
    policy = Policy(transformers.MambaForCausalLM(config), PolicyConfig(device="cpu"))
    assert policy.layout == "merged"
    (note,) = policy.notes
    assert "MambaForCausalLM" in note
    assert "padded rows" in note
    trajectory = make.trajectory(4, turns=4, breaks=(2,))
    batch = make_batch([[trajectory]])
    found = policy.logprobs(policy.micro_batches(batch), len(batch.tokens))
    with torch.no_grad():
        assert torch.allclose(found, scored_alone(policy, list(trajectory.steps), 1.0), atol=2e-5)
    with pytest.raises(UserError, match=r"policy\.layout: 'tree' does not work here: Mamba"):
        Policy(transformers.MambaForCausalLM(config), PolicyConfig(device="cpu", layout="tree"))


def test_linear_attention_layers_are_found_by_trying(make: SimpleNamespace) -> None:
    import transformers

    config = transformers.Qwen3NextConfig(
        vocab_size=89,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        layer_types=["linear_attention", "full_attention"],
        pad_token_id=0,
    )
    torch.manual_seed(0)
    policy = Policy(transformers.Qwen3NextForCausalLM(config), PolicyConfig(device="cpu"))
    assert policy.layout == "merged"
    assert "linear-attention" in policy.notes[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_leak_as_small_as_rounding_is_found(dtype: str) -> None:
    """Short convolutions of a model that has not learned to use them yet."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Lfm2Config(**{**SMALL, "num_hidden_layers": 8}, full_attn_idxs=list(range(7)))
    policy = Policy(transformers.Lfm2ForCausalLM(config), PolicyConfig(device="cpu", dtype=dtype))
    assert "does not leave the past to attention alone" in policy.forward_module.branches_not


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "granite", "qwen3_moe"])
def test_rounding_is_not_taken_for_a_leak(make: SimpleNamespace, architecture: str, dtype: str) -> None:
    options = {"moe_intermediate_size": 16} if architecture == "qwen3_moe" else {}
    assert Policy(make.model(architecture, **options), PolicyConfig(device="cpu", dtype=dtype)).layout == "tree"


SMALL = {
    "vocab_size": 89,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "index_n_heads": 2,
    "index_head_dim": 8,
}


def random_model(name: str, config: str | None = None, **options: object) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, config or f"{name}Config")(**{**SMALL, **options})
    model = getattr(transformers, f"{name}ForCausalLM")(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (
            "Qwen2Moe",
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1, "num_experts": 4},
            "keeps its sliding window from the kernel",
        ),
        ("Phimoe", {"sliding_window": 16, "num_local_experts": 2}, "keeps its sliding window from the kernel"),
        (
            "Llama4",
            {
                "config": "Llama4TextConfig",
                "attention_chunk_size": 16,
                "head_dim": 8,
                "num_local_experts": 2,
                "intermediate_size_mlp": 24,
            },
            "cannot be given another attention",
        ),
        ("DeepseekV32", {"index_topk": 512, **LATENT}, "selects what its layers attend to"),
    ],
)
def test_attention_that_kernels_are_not_told_of_is_not_given_forests(
    make: SimpleNamespace, name: str, options: dict[str, object], reason: str
) -> None:
    """It differs from plain causal attention on long paths only, which the trial of a model has none of."""
    model = random_model(name, **options)
    steps = list(make.trajectory(4, turns=9, breaks=(2,), response=6).steps)
    assert max(step.length for step in steps) > 60
    policy = Policy(model, PolicyConfig(device="cpu"))
    assert reason in policy.forward_module.branches_not
    batch = make_batch([[make.trajectory(4, turns=9, breaks=(2,), response=6)]])
    found = policy.logprobs(policy.micro_batches(batch), len(batch.tokens))
    with torch.no_grad():
        assert torch.allclose(found, scored_alone(policy, steps, 1.0), atol=2e-5)


def test_chunks_of_the_context_are_seen_in_a_config() -> None:
    import transformers

    config = transformers.Llama4TextConfig(**SMALL, head_dim=8, num_local_experts=2, intermediate_size_mlp=24)
    model = transformers.Llama4TextModel(config)
    assert _hidden_from_kernels(model, set()) == "attends within chunks of its context"


def test_a_window_that_the_kernel_is_told_of_keeps_the_forest(make: SimpleNamespace) -> None:
    for options in ({"sliding_window": 16}, {"sliding_window": None}):
        assert Policy(make.model("mistral", **options), PolicyConfig(device="cpu")).layout == "tree"
    unused = random_model("Qwen2Moe", sliding_window=16, use_sliding_window=False, num_experts=4)
    assert Policy(unused, PolicyConfig(device="cpu")).layout == "tree"


def test_positions_that_depend_on_what_is_computed_together_are_noted(make: SimpleNamespace) -> None:
    for kind, noted in (("dynamic", True), ("linear", False), ("default", False)):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
        model = make.model("llama", rope_parameters=rope, max_position_embeddings=32)
        notes = Policy(model, PolicyConfig(device="cpu")).notes
        assert any("'dynamic'" in note for note in notes) == bool(notes) == noted


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Mixtral", {"router_jitter_noise": 0.5, "num_local_experts": 4}),
        ("Phimoe", {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "num_local_experts": 4}),
        ("Bloom", {"hidden_dropout": 0.5, "n_layer": 2, "n_head": 2}),
        ("OPT", {"layerdrop": 0.5, "dropout": 0.5, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    ],
)
def test_checkpointed_layers_add_no_noise_of_their_own(
    make: SimpleNamespace, name: str, options: dict[str, object]
) -> None:
    model = random_model(name, **options)
    policy = Policy(model, PolicyConfig(device="cpu", gradient_checkpointing=True))
    passes: list[int] = []
    inside = next(module for module in decoder_layers(model)[0].modules() if isinstance(module, torch.nn.Linear))
    inside.register_forward_hook(lambda *_: passes.append(1))
    (micro_batch,) = policy.micro_batches(make_batch([[make.trajectory(turns=3)]]))
    plain = policy.score(micro_batch).logprob
    with policy.training():
        passes.clear()
        scored = policy.score(micro_batch).logprob
        once = len(passes)
        scored.sum().backward()
    assert torch.equal(scored, plain)
    assert len(passes) == 2 * once > 0  # what was not kept is computed again


def test_kernels_are_refused_where_they_do_not_work(make: SimpleNamespace) -> None:
    with pytest.raises(UserError, match=r"policy\.attention: 'flex' has no gradient on cpu; use segments"):
        Policy(make.model(), PolicyConfig(device="cpu", attention="flex"))


def test_the_model_stays_usable_as_it_was(make: SimpleNamespace, tmp_path: Path) -> None:
    plain, model = make.model(), make.model()
    policy = Policy(model, PolicyConfig(device="cpu"))
    ids = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        for attention_mask in (None, mask):
            one, two = (m(input_ids=ids, attention_mask=attention_mask).logits[:, 5:] for m in (plain, policy.model))
            assert torch.allclose(one, two, atol=1e-5)
    generated = [m.generate(ids[:1], max_new_tokens=5, do_sample=False) for m in (plain, policy.model)]
    assert torch.equal(*generated)
    policy.save(tmp_path)
    assert "stepgym" not in (tmp_path / "config.json").read_text()


def test_bfloat16_computes_and_returns_float32(make: SimpleNamespace) -> None:
    batch = make_batch([[make.trajectory(turns=3)]])
    exact = make.policy().logprobs(make.policy().micro_batches(batch), len(batch.tokens))
    for config in (PolicyConfig(device="cpu", autocast="bfloat16"), PolicyConfig(device="cpu", dtype="bfloat16")):
        policy = Policy(make.model(), config)
        rough = policy.logprobs(policy.micro_batches(batch), len(batch.tokens))
        assert rough.dtype == torch.float32
        assert 0 < (rough - exact).abs().max() < 0.5


def test_a_frozen_copy_stays_when_the_policy_moves(make: SimpleNamespace) -> None:
    policy = make.policy()
    reference = policy.frozen_copy()
    batch = make_batch([[make.trajectory()]])
    before = reference.logprobs(reference.micro_batches(batch), len(batch.tokens))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1)
    assert torch.equal(reference.logprobs(reference.micro_batches(batch), len(batch.tokens)), before)
    # What the policy has become is untouched by it.
    moved = policy.logprobs(policy.micro_batches(batch), len(batch.tokens))
    assert float((moved - before).abs().max()) > 0.01


def test_bad_models_and_devices_are_refused_in_one_line(make: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model '.*nothing' cannot be loaded: [^\n]+$"):
        Policy.load(tmp_path / "nothing", PolicyConfig(device="cpu"))
    with pytest.raises(UserError, match="device 'gpu' is not one"):
        Policy(make.model(), PolicyConfig(device="gpu"))


def test_a_saved_model_is_loaded(make: SimpleNamespace, tmp_path: Path) -> None:
    model = make.model()
    model.save_pretrained(tmp_path)
    policy = Policy.load(tmp_path, PolicyConfig(device="cpu"))
    for one, two in zip(policy.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_short_paths_that_share_little_are_padded_on_the_cpu_and_give_the_same(make: SimpleNamespace) -> None:
    apart = make_batch([[make.trajectory(i, task=f"task {i}", turns=3, breaks=())] for i in range(4)])
    alike = make_batch([make.group(1, [1, 0, 1, 0, 1, 0], turns=(1,))])
    for batch, padded in ((apart, True), (alike, False)):
        found = []
        for layout in ("auto", "tree"):
            policy = make.policy(layout=layout)
            micro_batches = policy.micro_batches(batch)
            assert all((micro.tree is None) == (padded and layout == "auto") for micro in micro_batches)
            found.append(policy.logprobs(micro_batches, len(batch.tokens)))
        assert torch.allclose(*found, atol=2e-5)
