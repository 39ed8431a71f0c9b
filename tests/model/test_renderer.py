"""The renderer extends what was sampled under any template, or renders anew and says why."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.env.messages import Message, system, tool_result, user
from stepgym.errors import UserError
from stepgym.model.renderer import Renderer, Turn
from stepgym.model.tiny import CHAT_TEMPLATE, build_tiny_tokenizer

CORPUS = [
    "What is the price of the item called Velor?",
    "<think>look</think><sql>SELECT 1</sql>",
    "The answer is 42.",
] * 3
TOOLS = [{"type": "function", "function": {"name": "sql", "description": "", "parameters": {"type": "object"}}}]

STRIPS_THINKING = """
{%- for m in messages %}
{%- set c = m.content %}
{%- if m.role == 'assistant' and not loop.last and '</think>' in c %}{%- set c = c.split('</think>')[-1] %}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

DATED = (
    "{{- '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '<|im_end|>\\n' }}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

TRIMS = CHAT_TEMPLATE.replace("{{- message.content or '' }}", "{{- (message.content or '') | trim }}")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tiny_tokenizer(CORPUS, special_tokens=["<sql>", "</sql>"])


def play(
    renderer: Renderer,
    replies: list[str],
    *,
    stop: tuple[str, ...] = (),
    tools: Any = (),
    observe: Callable[[int, Message], list[Message]] = lambda n, message: [user(f"Result {n}")],
    terminator: bool = True,
) -> tuple[list[list[int]], list[str], list[Message]]:
    """Play a conversation; returns every prompt's ids, how each came about, and the messages."""
    messages: list[Message] = [system("Be brief."), user("What is the price of Velor?")]
    ids: list[int] = []
    prompts, renderings, previous = [], [], None
    for number, reply in enumerate([*replies, None]):
        prompt = renderer.prompt(messages, tools, previous)
        ids = (ids if prompt.extends else []) + prompt.new_ids.tolist()
        prompts.append(list(ids))
        renderings.append(prompt.rendering)
        if reply is None:
            break
        response = renderer.encode(reply + (renderer.terminator if terminator else ""))
        message, ended = renderer.read(response, stop=stop, tools=tools, id_prefix=f"call_{number}")
        previous = Turn(list(messages), prompt.text, message, ended, truncated=not terminator and not stop)
        ids += response.tolist()
        messages = [*messages, message, *observe(number, message)]
    return prompts, renderings, messages


def test_the_terminator_is_found_and_prompts_end_in_the_generation_prompt(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    assert renderer.terminator == "<|im_end|>"
    prompts, _, _ = play(renderer, ["one", "two"])
    opener = renderer.encode("<|im_start|>assistant\n").tolist()
    assert all(prompt[-len(opener) :] == opener for prompt in prompts)


def test_a_turn_with_a_terminator_is_extended_as_the_template_would_render_it(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    prompts, renderings, messages = play(renderer, ["The answer is 42.", "<sql>SELECT 1</sql>"])
    assert renderings == ["first", "extended", "extended"]
    assert prompts[-1] == renderer.encode(renderer.template.apply(messages, to_sample=True)).tolist()


def test_a_turn_ended_by_a_stop_string_gets_its_terminator_in_the_next_prompt(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    prompts, renderings, messages = play(
        renderer, ["<think>look</think><sql>SELECT 1</sql>"] * 2, stop=("</sql>",), terminator=False
    )
    assert renderings == ["first", "extended", "extended"]
    said = renderer.encode("<think>look</think><sql>SELECT 1</sql>").tolist()
    after = prompts[1][len(prompts[0]) + len(said) :]
    assert prompts[1][: len(prompts[0]) + len(said)] == prompts[0] + said
    assert after[0] == renderer.terminator_id
    assert messages[2]["text"].endswith("</sql>")


def test_what_overshoots_a_stop_string_stays_in_the_ids_and_not_in_the_message(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    prompts, renderings, messages = play(renderer, ["<sql>SELECT 1</sql> and more"], stop=("</sql>",), terminator=False)
    assert messages[2]["text"] == messages[2]["content"] == "<sql>SELECT 1</sql>"
    assert renderings[1] == "extended"
    assert renderer.decode(prompts[1]).count(" and more<|im_end|>") == 1


def test_other_token_ids_for_the_same_text_are_kept_as_sampled(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    messages = [user("hello")]
    prompt = renderer.prompt(messages)
    split = np.concatenate([renderer.encode(letter) for letter in "SELECT"])  # not how the tokenizer writes it
    assert split.tolist() != renderer.encode("SELECT").tolist()
    message, ended = renderer.read(split, stop=(), tools=(), id_prefix="c")
    turn = Turn(messages, prompt.text, message, ended, truncated=False)
    following = renderer.prompt([*messages, message, user("next")], (), turn)
    assert following.extends
    assert following.new_ids[0] == renderer.terminator_id


def test_a_template_that_strips_thinking_is_followed_and_named(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, chat_template=STRIPS_THINKING)
    prompts, renderings, messages = play(renderer, ["<think>a</think>one", "<think>b</think>two"])
    assert renderings == ["first", "thinking_stripped", "thinking_stripped"]
    assert prompts[-1] == renderer.encode(renderer.template.apply(messages, to_sample=True)).tolist()


@pytest.mark.parametrize("terminator", [True, False])
def test_a_template_without_a_token_at_the_end_of_a_turn_is_extended_after_the_end_of_text(
    tokenizer: Any, terminator: bool
) -> None:
    source = (
        "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
    )
    for history in ("template", "append"):
        renderer = Renderer(tokenizer, chat_template=source, history=history)  # type: ignore[arg-type]
        assert renderer.terminator_id == tokenizer.eos_token_id
        prompts, renderings, _ = play(renderer, ["one", "two"], terminator=terminator)
        assert renderings[1] == "extended"
        end = renderer.terminator if terminator else ""
        assert renderer.decode(prompts[1]).endswith(f"assistant: one{end}\nuser: Result 0\nassistant: ")


def test_content_that_the_template_trims_means_the_same_and_is_extended(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, chat_template=TRIMS)
    _, renderings, _ = play(renderer, ["  spaced out \n", "plain"])
    assert renderings == ["first", "extended", "extended"]


def test_trimmed_content_takes_no_white_space_of_the_template_with_it_where_no_token_ends_a_turn(
    tokenizer: Any,
) -> None:
    source = (
        "{%- for m in messages %}{{- m.role + ': ' + m.content | trim + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
    )
    renderer = Renderer(tokenizer, chat_template=source)
    for said in (" one ", "one", " ", ""):
        prompts, renderings, _ = play(renderer, [said], terminator=False)
        assert renderings[1] == "extended"
        assert renderer.decode(prompts[1]).endswith(f"assistant: {said}\nuser: Result 0\nassistant: ")


@pytest.mark.parametrize("kind", ["swallows white space", "marks the start of a text"])
def test_what_is_added_has_the_ids_that_the_tokenizer_gives_it_after_a_turn(kind: str) -> None:
    """Tokens as Phi's take the white space after them; tokenizers as Llama 2's begin every text with a space."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    if kind == "swallows white space":
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        bpe.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "\n", " "]
    bpe.train_from_iterator(CORPUS, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    swallow = kind == "swallows white space"
    bpe.add_special_tokens(
        [
            AddedToken(t, rstrip=swallow, normalized=False, special=True)
            for t in ("<|user|>", "<|assistant|>", "<|end|>")
        ]
    )
    hf: Any = transformers
    source = (
        "{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
    )
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", chat_template=source)
    for history in ("template", "append"):
        renderer = Renderer(tokenizer, history=history)  # type: ignore[arg-type]
        messages = [user("What is it?")]
        first = renderer.prompt(messages)
        for ending in ("<|end|>", ""):
            response = renderer.encode("<|user|>42" + ending)[1:]  # not at a text's start
            message, ended = renderer.read(response, stop=(), tools=(), id_prefix="c")
            following = [*messages, message, user("And now?")]
            prompt = renderer.prompt(following, (), Turn(messages, first.text, message, ended, truncated=False))
            assert prompt.rendering == "extended"
            whole = [*first.new_ids.tolist(), *response.tolist(), *prompt.new_ids.tolist()]
            assert whole == renderer.encode(prompt.text).tolist()


def test_tool_calls_written_with_other_spaces_are_extended(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    call = '<tool_call>{"arguments":{"query":"SELECT 1"},"name":"sql"}</tool_call>'
    prompts, renderings, messages = play(
        renderer,
        [call, "I think so.\n" + call],
        tools=TOOLS,
        observe=lambda n, m: [tool_result("1", m["tool_calls"][0]["id"])],
    )
    assert renderings == ["first", "extended", "extended"]
    assert call in renderer.decode(prompts[1])
    assert messages[2]["tool_calls"][0]["function"]["name"] == "sql"


@pytest.mark.parametrize(
    "reply",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "sql", "arguments": {}}',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "sql", "arguments": [1]}</tool_call>',
        "[]</tool_call>",
    ],
)
def test_what_looks_like_a_tool_call_and_does_not_parse_is_reported(tokenizer: Any, reply: str) -> None:
    renderer = Renderer(tokenizer)
    message, _ = renderer.read(renderer.encode(reply), stop=(), tools=TOOLS, id_prefix="c")
    assert message["invalid_tool_calls"]
    assert "tool_calls" not in message
    untold, _ = renderer.read(renderer.encode(reply), stop=(), tools=(), id_prefix="c")
    assert "invalid_tool_calls" not in untold


def test_encoding_a_message_with_tool_calls_reads_back_as_that_message(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer)
    call = {"id": "call_0_0", "type": "function", "function": {"name": "sql", "arguments": '{"query": "SELECT 1"}'}}
    ids = renderer.encode_response(
        [user("go")], {"role": "assistant", "content": "", "tool_calls": [call]}, tools=TOOLS
    )
    message, ended = renderer.read(ids, stop=(), tools=TOOLS, id_prefix="call_0")
    assert ended
    assert message["tool_calls"] == [call]


def test_a_model_without_a_chat_template_is_one_clear_line(tokenizer: Any) -> None:
    bare = build_tiny_tokenizer(CORPUS)
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        Renderer(bare)


def test_a_template_without_tools_refuses_tools(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="does not show tools"):
        Renderer(tokenizer, chat_template=DATED).prompt([user("x")], TOOLS)


def test_a_conversation_that_the_template_refuses_is_one_clear_line(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="unknown role"):
        Renderer(tokenizer).prompt([{"role": "judge", "content": "x"}])


def test_the_date_is_frozen(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, chat_template=DATED, today=date(2026, 2, 1))
    assert "01 February 2026" in renderer.prompt([user("x")]).text
    other = Renderer(tokenizer, chat_template=DATED, today=date(2026, 2, 2))
    assert renderer.template.digest != other.template.digest


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=4), st.booleans())
def test_any_text_is_extended_token_for_token(replies: list[str], terminator: bool) -> None:
    tokenizer = build_tokenizer_once()
    renderer = Renderer(tokenizer)
    prompts, renderings, _ = play(renderer, replies, terminator=terminator)
    for number, reply in enumerate(replies):
        said = renderer.encode(reply + (renderer.terminator if terminator else "")).tolist()
        if renderings[number + 1] == "extended":
            assert prompts[number + 1][: len(prompts[number]) + len(said)] == prompts[number] + said
        else:  # text that holds the template's own tokens may not be told apart from it
            assert "<|im_" in reply or "<think>" in reply


_made: list[Any] = []


def build_tokenizer_once() -> Any:
    if not _made:
        _made.append(build_tiny_tokenizer(CORPUS))
    return _made[0]
