"""`stepgym serve-retriever`: any retriever behind Search-R1's `/retrieve`, for this trainer and for others."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepgym.config import apply_overrides, error_line, validate_kwargs
from stepgym.errors import UserError
from stepgym.plugins import unknown

if TYPE_CHECKING:
    from stepgym_search.corpus import Corpus
    from stepgym_search.encyclopedia import EncyclopediaConfig
    from stepgym_search.retrievers.base import Retriever

SECTIONS = ("retriever", "server", "encyclopedia")
PATIENCE = 10
"""Seconds that searches under way are given when the server is to end."""


def serve_retriever(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings, as in retriever.k1=1.2, server.max_topk=50 or encyclopedia.seed=3.", show_default=False
        ),
    ] = None,
    retriever: Annotated[str, typer.Option(help="bm25s, pyserini, dense or http, or module:Class.")] = "bm25s",
    corpus: Annotated[
        Path | None,
        typer.Option(help='A file of JSON lines {"id", "contents"}; without one the generated encyclopedia.'),
    ] = None,
    articles: Annotated[int | None, typer.Option(min=1, help="Articles of the generated encyclopedia.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is open to other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
) -> None:
    """Serve a retriever over HTTP, as Search-R1's servers do.

    Prints the URL once requests are answered. Ctrl-C or SIGTERM ends it in order.
    """
    from stepgym_search.retrievers import check_retriever, open_retriever
    from stepgym_search.server.app import create_app

    _check_libraries()
    fields = apply_overrides({"retriever": {"kind": retriever}}, overrides or [], sections=("retriever",))
    for section in fields:
        if section not in SECTIONS:
            raise UserError(f"serve-retriever: {unknown('section', section, SECTIONS)}")
    config = fields["retriever"]
    cls, _ = check_retriever(config)
    limits = validate_kwargs(create_app, fields.get("server"), "server")
    source = _Source(corpus, articles, fields.get("encyclopedia"))
    if not cls.needs_corpus:
        source.refuse(config["kind"])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    listening = _bound(host, port)  # first, because an index may take an hour to build
    searching: Retriever | None = None
    try:
        searching = open_retriever(config, source.open)
        about: dict[str, Any] = {"retriever": config["kind"]}
        if source.corpus is not None:
            about |= {"documents": len(source.corpus), "digest": source.corpus.digest}
        else:
            source.refuse(config["kind"])
        app = create_app(searching, about, **limits)
        try:
            _run(app, listening, host)
        finally:
            if not app.state.search.close(0.0):
                searching = None  # a search is still reading the index
    finally:
        listening.close()
        if searching is not None:
            searching.close()
            source.close()
        signal.signal(signal.SIGTERM, before)


def _check_libraries() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"serve-retriever needs the package {error.name!r}: pip install 'stepgym[search]'") from None


class _Source:
    """Where the passages come from: a file, or the generated encyclopedia.

    Attributes:
        corpus: The corpus, once it was needed; None until then.
    """

    def __init__(self, path: Path | None, articles: int | None, encyclopedia: Any) -> None:
        given = {"--corpus": path, "--articles": articles, "encyclopedia": encyclopedia}
        self._given = [name for name, value in given.items() if value is not None]
        if path is not None and len(self._given) > 1:
            raise UserError(
                f"serve-retriever: {self._given[1]} is for the generated encyclopedia: leave it or --corpus out"
            )
        self._path = path
        self._encyclopedia = _encyclopedia(encyclopedia, articles) if path is None else None
        self.corpus: Corpus | None = None

    def refuse(self, kind: str) -> None:
        """Raise `UserError` if anything was said of a corpus that is not looked at."""
        if self._given:
            raise UserError(f"serve-retriever: the retriever {kind!r} has its passages already: no {self._given[0]}")

    def open(self) -> Corpus:
        """Open the corpus; the encyclopedia is written where it does not lie yet."""
        from stepgym_search.corpus import open_corpus
        from stepgym_search.encyclopedia import encyclopedia_file

        if self._encyclopedia is not None:
            self.corpus = open_corpus(encyclopedia_file(self._encyclopedia))
        elif self._path is not None:
            self.corpus = open_corpus(self._path)
        assert self.corpus is not None, "there is one or the other"
        return self.corpus

    def close(self) -> None:
        """Close the corpus."""
        if self.corpus is not None:
            self.corpus.close()


def _encyclopedia(fields: Any, articles: int | None) -> EncyclopediaConfig:
    from pydantic import TypeAdapter, ValidationError

    from stepgym_search.encyclopedia import EncyclopediaConfig

    if fields is not None and not isinstance(fields, dict):
        raise UserError(f"encyclopedia: expected a mapping of fields, got {fields!r}")
    chosen = {**(fields or {}), **({} if articles is None else {"articles": articles})}
    known = list(EncyclopediaConfig.__dataclass_fields__)
    for name in chosen:
        if name not in known:
            raise UserError(f"encyclopedia: {unknown('field', name, known)}")
    try:
        return TypeAdapter(EncyclopediaConfig).validate_python(chosen)
    except ValidationError as error:
        raise UserError(error_line(error, "encyclopedia", EncyclopediaConfig, chosen)) from None


# ---- listening ------------------------------------------------------------------------------------------------------


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the port, and does not take connections yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UserError(f"serve-retriever: --host {host!r} is no address: {error.strerror}") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise _taken(host, port, error) from None
    return listening


def _taken(host: str, port: int, error: OSError) -> UserError:
    return UserError(
        f"serve-retriever: cannot listen on port {port} of {host}: {error.strerror}; --port 0 picks a free one"
    )


def _url(host: str, listening: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _run(app: Any, listening: socket.socket, host: str) -> None:
    """Serve until a signal comes, which is then raised as a `KeyboardInterrupt`."""
    import uvicorn

    url = _url(host, listening)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                typer.echo(url)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Closing the search answers those who still wait for it; uvicorn would break off their requests.
            giving_up = asyncio.get_running_loop().call_later(PATIENCE, app.state.search.close, 0.0)
            try:
                await super().shutdown(sockets)
            finally:
                giving_up.cancel()

    config = uvicorn.Config(
        app,
        log_config=None,  # its messages go where ours go
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_keep_alive=60,  # clients keep connections for about as long between two rounds of searches
        timeout_graceful_shutdown=PATIENCE + 5,
    )
    try:
        listening.listen(config.backlog)
    except OSError as error:
        raise _taken(host, listening.getsockname()[1], error) from None
    if not _is_loopback(host):
        typer.echo(f"note: there is no key; whoever reaches {url} can search", err=True)
    Server(config).run(sockets=[listening])
