"""The model in this process, run by `transformers`: the engine that needs no server."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from stepgym.env.worker import threads as daemon_threads
from stepgym.errors import ContextOverflow, EngineError, UserError
from stepgym.model.engines.base import Completion, Engine
from stepgym.record.step import Ids, Sampling
from stepgym.seeds import derive_seed

if TYPE_CHECKING:
    from stepgym.model.engines.driver import Driver

logger = logging.getLogger(__name__)
SHARE_OF_FREE_MEMORY = 0.4


class TransformersEngine(Engine):
    """Runs a causal language model of `transformers` in a thread of its own.

    Concurrent requests are batched: they join and leave between one token and the next, and no token is padded. What a
    request computed is kept, so the next prompt of the same conversation, which extends it token for token, costs only
    its new tokens, and the prompt of a group is computed once. A response depends on its prompt, its settings and its
    seed, not on what else is in the batch, up to the rounding of floating point; with `max_batch_size=1` and
    `prefix_cache=False` not even on that.

    May be called from several event loops, also at the same time.

    Args:
        model: Folder or hub name of a causal language model with its tokenizer.
        revision: Version of the model on the hub.
        device: `auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:1`, ...
        dtype: `auto` (float32 on the CPU, the checkpoint's elsewhere), `float32`, `bfloat16`, `float16`.
        context_length: Most tokens, prompt and response together; None: what the model was made for.
        max_batch_size: Requests that run at once; more of them wait.
        max_prefill_tokens: Prompt tokens computed in one pass.
        prefix_cache: Whether what was computed is kept for prompts that begin alike.
        cache_tokens: Tokens whose keys and values are kept at most; None: what fits into 40% of the free memory.
        threads: Cores that one operation may use; None leaves torch's own setting.
        seed: Seeds requests that bring no seed of their own.
        stop_token_ids: Ids that end a response, beside those of the model's generation config and its tokenizer's
            end of sequence.
    """

    kind: ClassVar[str] = "transformers"

    def __init__(
        self,
        *,
        model: str,
        revision: str | None = None,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        context_length: int | None = None,
        max_batch_size: int = 128,
        max_prefill_tokens: int = 8192,
        prefix_cache: bool = True,
        cache_tokens: int | None = None,
        threads: int | None = None,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        for name, value in (
            ("context_length", context_length),
            ("max_batch_size", max_batch_size),
            ("max_prefill_tokens", max_prefill_tokens),
            ("cache_tokens", cache_tokens),
            ("threads", threads),
        ):
            if value is not None and value < 1:
                raise UserError(f"transformers engine: {name} must be 1 or more, not {value}")
        self.model = model
        self.context_length = context_length
        self._revision = revision
        self._device = device
        self._dtype = dtype
        self._max_batch_size = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._prefix_cache = prefix_cache
        self._cache_tokens = cache_tokens
        self._threads = threads
        self._seed = seed
        self._stop_token_ids = tuple(stop_token_ids)
        self._requests = itertools.count()
        self._version = "0"
        self._network: Any = None
        self._tokenizer: Any = None
        self._vocab_size = 0
        self._driver: Driver | None = None
        self._opening = threading.Lock()
        self._closed = False

    @classmethod
    def wrap(cls, model: Any, tokenizer: Any, *, name: str = "", **options: Any) -> TransformersEngine:
        """An engine on a model that is loaded already and shared with a trainer: it always runs the current weights.

        After the weights changed, set `weights_version` (or call `clear_cache`); change them inside `paused()` if
        requests may be running. Parameters must be changed in place, as optimizers do.

        Args:
            model: A causal language model of `transformers`, also one with adapters.
            tokenizer: Its tokenizer.
            name: What to call the model in records; empty: the name that it was loaded by.
            options: As for the constructor, without `model`, `revision`, `device` and `dtype`.
        """
        engine = cls(model=name or str(getattr(model, "name_or_path", "") or type(model).__name__), **options)
        engine._network, engine._tokenizer = model, tokenizer
        return engine

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises `EngineError` before `open`."""
        if self._tokenizer is None:
            raise EngineError("the engine is not open: await engine.open() first")
        return self._tokenizer

    @property
    def weights_version(self) -> str:
        """Name of the weights in force; recorded with every response. Setting it clears the cache.

        Responses that are being sampled go on under the new weights: what they have of keys and values is computed
        again, and their spans say which token came from which weights.
        """
        return self._version

    @weights_version.setter
    def weights_version(self, version: str | int) -> None:
        self._version = str(version)
        with self.paused():
            if self._driver is not None:
                self._driver.batcher.set_version(self._version)

    def clear_cache(self) -> None:
        """Reuse nothing that was computed so far: the weights have changed."""
        self.weights_version = self._version

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No forward pass runs inside this block; requests wait. Blocks for the rest of the pass that is running."""
        if self._driver is None:
            yield
            return
        with self._driver.paused():
            yield

    async def open(self) -> None:
        """Load the model. Raises `UserError` for one that does not exist or does not fit the settings."""
        if self._driver is None:
            await daemon_threads.run(self._open)

    async def close(self) -> None:
        """Stop the thread; requests that still run fail. The model stays in memory as long as somebody has it."""
        self._closed = True
        if self._driver is not None:
            self._driver.close()

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Completion:
        """Continue a prompt; see `Engine.generate`. Cancelling it frees its place at the next token."""
        from stepgym.model.engines.batcher import Request
        from stepgym.model.engines.driver import settler

        if self._driver is None:
            await self.open()
        assert self._driver is not None
        if seed is None:
            seed = derive_seed(self._seed, "request", next(self._requests))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = Request(
            prompt_ids=self._checked_prompt(prompt_ids, max_tokens),
            sampling=_checked_sampling(sampling),
            max_tokens=max_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            seed=seed,
            settle=settler(future),
        )
        self._driver.submit(request)
        try:
            return await future
        finally:
            request.cancelled = True

    def _checked_prompt(self, prompt_ids: Ids, max_tokens: int) -> Ids:
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        if prompt.ndim != 1 or len(prompt) == 0:
            raise EngineError(f"a prompt is a list of one id at least, not an array of shape {prompt.shape}")
        if max_tokens < 1:
            raise EngineError(f"max_tokens must be 1 or more, not {max_tokens}")
        if prompt.min() < 0 or prompt.max() >= self._vocab_size:
            wrong = int(prompt[(prompt < 0) | (prompt >= self._vocab_size)][0])
            raise EngineError(f"the prompt holds id {wrong}, but the model's vocabulary has {self._vocab_size} entries")
        assert self.context_length is not None
        if len(prompt) + max_tokens > self.context_length:
            raise ContextOverflow(
                f"a prompt of {len(prompt)} tokens and a response of up to {max_tokens} "
                f"do not fit the context of {self.context_length} tokens"
            )
        return prompt

    # ---- loading, in a thread of its own ------------------------------------------------------------------------

    def _open(self) -> None:
        from stepgym.model.engines.batcher import Batcher
        from stepgym.model.engines.driver import Driver
        from stepgym.model.engines.forward import choose_forward, context_length_of

        with self._opening:
            if self._closed:
                raise EngineError("the engine is closed")
            if self._driver is not None:
                return
            if self._network is None:
                self._load()
            network = self._network
            longest = context_length_of(network, given=self.context_length)
            if self.context_length is not None and self.context_length > longest:
                raise UserError(
                    f"transformers engine: context_length is {self.context_length}, "
                    f"but {self.model} takes {longest} tokens"
                )
            self.context_length = self.context_length or longest
            self._vocab_size = int(network.get_input_embeddings().num_embeddings)
            slots = self._slots(network, self.context_length)
            batcher = Batcher(
                choose_forward(network, slots),
                self._tokenizer,
                vocab_size=self._vocab_size,
                slots=slots,
                max_batch_size=self._max_batch_size,
                max_prefill_tokens=self._max_prefill_tokens,
                context_length=self.context_length,
                terminators=self._terminators(network),
                reuse=self._prefix_cache,
                device=network.device,
            )
            batcher.version = self._version
            self._driver = Driver(batcher, threads=self._threads)
            weakref.finalize(self, self._driver.close)

    def _load(self) -> None:
        import torch
        import transformers

        hf: Any = transformers
        device = ("cuda" if torch.cuda.is_available() else "cpu") if self._device == "auto" else self._device
        dtype: Any = ("float32" if device == "cpu" else "auto") if self._dtype == "auto" else self._dtype
        try:
            tokenizer = hf.AutoTokenizer.from_pretrained(self.model, revision=self._revision)
            network = hf.AutoModelForCausalLM.from_pretrained(self.model, revision=self._revision, dtype=dtype)
            self._network = network.to(device).eval().requires_grad_(False)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            text = " ".join(str(error).split())
            raise UserError(f"transformers engine: the model {self.model!r} cannot be loaded: {text:.300}") from error
        self._tokenizer = tokenizer

    def _terminators(self, network: Any) -> list[int]:
        """Ids that end a response, from the generation config, the tokenizer and the settings."""
        found: list[int] = []
        for ids in (getattr(network.generation_config, "eos_token_id", None), self._tokenizer.eos_token_id):
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
        return sorted({int(i) for i in (*found, *self._stop_token_ids)})

    def _slots(self, network: Any, context_length: int) -> int:
        """How many sequences are kept: twice those that run at once, if they fit into the memory."""
        config = network.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        bytes_per_token = 2 * config.num_hidden_layers * heads * width * network.dtype.itemsize
        tokens = self._cache_tokens or int(SHARE_OF_FREE_MEMORY * _free_memory(network.device) // bytes_per_token)
        slots = min(2 * self._max_batch_size, tokens // context_length)
        if slots < 1:
            raise UserError(
                f"transformers engine: the cache has room for {tokens} tokens, so a sequence of {context_length} "
                "does not fit: lower context_length, or raise cache_tokens"
            )
        if slots < self._max_batch_size:
            logger.info("transformers engine: memory for %d requests at once, not %d", slots, self._max_batch_size)
        return slots


def _free_memory(device: Any) -> int:
    """Bytes that are free on a device."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30


def _checked_sampling(sampling: Sampling) -> Sampling:
    for name, fits, rule in (
        ("temperature", sampling.temperature >= 0, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "0 (off) or more"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty > 0, "above 0"),
    ):
        if not fits:
            raise UserError(f"sampling: {name} must be {rule}, not {getattr(sampling, name)}")
    return sampling
