"""The retriever `http`: a server elsewhere that speaks Search-R1's `/retrieve`, the original's or SkyRL's."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import string
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stepgym.errors import UserError
from stepgym_search.corpus import Corpus
from stepgym_search.document import Document
from stepgym_search.retrievers.base import QueryRefused, RetrieverError
from stepgym_search.retrievers.connections import Connections
from stepgym_search.retrievers.contract import read_result, request_json, single_request_json
from stepgym_search.text import well_formed

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 128 * 2**20
"""A larger answer is refused while it is read."""
LONGEST_WAIT = 10.0
PASSING = {429, 502, 503, 504}
"""Statuses after which the same request may well succeed a little later."""
REFUSED = {400, 413, 422}
"""Statuses that say that the request, not the server, is at fault."""


class HTTPRetriever:
    """Asks a retrieval server.

    Connections are kept open and pooled. A request that fails in passing (a refused or broken connection, HTTP 429,
    502, 503 or 504) is sent again, with growing pauses. One request with all its tries takes at most `timeout`
    seconds, whatever the server does, and a failed one ends the search. A query without a word in it finds nothing and
    is not sent. No proxy is used for a server on this machine; for others, the one that the environment names.
    Safe to search from several threads.

    Args:
        corpus: None; the server has its own.
        url: Address of the server; `/retrieve` is added where it has no path.
        form: `queries` sends many queries in one request, as the original; `query` one request per query, several at
            once, as SkyRL; `auto` tries the first, and the second where the server answers with HTTP 400 or 422.
        timeout: Seconds for one request, all tries included.
        retries: How often a request is sent again.
        connections: Requests under way at once; more of them wait.
        max_batch: Most queries in one request of the form `queries`.
        return_scores: Whether to ask for scores; a server that has none to give needs False.
        headers: More headers of each request. `${NAME}` stands for an environment variable, so that a key need not be
            written into a recipe.

    Raises:
        UserError: A field is wrong.
    """

    needs_corpus: ClassVar[bool] = False

    def __init__(
        self,
        corpus: Corpus | None = None,
        *,
        url: str,
        form: Literal["auto", "queries", "query"] = "auto",
        timeout: float = 30.0,
        retries: int = 3,
        connections: int = 16,
        max_batch: int = 64,
        return_scores: bool = True,
        headers: dict[str, str] | None = None,
    ) -> None:
        for name, value, lowest in (
            ("timeout", timeout, "above 0"),
            ("connections", connections, "above 0"),
            ("max_batch", max_batch, "above 0"),
            ("retries", retries, "0 or more"),
        ):
            if not (value >= 0 if lowest == "0 or more" else value > 0):
                raise UserError(f"search: retriever: {name} must be {lowest}, not {value}")
        self._url, self.url, self._local = _address(url)
        self._headers = {"content-type": "application/json", **_expanded(headers or {})}
        self._form = form
        self._timeout = timeout
        self._retries = retries
        self._most = connections
        self._max_batch = max_batch
        self._return_scores = return_scores
        self._lock = threading.Lock()
        self._closed = False
        self._connections: Connections | None = None

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """The passages that the server finds for each query, best first, at most `k` of each.

        Raises:
            QueryRefused: The server answered with HTTP 400, 413 or 422.
            RetrieverError: It cannot be reached, did not answer in time, or answered with something else than the
                contract's JSON.
        """
        texts = [well_formed(query) for query in queries]
        asked = [place for place, text in enumerate(texts) if text.strip()]
        found: list[list[Document]] = [[] for _ in texts]
        if asked:
            connections = self._opened()
            answers = connections.run(self._search(connections, [texts[place] for place in asked], k))
            for place, documents in zip(asked, answers, strict=True):
                found[place] = documents[:k]
        return found

    def close(self) -> None:
        """Close the connections; searches that still run fail with a `RetrieverError`."""
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    def _opened(self) -> Connections:
        with self._lock:
            if self._closed:
                raise RetrieverError(f"{self.url}: the retriever has been closed")
            if self._connections is None or not self._connections.usable:
                self._connections = Connections(self.url, self._most, proxies=not self._local)
            return self._connections

    # ---- on the event loop of the connections -------------------------------------------------------------------

    async def _search(self, connections: Connections, queries: list[str], k: int) -> list[list[Document]]:
        known = await self._find_form(connections, queries, k) if self._form == "auto" else []
        size = 1 if self._form == "query" else self._max_batch
        parts = [queries[start : start + size] for start in range(len(known), len(queries), size)]
        tasks = [asyncio.ensure_future(self._ask(connections, part, k, self._form)) for part in parts]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # where one failed, nobody waits for the others
        return [*known, *(documents for answer in answers for documents in answer)]

    async def _find_form(self, connections: Connections, queries: list[str], k: int) -> list[list[Document]]:
        """Learn which form the server takes from the first request that succeeds; gives what it answered."""
        async with connections.probing:
            if self._form != "auto":
                return []
            try:
                found = await self._ask(connections, queries[: self._max_batch], k, "queries")
                self._form = "queries"
            except QueryRefused as error:
                try:
                    found = await self._ask(connections, queries[:1], k, "query")
                except QueryRefused:
                    raise error from None
                self._form = "query"
            logger.debug("%s takes requests of the form %s", self.url, self._form)
            return found

    async def _ask(self, connections: Connections, queries: list[str], k: int, form: str) -> list[list[Document]]:
        """One request, sent until it is answered, or fails for good, or takes too long."""
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

        if form == "query":
            fields = single_request_json(queries[0], k, return_scores=self._return_scores)
        else:
            fields = request_json(queries, k, return_scores=self._return_scores)
        body = json.dumps(fields).encode()
        failures: list[object] = []
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._retries + 1),
            wait=_wait,
            retry=retry_if_exception_type(_Passing),
            before_sleep=lambda state: failures.append(state.outcome and state.outcome.exception()),
            reraise=True,
        )
        async with connections.free:
            try:
                async with asyncio.timeout(self._timeout):
                    answer: bytes = await attempts(self._send, connections.client, body)
            except TimeoutError:
                before = f"; the last try before: {failures[-1]}" if failures else ""
                raise RetrieverError(f"{self.url} did not answer within {self._timeout:g} s{before}") from None
        try:
            return read_result(json.loads(answer), len(queries))
        except (ValueError, RecursionError) as error:
            reason = "no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else error
            raise RetrieverError(f"{self.url} answered with something else than documents: {reason}") from None

    async def _send(self, client: httpx.AsyncClient, body: bytes) -> bytes:
        import httpx

        try:
            async with client.stream("POST", self._url, content=body, headers=self._headers) as response:
                answer = bytearray()
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise RetrieverError(f"{self.url} answered with more than {MAX_ANSWER_BYTES / 2**20:g} MiB")
        except httpx.TransportError as error:
            reason = " ".join(str(error).split())
            raise _Passing(f"{self.url} cannot be reached: {type(error).__name__}: {reason}") from error
        except httpx.HTTPError as error:  # an encoding that cannot be decoded, say
            raise RetrieverError(f"{self.url} gave an answer that cannot be read: {error}") from error
        if response.status_code == 200:
            return bytes(answer)
        failure = f"{self.url} answered with HTTP {response.status_code}{_said(answer)}"
        if response.status_code in PASSING:
            raise _Passing(failure, response.headers.get("retry-after", ""))
        raise (QueryRefused if response.status_code in REFUSED else RetrieverError)(failure)


class _Passing(RetrieverError):
    """A failure that may be over a moment later.

    Attributes:
        retry_after: What the server says of when, if anything.
    """

    def __init__(self, message: str, retry_after: str = "") -> None:
        super().__init__(message)
        self.retry_after = retry_after


def _address(url: str) -> tuple[str, str, bool]:
    """The URL to send to, how messages show it (without a password), and whether it is on this machine."""
    import httpx

    wrong = f"search: retriever: url must look like http://host:8000/retrieve, not {url!r}"
    try:
        parsed = httpx.URL(url.strip())
    except (httpx.InvalidURL, ValueError):
        raise UserError(wrong) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(wrong)
    if parsed.path in ("", "/"):
        parsed = parsed.copy_with(path="/retrieve")
    shown = parsed.copy_with(username=None, password=None) if parsed.userinfo else parsed
    local = parsed.host in ("localhost", "::1") or parsed.host.startswith("127.")
    return str(parsed), str(shown), local


def _expanded(headers: Mapping[str, str]) -> dict[str, str]:
    expanded = {}
    for name, value in headers.items():
        try:
            filled = string.Template(value).substitute(os.environ)
        except KeyError as error:
            raise UserError(
                f"search: retriever: headers.{name} names the environment variable {error.args[0]}, which is not set"
            ) from None
        except ValueError:
            raise UserError(f"search: retriever: headers.{name}: write $$ for a dollar sign") from None
        if not (name + filled).isascii() or not (name + filled).isprintable():
            raise UserError(f"search: retriever: headers.{name} must be one line of ASCII")
        expanded[name.lower()] = filled
    return expanded


def _wait(state: Any) -> float:
    """Seconds before the next try: what the server asks for, else about twice as long each time."""
    error = state.outcome.exception() if state.outcome else None
    try:
        asked = float(getattr(error, "retry_after", ""))
    except ValueError:
        asked = -1.0
    if asked >= 0:
        return min(asked, LONGEST_WAIT)
    pause: float = min(0.25 * 2.0 ** (state.attempt_number - 1), LONGEST_WAIT)
    return pause * random.uniform(0.5, 1.5)


def _said(answer: bytes | bytearray) -> str:
    """What an error's body says, in one line."""
    text = answer[:2000].decode("utf-8", "replace")
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if isinstance(fields, Mapping):
        text = str(fields.get("detail") or fields.get("error") or text)
    elif isinstance(fields, str):
        text = fields
    text = " ".join(text.split())[:200]
    return f": {text}" if text else ""
