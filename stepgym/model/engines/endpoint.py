"""One line to an OpenAI-compatible endpoint: connections, retries, and errors that say whose fault they are."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stepgym.errors import ContextOverflow, EngineError, EngineTimeout, StepgymError, UserError

if TYPE_CHECKING:
    import openai

logger = logging.getLogger(__name__)

KEY_VARIABLE = "OPENAI_API_KEY"
LONGEST_WAIT = 30.0
RAW_RESPONSE_HEADER = "X-Stainless-Raw-Response"  # what the client's own `with_raw_response` sends
_LOCAL = re.compile(r"https?://(localhost|127\.[\d.]+|\[::1\])(:|/|$)", re.IGNORECASE)
TOO_LONG = re.compile(
    r"context.{0,3}length|context.{0,3}window|max_model_len|maximum (model|input) length|(prompt|input).{0,40}too long",
    re.IGNORECASE,
)


class Endpoint:
    """Sends requests to a server's `/v1` routes and gives back its JSON.

    May be used from several event loops: each has its own connections.

    Args:
        base_url: Address of the server's `/v1`.
        api_key: Key of the endpoint; None reads the environment variable OPENAI_API_KEY. Own servers
            need none.
        request_timeout: Seconds for one answer.
        max_connections: Requests under way at once, per event loop; more of them wait.
        retries: How often a request is sent again after a refused or broken connection, HTTP 408, 429 or 5xx.
    """

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str | None = None,
        request_timeout: float = 600.0,
        max_connections: int = 256,
        retries: int = 3,
    ) -> None:
        if not re.match(r"https?://[^/\s]+", base_url):
            raise UserError(f"engine: base_url must look like http://host:8000/v1, not {base_url!r}")
        for name, value, fits in (
            ("request_timeout", request_timeout, request_timeout > 0),
            ("max_connections", max_connections, max_connections >= 1),
            ("retries", retries, retries >= 0),
        ):
            if not fits:
                raise UserError(
                    f"engine: {name} must be {'0 or more' if name == 'retries' else 'above 0'}, not {value}"
                )
        self.base_url = base_url.rstrip("/")
        self._root = re.sub(r"/v1$", "", self.base_url)
        self._api_key = api_key
        self._timeout = request_timeout
        self._max_connections = max_connections
        self._retries = retries
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, asyncio.Semaphore]] = WeakKeyDictionary()

    async def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST a JSON body; returns the JSON object of the answer.

        `route` is relative to `base_url`, or to the server's root where it begins with a slash. Raises
        `ContextOverflow` when the server finds the prompt too long, `EngineTimeout`, or `EngineError`.
        """
        return await self._request(route, dict(body))

    async def models(self) -> list[dict[str, Any]] | None:
        """What the server says that it serves; None where it has no such list.

        Raises `UserError` where the server cannot be reached or refuses the key.
        """
        try:
            answer = await self._request("models", {})
        except EngineError as error:
            cause = error.__cause__
            status = getattr(cause, "status_code", None)
            if status in (404, 405, 501):
                return None
            raise UserError(self._unreachable(error, status)) from error
        data = answer.get("data")
        return [m for m in data if isinstance(m, dict)] if isinstance(data, list) else None

    async def find_model(self, name: str) -> dict[str, Any]:
        """What the server says about one model; an empty mapping where it has no list of them.

        Raises `UserError` where the server does not serve it, cannot be reached, or refuses the key.
        """
        models = await self.models()
        if not models:
            return {}
        for found in models:
            if found.get("id") == name:
                return found
        known = ", ".join(sorted(str(m.get("id")) for m in models)[:10])
        raise UserError(f"engine: {self.base_url} does not serve the model {name!r}; it serves {known}")

    async def close(self) -> None:
        """Close the connections of this event loop, and forget those of others."""
        lines, self._lines = dict(self._lines), WeakKeyDictionary()
        line = lines.get(asyncio.get_running_loop())
        if line is not None:
            await line[0].close()

    # ---- one request --------------------------------------------------------------------------------------------

    async def _request(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        import openai
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        client, semaphore = self._line()
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._retries + 1),
            wait=_wait,
            retry=retry_if_exception(_is_passing),
            reraise=True,
        )
        try:
            async with semaphore:
                response: Any = await attempts(self._send, client, route, body)
        except openai.OpenAIError as error:
            raise self._translated(error) from error
        try:
            answer = json.loads(response.content)
        except ValueError:
            shown = response.text[:80]
            raise EngineError(f"{self.base_url}/{route} did not answer in JSON but with {shown!r}") from None
        if not isinstance(answer, dict):
            raise EngineError(f"{self.base_url}/{route} answered with JSON that is not an object")
        if isinstance(answer.get("error"), dict):  # some gateways report errors with status 200
            raise EngineError(f"{self.base_url}/{route}: {_one_line(answer['error'].get('message'))}")
        return answer

    async def _send(self, client: openai.AsyncOpenAI, route: str, body: dict[str, Any]) -> Any:
        # Raw, because the client's own types would accept an answer that lacks what we need.
        if route == "models":
            raw: Any = await client.models.with_raw_response.list()
        else:
            url = self._root + route if route.startswith("/") else f"/{route}"
            raw = await client.post(url, cast_to=object, body=body, options={"headers": {RAW_RESPONSE_HEADER: "raw"}})
        return raw.http_response

    def _line(self) -> tuple[Any, asyncio.Semaphore]:
        import openai

        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is None:
            client = openai.AsyncOpenAI(
                base_url=self.base_url,
                api_key=self._api_key or os.environ.get(KEY_VARIABLE) or "none",
                timeout=openai.Timeout(self._timeout, connect=min(self._timeout, 20.0), pool=None),
                max_retries=0,
                http_client=openai.DefaultAsyncHttpxClient(
                    trust_env=not _LOCAL.match(self.base_url),  # no proxy leads to this machine
                    # The client's HTTP library has changed its name before; this is its own class of limits.
                    limits=type(openai.DEFAULT_CONNECTION_LIMITS)(
                        max_connections=self._max_connections, max_keepalive_connections=self._max_connections
                    ),
                ),
            )
            line = self._lines[loop] = (client, asyncio.Semaphore(self._max_connections))
        return line

    # ---- errors -------------------------------------------------------------------------------------------------

    def _translated(self, error: openai.OpenAIError) -> StepgymError:
        """The error as one of ours."""
        import openai

        where = self.base_url
        if isinstance(error, openai.APITimeoutError):
            return EngineTimeout(f"{where} did not answer within {self._timeout:g} s")
        if isinstance(error, openai.APIConnectionError):
            reason = error.__cause__ or error
            return EngineError(f"{where} cannot be reached: {type(reason).__name__}: {_one_line(reason)}")
        if isinstance(error, openai.APIStatusError):
            text = _one_line(_message_of(error))
            if error.status_code in (400, 413, 422) and _is_too_long(error, text):
                return ContextOverflow(f"{where}: {text}")
            return EngineError(f"{where} answered with HTTP {error.status_code}: {text}")
        return EngineError(f"{where}: {_one_line(error)}")

    def _unreachable(self, error: EngineError, status: int | None) -> str:
        if status in (401, 403):
            return f"engine: {self.base_url} refuses the key (HTTP {status}): set api_key or {KEY_VARIABLE}"
        return f"engine: {error}"


def _is_passing(error: BaseException) -> bool:
    """Whether the same request may well succeed a little later."""
    import openai

    if isinstance(error, openai.APITimeoutError):
        return False
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)


def _wait(state: Any) -> float:
    """Seconds before the next try: what the server asks for, else twice as long each time."""
    seconds: float = min(0.25 * 2.0 ** (state.attempt_number - 1), LONGEST_WAIT) * random.uniform(0.5, 1.5)
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(getattr(error, "response", None), "headers", {}).get("retry-after", "")
    try:
        return min(max(float(asked), 0.0), LONGEST_WAIT)
    except ValueError:
        return seconds


def _message_of(error: openai.APIStatusError) -> object:
    body = error.body
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        if isinstance(inner, Mapping) and inner.get("message"):
            return inner["message"]
    return error.message


def _is_too_long(error: openai.APIStatusError, text: str) -> bool:
    if getattr(error, "param", None) == "input_tokens" or getattr(error, "code", None) == "context_length_exceeded":
        return True
    return bool(TOO_LONG.search(text))


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
