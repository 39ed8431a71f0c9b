"""Log-probabilities without logits: values, gradients and memory, against the plain formula."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stepgym.model import logprobs as module
from stepgym.model.liger import liger_scores, one_temperature
from stepgym.model.logprobs import TokenScores, scores_from_logits, token_scores
from stepgym.model.output_head import PLAIN, HeadForm, find_head_form


def example(
    seed: int = 0, count: int = 11, width: int = 4, vocabulary: int = 20, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "hidden": random(count, width),
        "weight": random(vocabulary, width),
        "bias": random(vocabulary),
        "targets": torch.randint(0, vocabulary, (count,), generator=generator),
        "temperature": torch.rand(count, generator=generator) + 0.5,
    }


def plainly(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    form: HeadForm = PLAIN,
) -> TokenScores:
    """From the definitions, in float64."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    logits = logits * form.scale
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    heat = torch.ones(len(hidden)) if temperature is None else temperature
    table = torch.log_softmax(logits / heat.double()[:, None], -1)
    chosen = table[torch.arange(len(targets)), targets]
    return TokenScores(chosen, -(table.exp() * table).sum(-1), logits.argmax(-1) == targets)


def gradients(scores: TokenScores, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    upstream = torch.linspace(-1, 2, len(scores.logprob), dtype=scores.logprob.dtype)
    return list(torch.autograd.grad(scores.logprob, leaves, upstream))


def test_entropy_and_greedy_by_hand() -> None:
    weight = torch.eye(3, dtype=torch.float64)
    hidden = torch.log(torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64))
    scores = token_scores(hidden, weight, torch.tensor([0, 1]), entropy=True, greedy=True)
    assert scores.logprob.exp().tolist() == pytest.approx([0.5, 1 / 3])
    assert scores.entropy is not None
    assert scores.greedy is not None
    assert scores.entropy.tolist() == pytest.approx([1.5 * 0.6931471805599453, 1.0986122886681098])
    assert scores.greedy[0].item() is True
    # At temperature 1/2 probabilities are squared and normalised: 4/6, 1/6, 1/6.
    sharper = token_scores(hidden, weight, torch.tensor([0, 1]), temperature=torch.tensor([0.5, 1.0]))
    assert sharper.logprob.exp().tolist() == pytest.approx([4 / 6, 1 / 3])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(0, 13),
    chunk=st.sampled_from([None, 1, 39, 60, 140]),
    trained=st.sets(st.sampled_from(["hidden", "weight", "bias"]), min_size=1),
    absent=st.sets(st.sampled_from(["bias", "temperature"])),
    form=st.sampled_from([PLAIN, HeadForm(0.25), HeadForm(cap=2.0), HeadForm(3.0, 1.5)]),
)
def test_values_and_gradients_are_those_of_the_formula(
    seed: int, count: int, chunk: int | None, trained: set[str], absent: set[str], form: HeadForm
) -> None:
    inputs = example(seed, count) | dict.fromkeys(absent)
    leaves = []
    for name in ("hidden", "weight", "bias"):
        if inputs[name] is not None:
            inputs[name].requires_grad_(name in trained)
            leaves += [inputs[name]] if name in trained else []
    ours = token_scores(**inputs, form=form, entropy=True, greedy=True, chunk_logits=chunk)
    theirs = plainly(**inputs, form=form)
    assert torch.allclose(ours.logprob, theirs.logprob, atol=1e-10)
    assert ours.entropy is not None
    assert theirs.entropy is not None
    assert torch.allclose(ours.entropy, theirs.entropy, atol=1e-10)
    assert ours.greedy is not None
    assert theirs.greedy is not None
    assert torch.equal(ours.greedy, theirs.greedy)
    assert not ours.entropy.requires_grad
    assert ours.logprob.requires_grad == bool(leaves)
    if leaves:
        for one, other in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
            assert torch.allclose(one, other, atol=1e-10)


