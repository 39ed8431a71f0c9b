"""A run's folder belongs to one config and one process, survives kills, and takes nothing that is not its own."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgym.config import load_yaml
from stepgym.errors import UserError
from stepgym.run.folder import RunFolder, default_path, run_folder, write_whole

CONFIG = {"env": {"kind": "sql", "rate": 1e-6}, "name": "no"}


def test_a_folder_is_made_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    with run_folder(path, config=CONFIG, digest="d") as folder:
        assert not folder.resumed
        assert load_yaml(path / "config.yaml") == CONFIG
        assert folder.summary() is None
        assert list(folder.metrics()) == []
        folder.add_metrics({"iteration": 1, "loss": 0.5})
        started = folder.started_at
        assert 0 <= time.time() - started < 60
        assert (folder.trajectories.name, folder.checkpoints.name) == ("trajectories", "checkpoints")
    with run_folder(path, config=CONFIG, digest="d") as folder:
        assert folder.resumed
        assert folder.started_at == started
        folder.add_metrics({"iteration": 2})
        assert list(folder.metrics()) == [{"iteration": 1, "loss": 0.5}, {"iteration": 2}]
        folder.write_summary({"mean": 1.0})
        assert folder.summary() == {"mean": 1.0}


def test_another_config_is_refused_once_something_is_recorded(tmp_path: Path) -> None:
    with run_folder(tmp_path / "run", config=CONFIG, digest="d"):
        pass
    with run_folder(tmp_path / "run", config={"other": 1}, digest="e") as folder:
        assert not folder.resumed
        assert load_yaml(folder.path / "config.yaml") == {"other": 1}
        folder.add_metrics({"iteration": 1})
    with pytest.raises(UserError, match=r"another config \(digest e, now d\)"):
        RunFolder(tmp_path / "run", config=CONFIG, digest="d")
    with run_folder(tmp_path / "run", config={"other": 1}, digest="e") as folder:
        assert folder.resumed


@pytest.mark.parametrize("name", ["trajectories/1.parquet", "checkpoints/update-00000000/x", "summary.json"])
def test_whatever_was_recorded_counts(tmp_path: Path, name: str) -> None:
    with run_folder(tmp_path, config=CONFIG, digest="d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match="another config"):
        RunFolder(tmp_path, config=CONFIG, digest="e")


def test_a_refused_folder_is_not_held(tmp_path: Path) -> None:
    with run_folder(tmp_path, config=CONFIG, digest="d") as folder:
        folder.add_metrics({})
    with pytest.raises(UserError) as caught:
        RunFolder(tmp_path, config=CONFIG, digest="e")
    with run_folder(tmp_path, config=CONFIG, digest="d"):  # although the traceback is still alive
        assert caught.value is not None


def test_only_one_at_a_time(tmp_path: Path) -> None:
    with run_folder(tmp_path, config=CONFIG, digest="d"), pytest.raises(UserError, match="another process"):
        RunFolder(tmp_path, config=CONFIG, digest="d")
    RunFolder(tmp_path, config=CONFIG, digest="d").close()


@pytest.mark.parametrize("left", [[], [".lock"], [".lock", ".run.json.123"], [".lock", "run.json"]])
def test_a_run_that_was_killed_while_it_made_its_folder(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).write_text(json.dumps({"digest": "d", "started_at": 1.0}) if name == "run.json" else "")
    with run_folder(tmp_path, config=CONFIG, digest="d") as folder:
        assert load_yaml(folder.path / "config.yaml") == CONFIG
        assert folder.resumed == ("run.json" in left)


def test_what_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "config.yaml"
    mine.write_text("mine")
    with pytest.raises(UserError, match="not empty and not a run's"):
        RunFolder(tmp_path, config=CONFIG, digest="d")
    with pytest.raises(UserError, match="this is a file"):
        RunFolder(mine, config=CONFIG, digest="d")
    with pytest.raises(UserError, match="cannot write here: Not a directory"):
        RunFolder(mine / "below", config=CONFIG, digest="d")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert mine.read_text() == "mine"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(0, 40))
def test_a_line_of_metrics_that_was_cut_off_is_left_out(whole: int, cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name, run_folder(name, config={}, digest="d") as folder:
        for number in range(whole):
            folder.add_metrics({"iteration": number, "loss": math.pi})
        half = json.dumps({"iteration": 99, "loss": math.pi})[:cut]
        complete = cut >= len(json.dumps({"iteration": 99, "loss": math.pi}))
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(half)
        folder.keep_metrics(lambda row: row["iteration"] != 1)
        folder.add_metrics({"iteration": 100})
        kept = [row["iteration"] for row in folder.metrics()]
        assert kept == [n for n in range(whole) if n != 1] + [99] * complete + [100]
        assert all(json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines())


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"


def test_the_default_folder_has_name_time_and_seed() -> None:
    path = default_path("eval-sql", 3)
    assert path.parts[:2] == ("runs", "eval-sql")
    assert path.name.endswith("-3")
    assert not path.is_absolute()


def test_a_run_that_goes_on_after_midnight_tells_templates_the_date_it_began_on(tmp_path: Path) -> None:
    from datetime import date

    from stepgym.env.messages import user
    from stepgym.model.renderer import Renderer
    from stepgym.model.tiny import build_tiny_tokenizer

    dated = (
        "{{- 'Today is ' + strftime_now('%d %B %Y') + '\\n' }}"
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    tokenizer = build_tiny_tokenizer(["What day is it?"])
    first, second = (Renderer(tokenizer, chat_template=dated, today=date(2026, 1, 30 + n)) for n in (0, 1))
    assert first.prompt([user("x")]).text != second.prompt([user("x")]).text
    with run_folder(tmp_path / "run", config=CONFIG, digest="d") as folder:
        assert folder.keep_renderer(first) is first
    with run_folder(tmp_path / "run", config=CONFIG, digest="d") as folder:
        again = folder.keep_renderer(second)
    assert again.prompt([user("x")]).text == first.prompt([user("x")]).text
    assert again.template.digest == first.template.digest
    assert again.history == second.history
