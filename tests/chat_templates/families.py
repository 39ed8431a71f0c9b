"""Chat templates that behave as the common families do, each with a tokenizer: for tests of everything that renders.

The templates (`*.jinja` beside this file) are written for the tests. `tokenizer_for` trains a byte-level BPE whose
special tokens are single ids, so no test downloads anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
RESPONSE = ("<tool_response>", "</tool_response>")

CORPUS = [
    "What is the price of the item called Velor? Guess a number from 1 to 100.",
    "<think>\nThe item is called Velor.\n</think>\n\nThe answer is 42.",
    '{"name": "guess", "arguments": {"number": 42}} {"name": "sql", "parameters": {"query": "SELECT 1"}}',
    "<function=guess>\n<parameter=number>\n42\n</parameter>\n</function>",
    '{"type": "function", "function": {"name": "guess", "description": "Try a number.", "parameters": {}}}',
    "system user assistant model tool [INST] [/INST] right low high Result Error: no such table",
]


@dataclass(frozen=True)
class Family:
    """A chat template and what is peculiar about it.

    Attributes:
        name: Name of the file, without its ending.
        special_tokens: Each is one id of the tokenizer.
        bos_token, eos_token, pad_token: As the tokenizer names them.
        terminator: What ends an assistant's turn.
        generation_prompt: What the template adds to sample from; "" for templates with nothing of their own.
        tools: Whether it shows tools.
        tool_format: How it writes a call: `json`, `xml`, `headers`, `mistral`; None without tools.
        reasoning: What becomes of thinking: `none` (unknown to the template), `stripped` from earlier turns or `kept`.
        opened: Whether the generation prompt opens the thinking.
        one_call: Whether a turn has at most one tool call, and nothing beside it.
        alternates: Whether it refuses two user messages in a row.
        rewrites: Whether it writes messages in another way once others follow.
    """

    name: str
    special_tokens: tuple[str, ...]
    eos_token: str
    terminator: str
    generation_prompt: str
    bos_token: str | None = None
    pad_token: str = "<|pad|>"
    tools: bool = False
    tool_format: Literal["json", "xml", "headers", "mistral"] | None = None
    reasoning: Literal["none", "stripped", "kept"] = "none"
    opened: bool = False
    one_call: bool = False
    alternates: bool = False
    rewrites: bool = False

    @property
    def source(self) -> str:
        """The template's Jinja source."""
        return (FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")


def _chatml(name: str, *more: str, generation_prompt: str = "<|im_start|>assistant\n", **facts: Any) -> Family:
    return Family(name, (*CHATML, *more), "<|im_end|>", "<|im_end|>", generation_prompt, **facts)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _chatml("chatml"),
        _chatml("chatml_default_system"),
        _chatml("alternating", alternates=True),
        _chatml("last_differs", rewrites=True),
        _chatml("dated"),
        _chatml("thinking_stripped", *THINK, *CALL, *RESPONSE, tools=True, tool_format="json", reasoning="stripped"),
        _chatml(
            "thinking_kept",
            *THINK,
            *CALL,
            *RESPONSE,
            generation_prompt="<|im_start|>assistant\n<think>\n",
            tools=True,
            tool_format="json",
            reasoning="kept",
            opened=True,
        ),
        Family(
            "thinking_opened",
            ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>", *THINK),
            eos_token="<|end|>",
            terminator="<|end|>",
            generation_prompt="<|Assistant|><think>\n",
            bos_token="<|begin|>",
            reasoning="stripped",
            opened=True,
        ),
        _chatml("tools_json", *CALL, tools=True, tool_format="json"),
        _chatml("tools_xml", *CALL, *RESPONSE, tools=True, tool_format="xml"),
        Family(
            "headers",
            ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            eos_token="<|eot_id|>",
            terminator="<|eot_id|>",
            generation_prompt="<|start_header_id|>assistant<|end_header_id|>\n\n",
            bos_token="<|begin_of_text|>",
            tools=True,
            tool_format="headers",
            one_call=True,
        ),
        Family("inst", ("<s>", "</s>"), "</s>", "</s>", "", bos_token="<s>"),
        Family(
            "inst_tools",
            (
                *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]"),
                *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            ),
            eos_token="</s>",
            terminator="</s>",
            generation_prompt="",
            bos_token="<s>",
            tools=True,
            tool_format="mistral",
        ),
        Family(
            "other_terminator",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            eos_token="<eos>",
            terminator="<end_of_turn>",
            generation_prompt="<start_of_turn>model\n",
            bos_token="<bos>",
        ),
    )
}


@cache
def tokenizer_for(family: Family) -> Any:
    """A `transformers.PreTrainedTokenizerFast` with the family's special tokens as single ids and its template."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 3, trainer)
    tags = [token for token in family.special_tokens if token in (*THINK, *CALL, *RESPONSE)]
    control = [*(token for token in family.special_tokens if token not in tags), family.pad_token]
    bpe.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    bpe.add_tokens([AddedToken(token, normalized=False, special=False) for token in tags])
    hf: Any = transformers  # its constructors carry no types
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=family.eos_token,
        bos_token=family.bos_token,
        pad_token=family.pad_token,
        chat_template=family.source,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