@pytest.mark.parametrize("chunk", [None, 60])
def test_float32_is_as_exact_as_the_plain_form(chunk: int | None) -> None:
    """Logits of some hundreds: what is nearly certain and what is nearly impossible."""
    inputs = example(dtype=torch.float32) | {"bias": None}
    inputs["hidden"] = (inputs["hidden"].detach() * 100).requires_grad_()
    exact = plainly(**inputs)
    scores = token_scores(**inputs, entropy=True, chunk_logits=chunk)
    assert scores.entropy is not None
    assert exact.entropy is not None
    assert exact.logprob.min() < -500
    assert exact.logprob.max() > -1e-6
    assert torch.allclose(scores.logprob.double(), exact.logprob, rtol=1e-5, atol=1e-4)
    assert torch.allclose(scores.entropy.double(), exact.entropy, atol=1e-4)
    leaves = [inputs["hidden"], inputs["weight"]]
    for one, other in zip(gradients(scores, leaves), gradients(exact, leaves), strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("chunk", [None, 300])
def test_under_autocast_sums_stay_in_float32(chunk: int | None) -> None:
    inputs = example(1, 64, 32, 50, torch.float32) | {"bias": None}
    leaves = [inputs["hidden"], inputs["weight"]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = token_scores(**inputs, entropy=True, chunk_logits=chunk)
    assert scores.logprob.dtype == torch.float32
    exact = plainly(**inputs)
    assert 0 < (scores.logprob - exact.logprob).abs().max() < 0.2
    for one, other in zip(gradients(scores, leaves), gradients(exact, leaves), strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_bfloat16_weights_have_bfloat16_gradients() -> None:
    inputs = example(1, 64, 32, 50, torch.bfloat16)
    scores = token_scores(**inputs, chunk_logits=300)
    assert scores.logprob.dtype == torch.float32
    leaves = [inputs["hidden"], inputs["weight"], inputs["bias"]]
    assert [gradient.dtype for gradient in gradients(scores, leaves)] == [torch.bfloat16] * 3


def test_within_a_checkpoint_and_twice_through_the_same_graph() -> None:
    inputs = example()
    leaves = [inputs["hidden"], inputs["weight"], inputs["bias"]]
    expected = gradients(plainly(**inputs), leaves)
    for chunk in (None, 60):
        logprob = token_scores(**inputs, chunk_logits=chunk).logprob
        upstream = torch.linspace(-1, 2, len(logprob), dtype=logprob.dtype)
        first = torch.autograd.grad(logprob, leaves, upstream, retain_graph=True)
        second = torch.autograd.grad(logprob, leaves, upstream)

        def again(hidden: torch.Tensor, chunk: int | None = chunk) -> torch.Tensor:
            return token_scores(hidden * 1.0, **{k: v for k, v in inputs.items() if k != "hidden"}, chunk_logits=chunk)[
                0
            ]

        third = torch.autograd.grad(checkpoint(again, inputs["hidden"], use_reentrant=False), leaves, upstream)
        for found in (first, second, third):
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(one, other, atol=1e-10)


class Largest(TorchDispatchMode):
    """Watches every operation: elements of the largest result, and how many multiplications of matrices there were."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize(
    ("frozen", "products"),
    [(False, 5 * (1 + 3)), (True, 5 * 2)],  # five chunks: logits, again, two gradients; or logits, one gradient
)
def test_no_more_than_the_chunk_of_logits_is_ever_held(frozen: bool, products: int) -> None:
    inputs = example(count=50, vocabulary=100) | {"bias": None}
    inputs["weight"].requires_grad_(not frozen)
    with Largest() as watch:
        scores = token_scores(**inputs, entropy=True, greedy=True, chunk_logits=1000)
        scores.logprob.sum().backward()
    assert watch.largest <= 2 * 1000  # two buffers, made as one
    assert watch.products == products


def test_what_fits_in_one_chunk_is_not_computed_again() -> None:
    inputs = example() | {"bias": None}
    with Largest() as watch:
        token_scores(**inputs).logprob.sum().backward()
    assert watch.products == 3


def test_without_gradients_nothing_is_kept() -> None:
    inputs = example() | {"bias": None}
    with torch.no_grad(), Largest() as watch:
        assert not token_scores(**inputs, chunk_logits=60).logprob.requires_grad
    assert watch.products == 4


def test_peak_memory_of_a_process_is_far_below_the_logits() -> None:
    """4096 x 32768 logits are 512 MiB; half a gigabyte of them is never there."""
    program = """
import resource, torch
from stepgym.model.logprobs import token_scores
torch.set_num_threads(1)
hidden, weight = torch.randn(4096, 16, requires_grad=True), torch.randn(32768, 16, requires_grad=True)
token_scores(hidden[:8], weight, torch.arange(8)).logprob.sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_scores(hidden, weight, torch.arange(4096), entropy=True).logprob.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150


def test_masked_logits_have_an_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    scores = scores_from_logits(logits, torch.tensor([0]), entropy=True)
    assert scores.entropy is not None
    assert scores.entropy.item() == pytest.approx(0.6931471805599453)


def test_compiled_for_cuda_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes over the logits that are compiled on CUDA, traced and run on the CPU."""
    torch._dynamo.reset()
    compiled = {f: torch.compile(f, backend="aot_eager") for f in (module._reduced, module._weighed)}
    monkeypatch.setattr(module, "_compiled", compiled.get)
    original = module._Head.__init__

    def as_on_cuda(self: Any, *inputs: Any) -> None:
        original(self, *inputs)
        self._fused, self._buffers = True, None

    monkeypatch.setattr(module._Head, "__init__", as_on_cuda)
    for form, chunk in ((PLAIN, None), (PLAIN, 60), (HeadForm(cap=2.0), 60)):
        inputs = example()
        leaves = [inputs["hidden"], inputs["weight"], inputs["bias"]]
        ours = token_scores(**inputs, form=form, entropy=True, chunk_logits=chunk)
        theirs = plainly(**inputs, form=form)
        assert torch.allclose(ours.logprob, theirs.logprob, atol=1e-10)
        for one, other in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
            assert torch.allclose(one, other, atol=1e-10)


@pytest.mark.parametrize("entropy", [False, True])
def test_liger_kernel_gives_the_same(entropy: bool) -> None:
    """Liger-Kernel's form for the CPU stands for its fused kernel."""
    pytest.importorskip("liger_kernel")
    inputs = example(dtype=torch.float32)
    hidden, weight, targets = inputs["hidden"], inputs["weight"], inputs["targets"]
    theirs = TokenScores(*liger_scores(hidden, weight, targets, 0.7, entropy))
    ours = token_scores(hidden, weight, targets, temperature=torch.full((11,), 0.7), entropy=entropy)
    assert torch.allclose(theirs.logprob, ours.logprob, atol=1e-5)
    assert (theirs.entropy is None) == (not entropy)
    if theirs.entropy is not None and ours.entropy is not None:
        assert torch.allclose(theirs.entropy, ours.entropy, atol=1e-5)
        assert not theirs.entropy.requires_grad
    for one, other in zip(gradients(theirs, [hidden, weight]), gradients(ours, [hidden, weight]), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_one_temperature() -> None:
    assert one_temperature(None) == 1.0
    assert one_temperature(torch.tensor([0.5, 0.5])) == 0.5
    assert one_temperature(torch.tensor([0.5, 1.0])) is None


@pytest.mark.parametrize(
    ("kind", "options", "form"),
    [
        ("Qwen2", {}, PLAIN),
        ("Gemma2", {}, HeadForm(cap=30.0)),
        ("Gemma2", {"final_logit_softcapping": 3.0}, HeadForm(cap=3.0)),
        ("Granite", {"logits_scaling": 4.0}, HeadForm(0.25)),
        ("Cohere", {"logit_scale": 0.0625, "use_qk_norm": False}, HeadForm(0.0625)),
    ],
)
def test_the_form_of_a_models_head_is_found(kind: str, options: dict[str, Any], form: HeadForm) -> None:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    made: Any = transformers
    torch.manual_seed(0)
    model = getattr(made, f"{kind}ForCausalLM")(getattr(made, f"{kind}Config")(**sizes | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
    assert find_head_form(model) == form
    ids = torch.arange(12)[None]
    hidden = model.base_model(input_ids=ids).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()
    ours = token_scores(hidden, head.weight, ids[0, 1:], bias=head.bias, form=form).logprob
    theirs = scores_from_logits(model(input_ids=ids).logits[0, :-1], ids[0, 1:]).logprob
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_head_of_another_kind_has_no_form() -> None:
    """What the config does not tell is not guessed."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model: Any = transformers.LlamaForCausalLM(config).eval()
    assert find_head_form(model) == PLAIN
    model.forward = _with_doubled_logits(model.forward)
    assert find_head_form(model) is None


def _with_doubled_logits(forward: Any) -> Any:
    def doubled(*inputs: Any, **options: Any) -> Any:
        out = forward(*inputs, **options)
        out.logits = out.logits * 2
        return out

    return doubled
