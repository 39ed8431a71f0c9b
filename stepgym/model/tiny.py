"""Tiny models and tokenizers, built from a seed and a corpus: no download, small enough to train on a laptop.

The model has the shape of Qwen3 (`transformers.Qwen3ForCausalLM`, tied embeddings), so everything that works with it
works with the real family. The tokenizer is a byte-level BPE trained on the corpus, with a ChatML template that knows
tools in the Hermes style, as Qwen's does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stepgym.errors import UserError

TURN_START, TURN_END, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
BASE_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Words, single digits, runs of spaces, and every other character on its own. A word never takes the space or the
# bracket before it along, so a name has the same tokens wherever it stands; and a text that is cut between two words
# has the tokens of its parts.
WORD_PATTERN = r"[\p{L}\p{M}_]+|\p{N}| {2,}|[^\p{L}\p{M}\p{N}_]"

CHAT_TEMPLATE = r"""
{%- set ns = namespace(start=0, system='') %}
{%- if messages and messages[0].role == 'system' %}
    {%- set ns.start = 1 %}
    {%- set ns.system = messages[0].content %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if ns.system %}
        {{- ns.system + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\nTo call one: <tool_call>\n{"name": name, "arguments": {...}}\n</tool_call><|im_end|>\n' }}
{%- elif ns.start %}
    {{- '<|im_start|>system\n' + ns.system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages[ns.start:] %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if not loop.first or message.content or message.reasoning_content %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role in ['user', 'system'] %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('unknown role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".strip()


def build_tiny_tokenizer(
    corpus: Iterable[str],
    *,
    vocab_size: int = 576,
    special_tokens: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    context_length: int = 2048,
) -> Any:
    """Train a byte-level BPE tokenizer on `corpus`; the same corpus gives the same tokenizer.

    Args:
        corpus: Texts as the model will see them.
        vocab_size: Entries at most, all told; a small corpus gives fewer. At least 320.
        special_tokens: Tags such as `<sql>` that shall be one token each, and stay in decoded text. Those for
            thinking and tool calls are always there.
        chat_template: Jinja template of a conversation.
        context_length: The tokenizer's `model_max_length`, in tokens.

    Returns:
        A `transformers.PreTrainedTokenizerFast`; `<|im_end|>` ends a turn, `<|endoftext|>` pads.

    Raises:
        UserError: For a vocabulary too small, an empty corpus, or an empty tag.
    """
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tags = [tag for tag in dict.fromkeys([*BASE_TAGS, *special_tokens]) if tag not in (TURN_START, TURN_END, PADDING)]
    if any(not isinstance(tag, str) or not tag.strip() for tag in tags):
        raise UserError(
            f"tiny model: every special token must be a string that is not blank, got {list(special_tokens)!r}"
        )
    smallest = 256 + 3 + len(tags)
    if vocab_size < smallest:
        raise UserError(
            f"tiny model: vocab_size must be {smallest} or more (256 bytes and the special tokens), not {vocab_size}"
        )
    texts = list(corpus)
    if isinstance(corpus, str) or not any(texts):
        raise UserError("tiny model: the corpus must be a collection of texts, at least one of which is not empty")

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 3 - len(tags),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Tags are tokens already: what they are made of must not earn merges.
    pieces = _split_at([TURN_START, TURN_END, PADDING, *tags], texts)
    bpe.train_from_iterator(pieces, trainer)
    bpe.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in (PADDING, TURN_START, TURN_END)])
    bpe.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    hf: Any = transformers  # its constructors carry no types
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PADDING,
        chat_template=chat_template,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


def build_tiny_model(
    corpus: Iterable[str],
    *,
    seed: int = 0,
    vocab_size: int = 576,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
    key_value_heads: int | None = None,
    feed_forward_width: int | None = None,
    initializer_range: float = 0.02,
    special_tokens: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    context_length: int = 2048,
) -> tuple[Any, Any]:
    """A randomly initialised Qwen3-shaped model and its tokenizer; deterministic in the corpus and the seed.

    The defaults give about 0.5 million parameters. Weights are float32 and on the CPU; the global random state of
    torch is left as it was.

    Args:
        corpus: Texts that the tokenizer is trained on.
        seed: Seeds the weights.
        vocab_size: Entries of the vocabulary at most; the model has exactly as many as the tokenizer.
        layers: Transformer blocks.
        width: Hidden size; a multiple of `2 * heads`.
        heads: Attention heads.
        key_value_heads: Heads of keys and values (a divisor of `heads`); None means as many as `heads`.
        feed_forward_width: Width of the feed-forward layers; None means three times `width`.
        initializer_range: Standard deviation of the random weights. 0.02 is made for wide models; one of width 128
            learns to copy in half as many updates from 0.06.
        special_tokens: Tags that shall be one token each.
        chat_template: Jinja template of a conversation.
        context_length: Most tokens that the model takes.

    Returns:
        `(model, tokenizer)`: a `transformers.Qwen3ForCausalLM` in evaluation mode, a `PreTrainedTokenizerFast`.

    Raises:
        UserError: For sizes that do not fit together, or see `build_tiny_tokenizer`.
    """
    import torch
    import transformers

    hf: Any = transformers  # its constructors carry no types

    key_value_heads = key_value_heads or heads
    if min(layers, width, heads, key_value_heads, context_length) < 1:
        raise UserError("tiny model: layers, width, heads and context_length must be 1 or more")
    if not 0 < initializer_range < 1:
        raise UserError(f"tiny model: initializer_range must be above 0 and below 1, not {initializer_range}")
    if width % (2 * heads):
        raise UserError(f"tiny model: width must be a multiple of 2 * heads = {2 * heads}, not {width}")
    if heads % key_value_heads:
        raise UserError(f"tiny model: key_value_heads must divide heads = {heads}, not {key_value_heads}")
    tokenizer = build_tiny_tokenizer(
        corpus,
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        chat_template=chat_template,
        context_length=context_length,
    )
    config = hf.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=feed_forward_width or 3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=width // heads,
        initializer_range=initializer_range,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.Qwen3ForCausalLM(config)
    model.generation_config = hf.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    return model.eval(), tokenizer


def save_tiny_model(folder: str | Path, model: Any, tokenizer: Any) -> Path:
    """Write model and tokenizer as a folder that `transformers` and vLLM load. Returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _split_at(tags: Sequence[str], texts: Sequence[str]) -> Iterable[str]:
    """The texts, cut where a tag stands, without the tags."""

    pattern = re.compile("|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True)))
    for text in texts:
        yield from (piece for piece in pattern.split(text) if piece)
