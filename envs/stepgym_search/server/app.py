"""The application: any retriever behind Search-R1's `/retrieve`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from stepgym.config import error_line
from stepgym.errors import UserError
from stepgym_search.document import Document
from stepgym_search.retrievers.base import QueryRefused, Retriever, RetrieverError
from stepgym_search.retrievers.batching import BatchedSearch
from stepgym_search.retrievers.contract import DEFAULT_TOPK, result_json
from stepgym_search.server.request import RetrieveRequest

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

Count = Annotated[int, Field(gt=0)]

BODY_SECONDS = 60.0
"""How long a client may take to send a request."""


def create_app(
    retriever: Retriever,
    about: Mapping[str, Any] | None = None,
    *,
    max_batch: Count = 256,
    workers: Count = 1,
    max_queries: Count = 8192,
    max_query_chars: Count = 20_000,
    max_topk: Count = 100,
    max_body_mb: Annotated[float, Field(gt=0)] = 32.0,
) -> Any:
    """Make the application, a FastAPI.

    `POST /retrieve` takes `{"queries": [..]}`, as the original, or `{"query": ".."}`, as SkyRL, both with `topk` (3
    where it is missing or null) and `return_scores` (false where it is missing, as in the original); fields that it
    does not know are ignored, as they are there. The queries of concurrent requests are searched together.
    `GET /health` says what is served. What is refused is answered with one sentence in `detail`: 422 for a request that
    is wrong or over a limit, 413 for a body that is too large (refused while it is read), 503 where the search failed.

    Args:
        retriever: What searches. It is not closed with the application, whose owner it need not be.
        about: What `/health` tells besides: the kind of retriever, the number of documents, the digest of the corpus.
        max_batch: Most queries in one search.
        workers: Searches that run at once; more than one only for a retriever that may be searched from many threads.
        max_queries: Most queries in a request.
        max_query_chars: Longest query, in characters.
        max_topk: Most passages for a query.
        max_body_mb: Largest request, in MiB.

    Raises:
        UserError: FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI, Request, Response
        from fastapi.responses import JSONResponse
    except ImportError as error:
        raise UserError(
            f"serving a retriever needs the package {error.name!r}: pip install 'stepgym[search]'"
        ) from None

    search = BatchedSearch(retriever, max_batch=max_batch, workers=workers)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(search.close, 1.0)  # no request waits for it any more

    app = FastAPI(title="stepgym serve-retriever", lifespan=lifespan)
    app.state.search = search
    schema = {"application/json": {"schema": RetrieveRequest.model_json_schema()}}

    async def retrieve(request: Request) -> Response:
        try:
            body = await _read_body(request, int(max_body_mb * 2**20))
            asked = _parse(body)
            topk = DEFAULT_TOPK if asked.topk is None else asked.topk
            queries = asked.all_queries
            _check_limits(queries, topk, max_queries=max_queries, max_query_chars=max_query_chars, max_topk=max_topk)
            found = await search.search_all(queries, topk)
            _check_scores(found)
        except _Refused as error:
            # The rest of a body that is too large, or does not come, is not read: the connection ends with the answer.
            headers = {"connection": "close"} if error.status in (408, 413, 503) else None
            return JSONResponse({"detail": str(error)}, error.status, headers)
        except QueryRefused as error:
            return JSONResponse({"detail": _one_line(error)}, 422)
        except RetrieverError as error:
            return JSONResponse({"detail": f"the search failed: {_one_line(error)}"}, 503)
        # Written as ASCII, which every text of a corpus can be.
        return Response(json.dumps(result_json(found, scores=asked.return_scores)), media_type="application/json")

    async def health() -> Response:
        told = {"status": "ok", **(about or {}), "searches": search.searches, "queries": search.queries}
        return JSONResponse(told)

    # Annotations are text here, and FastAPI cannot see the imports of this function.
    retrieve.__annotations__ = {"request": Request, "return": Response}
    health.__annotations__ = {"return": Response}
    app.post("/retrieve", openapi_extra={"requestBody": {"content": schema, "required": True}})(retrieve)
    app.get("/health")(health)
    return app


class _Refused(Exception):
    """A request that is not answered. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def _read_body(request: Request, most: int) -> bytes:
    from starlette.requests import ClientDisconnect

    too_large = _Refused(413, f"the request is larger than {most / 2**20:g} MiB: send fewer queries in one")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdecimal() and int(announced) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise _Refused(408, f"the request did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise _Refused(400, "the client left") from None
    except asyncio.CancelledError:  # the server waits no longer for a client that keeps it from ending
        raise _Refused(503, "the server ends") from None
    return bytes(body)


def _parse(body: bytes) -> RetrieveRequest:
    from pydantic import ValidationError

    try:
        return RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        raise _Refused(422, error_line(error, "", RetrieveRequest)) from None


def _check_limits(queries: Sequence[str], topk: int, *, max_queries: int, max_query_chars: int, max_topk: int) -> None:
    if not 1 <= topk <= max_topk:
        raise _Refused(422, f"topk is {topk}, but must be from 1 to {max_topk}")
    if len(queries) > max_queries:
        raise _Refused(422, f"there are {len(queries)} queries, but a request may have {max_queries}")
    for place, query in enumerate(queries):
        if len(query) > max_query_chars:
            raise _Refused(422, f"query {place} has {len(query)} characters, but may have {max_query_chars}")


def _check_scores(found: Sequence[Sequence[Document]]) -> None:
    if not all(math.isfinite(document.score) for documents in found for document in documents):
        raise RetrieverError("the retriever gave a score that is no finite number")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
