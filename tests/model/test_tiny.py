from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.errors import UserError
from stepgym.model.tiny import BASE_TAGS, build_tiny_model, build_tiny_tokenizer, save_tiny_model

torch.set_num_threads(1)

CORPUS = [
    "Velor lives in Narn. Is Velor (Velor) older than 42 or 1337?\n<sql>SELECT name FROM people WHERE age > 12</sql>",
    "SELECT count(*) FROM people JOIN places ON people.place_id = places.place_id\nmünchen 日本",
] * 20
TAGS = ["<sql>", "</sql>"]
TOKENIZER = build_tiny_tokenizer(CORPUS, vocab_size=400, special_tokens=TAGS)


def test_a_name_has_the_same_tokens_wherever_it_stands():
    name = TOKENIZER.encode("Velor")
    assert len(name) == 1
    for before in ("", " ", "(", "\n", "a ", "'", ", ", "12", "<sql>", "."):
        for after in ("", " ", ")", "\n", "'", ",", "7", "</sql>"):
            ids = TOKENIZER.encode(before + "Velor" + after)
            assert ids == TOKENIZER.encode(before) + name + TOKENIZER.encode(after), (before, after)


def test_digits_stand_alone_and_tags_are_one_token():
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("2024")] == ["2", "0", "2", "4"]
    for tag in [*TAGS, *BASE_TAGS, "<|im_start|>", "<|im_end|>"]:
        assert len(TOKENIZER.encode(tag)) == 1, tag
    ids = TOKENIZER.encode("a<sql>b</sql><|im_end|>")
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "a<sql>b</sql>"


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_decoding_gives_back_what_was_encoded(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_the_initializer_range_is_the_spread_of_the_weights():
    for wanted in (0.02, 0.06):
        model, _ = build_tiny_model(CORPUS, special_tokens=TAGS, initializer_range=wanted)
        matrices = torch.cat([p.flatten() for p in model.parameters() if p.dim() == 2])
        assert float(matrices.detach().std()) == pytest.approx(wanted, rel=0.05)
    for wrong in (0.0, 1.0):
        with pytest.raises(UserError, match="initializer_range must be above 0 and below 1"):
            build_tiny_model(CORPUS, special_tokens=TAGS, initializer_range=wrong)


def test_model_is_deterministic_in_corpus_and_seed_also_across_processes():
    def weights(model):
        return torch.cat([p.flatten() for p in model.parameters()])

    state = torch.random.get_rng_state()
    first, tokenizer = build_tiny_model(CORPUS, seed=3, special_tokens=TAGS)
    assert torch.equal(state, torch.random.get_rng_state())
    other, _ = build_tiny_model(CORPUS, seed=4, special_tokens=TAGS)
    assert not torch.equal(weights(first), weights(other))
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from stepgym.model.tiny import build_tiny_model\n"
        f"model, tokenizer = build_tiny_model({CORPUS!r}, seed=3, special_tokens={TAGS!r})\n"
        "checksum = sum(float(p.detach().double().sum()) for p in model.parameters())\n"
        "print(checksum, sorted(tokenizer.get_vocab().items()))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    checksum = sum(float(p.detach().double().sum()) for p in first.parameters())
    assert printed == f"{checksum} {sorted(tokenizer.get_vocab().items())}"


def test_saved_folder_loads_to_the_same_model(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = build_tiny_model(CORPUS, layers=1, width=32, heads=2, key_value_heads=1, special_tokens=TAGS)
    folder = save_tiny_model(tmp_path / "model", model, tokenizer)
    loaded, reloaded = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode("Velor (Velor) <sql>")])
    assert torch.equal(model(ids).logits, loaded(ids).logits)
    assert model.config.vocab_size == len(tokenizer) == len(reloaded)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert reloaded.encode("(Velor 12</sql>") == tokenizer.encode("(Velor 12</sql>")
    assert reloaded.chat_template == tokenizer.chat_template
    assert loaded.generation_config.eos_token_id == reloaded.eos_token_id == reloaded.encode("<|im_end|>")[0]
    assert reloaded.pad_token_id == reloaded.encode("<|endoftext|>")[0]


def test_chat_template_renders_tools_calls_and_results():
    def render(messages, **options):
        return TOKENIZER.apply_chat_template(messages, tokenize=False, **options)

    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    mapping = {**called, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    results = [{"role": "tool", "tool_call_id": "c", "content": text} for text in ("one", "two")]

    assert render([question], add_generation_prompt=True) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    text = render([system, question, called, *results], tools=tools)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n{")
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )
    assert render([question, mapping]) == render([question, called])
    thinking = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    assert render([question, thinking, question]).count("<think>why</think>x<|im_end|>") == 1
    conversation = [system, question, called, *results, thinking]
    for n in range(1, len(conversation)):
        if conversation[n - 1]["role"] != "tool" or conversation[n]["role"] != "tool":
            assert render(conversation).startswith(render(conversation[:n])), n
    with pytest.raises(Exception, match="unknown role: narrator"):
        render([{"role": "narrator", "content": "x"}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, "vocab_size must be"),
        ({"width": 100}, "width must be a multiple"),
        ({"key_value_heads": 3}, "key_value_heads must divide"),
        ({"layers": 0}, "must be 1 or more"),
        ({"special_tokens": [" "]}, "special token"),
        ({"corpus": []}, "corpus"),
        ({"corpus": "one text"}, "corpus"),
    ],
)
def test_bad_sizes_are_user_errors_of_one_line(changes, message):
    arguments = {"corpus": CORPUS, **changes}
    with pytest.raises(UserError, match=message) as caught:
        build_tiny_model(arguments.pop("corpus"), **arguments)
    assert "\n" not in str(caught.value)
