"""What all episodes of one configuration share: query workers, databases, tables of tasks, gold results."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepgym.env.task import Task
from stepgym.errors import EnvError, UnscorableTask, UserError
from stepgym_sql.dataset import load_rows
from stepgym_sql.folder import DatabaseFolder
from stepgym_sql.generate.tasks import SPLITS, GeneratedTasks, GeneratorConfig, is_generated
from stepgym_sql.generate.world import WorldSpec
from stepgym_sql.ordering import find_ordering, order_keys
from stepgym_sql.pool import QueryResult, Row, WorkerPool

_GOLD_RESULTS = 256
_CACHED_ROWS = 10_000
_MOST_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class Gold:
    """The result of a gold query.

    Attributes:
        rows: At least one.
        width: Number of columns.
        keys: The values of its ORDER BY terms for each row, or None where order does not count.
    """

    rows: Sequence[Row]
    width: int
    keys: Sequence[Row] | None


class SQLShared:
    """Opened once per process and configuration by `SQLEnv.open_shared`.

    Args:
        workers: Most query workers at a time.
        memory_mb: SQLite's heap limit in each of them, in MiB.
        score_timeout: Seconds that a gold query or a solution may take.
        generator: What tasks are drawn from where there is no data set.
        datasets: The data set of each split that has one; empty for generated tasks.
        database_root: The folder that the databases of data sets lie in.
    """

    def __init__(
        self,
        *,
        workers: int,
        memory_mb: int,
        score_timeout: float,
        generator: GeneratorConfig,
        datasets: Mapping[str, str],
        database_root: str | None,
    ) -> None:
        self.pool = WorkerPool(size=workers, memory_mb=memory_mb)
        self.folder = DatabaseFolder()
        self._score_timeout = score_timeout
        self._score_bytes = (memory_mb << 20) // 2
        self._generator = generator
        self._datasets = dict(datasets)
        self._root = database_root
        self._lock = threading.Lock()
        self._tables: dict[str, Sequence[Task]] = {}
        self._golds: OrderedDict[tuple[str, str], Gold] = OrderedDict()

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split. Raises `UserError` for one that does not exist."""
        known = tuple(self._datasets) or SPLITS
        if split not in known:
            raise UserError(f"sql: there is no split {split!r}; known: {', '.join(known)}")
        with self._lock:
            if split not in self._tables:
                self._tables[split] = (
                    load_rows(self._datasets[split], split, self._root)
                    if self._datasets
                    else GeneratedTasks(self._generator, split)
                )
            return self._tables[split]

    def database_of(self, task: Task) -> Path:
        """The database file of a task. Raises `UserError` for a task that names none."""
        if is_generated(task):
            return self.folder.path_of(WorldSpec.from_dict(task.data))
        if "database" not in task.data:
            raise UserError(f"sql: task {task.id!r} names no database: its data needs 'database', or a generated world")
        if self._root is None:
            raise UserError(f"sql: task {task.id!r} needs `database_root`, the folder that its database lies in")
        return Path(self._root, task.data["database"]).resolve()

    def gold(self, task: Task) -> Gold:
        """The result of a task's gold query, from memory where it is there.

        Raises:
            UnscorableTask: There is no gold query, or it gives no rows.
            EnvError: It fails.
        """
        if not isinstance(task.answer, str) or not task.answer.strip():
            raise UnscorableTask(f"task {task.id}: there is no gold query")
        database = self.database_of(task)
        key = (str(database), task.answer)
        with self._lock:
            if key in self._golds:
                self._golds.move_to_end(key)
                return self._golds[key]
        gold = self._run_gold(task, database)
        if len(gold.rows) <= _CACHED_ROWS:
            with self._lock:
                self._golds[key] = gold
                while len(self._golds) > _GOLD_RESULTS:
                    self._golds.popitem(last=False)
        return gold

    def run_to_score(self, database: Path, sql: str, max_rows: int = _MOST_ROWS) -> QueryResult:
        """Run a query whose whole result is wanted."""
        return self.pool.query(
            database, sql, timeout=self._score_timeout, max_rows=max_rows, max_bytes=self._score_bytes
        )

    def close(self) -> None:
        """End the workers and remove the databases."""
        self.pool.close()
        self.folder.close()

    def _run_gold(self, task: Task, database: Path) -> Gold:
        result = self.run_to_score(database, task.answer)
        if result.error is not None:
            raise EnvError(f"task {task.id}: the gold query fails: {result.error}")
        if result.more:
            raise EnvError(f"task {task.id}: the gold query gives more than can be compared")
        if not result.rows:
            raise UnscorableTask(f"task {task.id}: the gold query gives no rows")
        keys = None
        ordering = find_ordering(task.answer, result.columns) if len(result.rows) > 1 else None
        if ordering is not None:
            keys = order_keys(ordering, result, lambda sql: self.run_to_score(database, sql))
        return Gold(result.rows, len(result.columns), keys)
