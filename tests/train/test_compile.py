"""Compiled decoder layers: the same values and gradients, few compilations, and the plain way for all but forests.

Layers are traced and differentiated as on CUDA, and run by torch's own operations; one slow test makes C++ of them.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex

from stepgym.train import compile as module
from stepgym.train.attention import flex, segments
from stepgym.train.compile import compile_layers
from stepgym.train.packs.batch import make_batch
from stepgym.train.packs.micro_batch import Tree
from stepgym.train.policy import Policy
from stepgym.train.policy_config import PolicyConfig

CPU = torch.device("cpu")


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Counts what is compiled; compiled layers run by torch's own operations."""
    torch._dynamo.reset()
    counting = CompileCounterWithBackend("aot_eager")
    done: dict[Any, Any] = {}

    def compiled(forward: Callable[..., Any]) -> Any:
        return done.setdefault(forward, torch.compile(forward, backend=counting))

    monkeypatch.setattr(module, "_compiled", compiled)
    yield counting
    torch._dynamo.reset()


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's own unfused form, which has a gradient on the CPU too."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_warn_once", lambda *inputs, **options: None)
    monkeypatch.setattr(flex, "_compiled", lambda: torch_flex.flex_attention)


def forest(size: int) -> tuple[torch.Tensor, Tree]:
    """A stem of `size` nodes with branches of 5 and 4, and another root: ids and the forest."""
    ends = [size + 9] * size + [size + 5] * 5 + [size + 9] * 4 + [size + 15] * 6
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 89, (1, size + 15), generator=generator), Tree.of(torch.tensor(ends).int().numpy())


def hidden(model: Any, kernel: ModuleType, size: int) -> torch.Tensor:
    ids, tree = forest(size)
    position = torch.from_numpy(flex.depths(tree.end))[None]
    room = kernel.bucket(ids.shape[1]) - ids.shape[1]
    ids, position = (torch.nn.functional.pad(tensor, (0, room)) for tensor in (ids, position))
    out = model.base_model(
        input_ids=ids,
        position_ids=position,
        attention_mask=torch.zeros(1, 1, 1, 1),
        use_cache=False,
        stepgym_tree=kernel.prepare(tree, CPU),
    )
    found: torch.Tensor = out.last_hidden_state[:, : len(tree.end)]
    return found


def gradient(model: Any, kernel: ModuleType, size: int) -> torch.Tensor:
    model.zero_grad()
    hidden(model, kernel, size).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.base_model.parameters()])


def layers(model: Any) -> list[torch.nn.Module]:
    return list(model.base_model.layers)


@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [
        pytest.param("gemma2", flex, id="gemma2-flex"),  # layers with and without a window; caps on scores
        pytest.param("qwen3", flex, id="qwen3-flex", marks=pytest.mark.slow),
        pytest.param("qwen3", segments, id="qwen3-segments", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("unfused")
def test_gradients_are_those_of_plain_layers(
    make: SimpleNamespace, counter: Any, architecture: str, kernel: ModuleType
) -> None:
    options = {"sliding_window": 7} if architecture == "gemma2" else {}
    model = make.model(architecture, **options)
    kernel.register()
    model.set_attn_implementation(kernel.NAME)
    sizes = (20, 150)
    plain = [gradient(model, kernel, size) for size in sizes]
    compile_layers(layers(model))
    assert counter.frame_count == 0
    for size, expected in zip(sizes, plain, strict=True):
        found = gradient(model, kernel, size)
        assert (found - expected).norm() < 1e-5 * expected.norm()
    before = counter.frame_count
    assert before > 0
    for size in (30, 300):
        gradient(model, kernel, size)
    assert counter.frame_count == before  # neither a length nor a forest nor a layer compiles again


@pytest.mark.usefixtures("unfused")
def test_flex_is_compiled_within_the_layer(make: SimpleNamespace, counter: Any) -> None:
    model = make.model("qwen3")
    flex.register()
    model.set_attn_implementation(flex.NAME)
    compile_layers(layers(model))
    gradient(model, flex, 150)
    assert counter.frame_count == 1
    with torch.no_grad():
        hidden(model, flex, 150)
    assert counter.frame_count == 2


def test_with_checkpoints_the_gradient_is_the_same(make: SimpleNamespace, counter: Any) -> None:
    model = make.model("qwen3")
    segments.register()
    model.set_attn_implementation(segments.NAME)
    expected = gradient(model, segments, 20)
    compile_layers(layers(model))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    assert torch.allclose(gradient(model, segments, 20), expected, atol=1e-5, rtol=1e-4)
    assert counter.frame_count > 0


def test_sampling_is_not_compiled(make: SimpleNamespace, counter: Any) -> None:
    model = make.model("qwen3").eval()
    segments.register()
    model.set_attn_implementation(segments.NAME)
    ids = torch.arange(7)[None]
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    compile_layers(layers(model))
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert counter.frame_count == 0


def test_names_stay_and_a_copy_has_weights_of_its_own(make: SimpleNamespace, counter: Any) -> None:
    model = make.model("qwen3")
    segments.register()
    model.set_attn_implementation(segments.NAME)
    names = list(model.state_dict())
    compile_layers(layers(model))
    compile_layers(layers(model))
    assert list(model.state_dict()) == names
    before = hidden(model, segments, 20)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert torch.equal(hidden(twin, segments, 20), before)
    assert not torch.allclose(hidden(model, segments, 20), before)


def test_a_policy_compiles_where_it_is_asked_to(make: SimpleNamespace, counter: Any) -> None:
    batch = make_batch([make.group(3, [0.0, 1.0])])
    found = []
    for wanted in ("none", "auto", "layers"):
        policy = Policy(make.model(), PolicyConfig(device="cpu", compile=wanted))
        found.append(policy.logprobs(policy.micro_batches(batch), len(batch.tokens)))
        assert (counter.frame_count > 0) == (wanted == "layers")
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2], atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_to_machine_code(make: SimpleNamespace) -> None:
    torch._dynamo.reset()
    model = make.model("qwen3")
    segments.register()
    model.set_attn_implementation(segments.NAME)
    expected = gradient(model, segments, 40)
    compile_layers(layers(model))
    found = gradient(model, segments, 40)
    assert (found - expected).norm() < 1e-5 * expected.norm()
