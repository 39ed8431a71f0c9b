"""Bad input is one line that says what and where, with exit code 2; no traceback, and nothing is lost."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def refused(done: Any, *parts: object) -> str:
    """That a command was refused in one line which holds all parts. Returns the line."""
    *before, line = done.err.splitlines() or [""]
    assert done.code == 2, done
    # What was told before is progress: the table of outcomes, a bar.
    told = [
        text
        for text in before
        if not text.startswith(("run: ", "what training", "│", "┃", "┏", "┡", "└", "Loading weights"))
    ]
    assert not any(told), done.err
    assert line.startswith("error: "), line
    assert len(line) < 600
    for part in parts:
        assert str(part) in line, line
    assert done.out == ""
    return str(line)


@pytest.fixture
def train(stepgym: Callable[..., Any], recipe: Path, tmp_path: Path) -> Callable[..., Any]:
    """`stepgym train RECIPE CHANGES --out FOLDER`."""
    return lambda *changes: stepgym("train", recipe, *changes, "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        # unknown fields, at every level
        ("bugdet.iterations=3", ["unknown field 'bugdet'", "did you mean 'budget'?"]),
        ("budget.iteration=3", ["budget", "unknown field 'iteration'", "'iterations'"]),
        ("env.max_turn=3", ["env", "unknown field 'max_turn'", "'max_turns'"]),
        ("agent.speed=3", ["agent", "unknown field 'speed'"]),
        ("model.widht=64", ["model", "unknown field 'widht'", "'width'"]),
        ("engine.max_lanes=3", ["engine", "unknown field 'max_lanes'"]),
        ("renderer.chat_templat=x", ["renderer", "'chat_template'"]),
        ("sampling.temprature=1", ["sampling", "'temperature'"]),
        ("rollout.sample=1", ["rollout", "'samples'"]),
        ("outcomes.completed={trian: true}", ["outcomes.completed", "trian", "train"]),
        ("warm_start.task=1", ["warm_start", "'tasks'"]),
        ("warm_start.sft.update=1", ["warm_start.sft", "'updates'"]),
        ("warm_start.sft.optimizer.learning_rat=1", ["warm_start.sft", "'learning_rate'"]),
        ("policy.devise=cpu", ["policy", "'device'"]),
        ("algorithm.reductoin=token", ["algorithm", "'reduction'"]),
        ("algorithm.credit={kind: grpo, scale: 1}", ["credit", "unknown field 'scale'"]),
        ("algorithm.loss={kind: ppo, clip: 1}", ["loss", "unknown field 'clip'"]),
        ("algorithm.optimizer.weight_deca=0", ["optimizer", "'weight_decay'"]),
        ("evaluation.test_task=1", ["evaluation", "'test_tasks'"]),
        ("checkpoint.evry=1", ["checkpoint", "'every'"]),
        # wrong types and values
        ("budget.iterations=many", ["budget.iterations", "an integer", "'many'"]),
        ("budget.iterations=-1", ["budget.iterations", "greater than or equal to 0"]),
        ("env.max_turns=often", ["env.max_turns", "an integer", "'often'"]),
        ("rollout.samples=0", ["rollout.samples"]),
        ("sampling.top_p=1.5", ["sampling.top_p"]),
        ("algorithm.optimizer.learning_rate=fast", ["learning_rate", "a number"]),
        ("algorithm.reduction=word", ["reduction", "token"]),
        ("algorithm.mini_batches=two", ["mini_batches", "an integer"]),
        ("threads=0", ["threads"]),
        ("model.width=63", ["tiny model", "width", "63"]),
        ("model.vocab_size=10", ["tiny model", "vocab_size"]),
        ("rollout=5", ["rollout"]),
        ("env.kind=7", ["env"]),
        # unknown names
        ("env=colour:Colours", ["env.kind", "there is no module 'colour'"]),
        ("env=colours:Colors", ["env.kind", "did you mean 'Colours'?"]),
        ("env=sqll", ["env.kind", "unknown environment 'sqll'", "did you mean 'sql'?"]),
        ("agent=chta", ["agent.kind", "unknown agent 'chta'", "'chat'"]),
        ("engine=transformer", ["engine.kind", "unknown engine 'transformer'", "'transformers'"]),
        ("model.kind=huge", ["model", "huge", "tiny", "pretrained"]),
        ("algorithm.credit=grop", ["credit", "'grop'", "'grpo'"]),
        ("algorithm.loss=pop", ["loss", "'pop'", "ppo"]),
        ("algorithm.correction=trunc", ["correction", "'trunc'", "none"]),
        ("algorithm.kl=k4", ["kl", "k1", "k3"]),
        ("outcomes.complete={train: false}", ["outcomes", "unknown outcome 'complete'", "completed"]),
        ("outcomes.completed={reward: high}", ["reward", "'keep'", "'high'"]),
        ("outcomes.env_error={retries: two}", ["outcomes.env_error", "retries", "'two'"]),
        ("outcomes.env_error={train: 1}", ["outcomes.env_error", "train", "true or false"]),
        ("outcomes.window=wide", ["outcomes.window", "'wide'"]),
        ("outcomes.max_infrastructure_share=20", ["outcomes.max_infrastructure_share", "from 0 to 1", "20"]),
        ("outcomes.max_dropped_share=-1", ["outcomes.max_dropped_share", "from 0 to 1", "-1"]),
        ("outcomes.completed=no", ["outcomes.completed", "expected a mapping"]),
        # what does not go together
        ("algorithm.credit=gae", ["algorithm", "gae", "needs a critic", "critic: {}", "grpo", "rloo"]),
        ("algorithm.credit={kind: td_lambda}", ["td_lambda", "step-wise", "use gae"]),
        ("algorithm.credit=vtrace", ["vtrace", "step-wise", "use gae", "correction"]),
        ("algorithm.critic={}", ["algorithm", "critic", "no effect", "grpo"]),
        ("sampling.top_p=0.9", ["sampling", "top_p = 0.9", "use 1.0", "correction"]),
        ("sampling.top_k=20", ["sampling", "top_k = 20"]),
        ("sampling.min_p=0.1", ["sampling", "min_p = 0.1"]),
        ("sampling.repetition_penalty=1.1", ["sampling", "repetition_penalty = 1.1"]),
        ("sampling.temperature=0", ["sampling.temperature", "greedy"]),
        ("budget.tasks_per_iteration=49", ["budget.tasks_per_iteration", "48 tasks", "49"]),
        ("engine={kind: openai, base_url: 'http://127.0.0.1:9/v1'}", ["engine.kind", "openai", "transformers"]),
        ("engine=openai", ["engine", "base_url"]),
        ("engine.device=cpu", ["engine.device", "policy"]),
        ("renderer.chat_template=nowhere.jinja", ["renderer.chat_template", "nowhere.jinja"]),
        ("model={kind: pretrained, path: /nowhere/model}", ["model.path", "no folder /nowhere/model"]),
        ("seed", ["override 'seed'", "name=value"]),
        ("seed.x=1", ["seed", "an integer"]),
        ("budget={", ["override"]),
    ],
)
def test_a_recipe_that_cannot_work(train: Callable[..., Any], change: str, parts: list[str]) -> None:
    refused(train(change), *parts)


def test_a_mistake_does_not_take_the_folder(train: Callable[..., Any], tmp_path: Path) -> None:
    refused(train("model={kind: pretrained, path: /nowhere/model}"))
    done = train("warm_start=null", "budget.iterations=0", "evaluation.test_tasks=0")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["success_before"] is None


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["there is no such file"]),
        ("env: {kind: sql\nmodel: {kind: tiny}\n", [":2"]),
        ("env:\n  kind: sql\n\tmodel: x\n", [":3"]),
        ("- a\n- b\n", ["expected a mapping"]),
        ("", ["'env' is missing"]),
        ("env: {kind: sql}\n", ["'model' is missing"]),
        ("env: {}\nmodel: {kind: tiny}\n", ["env", "'kind' is missing"]),
        ("env: {kind: sql}\nmodel: {}\n", ["model"]),
        ("env: {kind: sql}\nenv: {kind: sql}\n", ["duplicate key"]),
        (b"\xff\xfe\x00", ["UTF-8"]),
    ],
)
@pytest.mark.parametrize("verb", ["train", "rollout"])
def test_a_recipe_that_cannot_be_read(
    stepgym: Callable[..., Any], tmp_path: Path, verb: str, content: str | bytes | None, parts: list[str]
) -> None:
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(stepgym(verb, path, "--out", tmp_path / "run"), path, *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["train", "rollout"])
def test_a_folder_that_cannot_be_used(stepgym: Callable[..., Any], recipe: Path, tmp_path: Path, verb: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    refused(stepgym(verb, recipe, "--out", file), file, "this is a file")
    refused(stepgym(verb, recipe, "--out", file / "below"), file, "Not a directory")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.yaml").write_text("mine")
    refused(stepgym(verb, recipe, "--out", foreign), foreign, "not empty and not a run's")
    assert [path.name for path in foreign.iterdir()] == ["config.yaml"]
    assert (foreign / "config.yaml").read_text() == file.read_text() == "mine"
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    refused(stepgym(verb, recipe, "--out", broken), broken / "run.json", "not the identity of a run")


def test_a_folder_that_may_not_be_written(stepgym: Callable[..., Any], recipe: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "tiny.yaml"
        plan.write_text(recipe.read_text())
        (folder / "run").mkdir()
        (folder / "run").chmod(0o555)
        folder.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            inside, beside = (stepgym("rollout", plan, "--out", folder / part) for part in ("run", "new"))
        finally:
            os.seteuid(user)
            folder.chmod(0o755)
            (folder / "run").chmod(0o755)
    refused(inside, folder / "run", "cannot write here", "Permission denied")
    refused(beside, folder / "new", "cannot write here", "Permission denied")


@pytest.mark.parametrize("verb", ["rollout", "eval"])
def test_an_unknown_split(stepgym: Callable[..., Any], recipe: Path, tmp_path: Path, verb: str) -> None:
    arguments = [recipe] if verb == "rollout" else ["--recipe", recipe]
    refused(stepgym(verb, *arguments, "--split", "exam", "--out", tmp_path / "run"), "unknown split 'exam'", "train")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["which environment?"]),
        (["--env", "colours:Colours"], ["which model?"]),
        (["--env", "colours:Colours", "--model", "x"], ["where is the model?", "--base-url", "--engine"]),
        (["--env", "colours:Colours", "--model", "x", "--base-url", "http://h/v1", "--engine", "x"], ["exclude"]),
        (["--env", "nope", "--model", "x", "--base-url", "http://h/v1"], ["unknown environment 'nope'"]),
        (["--env", "colours:Colours", "--model", "x", "--base-url", "http://h/v1", "--api", "xml"], ["--api", "chat"]),
        (["--env", "colours:Colours", "--model", "x", "--base-url", "host:8000"], ["host:8000"]),
        (["--env", "colours:Colours", "--model", "/no/model", "--engine", "transformers"], ["/no/model"]),
        (["--env", "colours:Colours", "--model", "x", "--engine", "trnsformers"], ["unknown engine", "transformers"]),
        (["--env", "colours:Colours", "--model", "x", "--engine", "transformers", "env.max_turn=1"], ["max_turns"]),
        (["--tasks", "0"], ["--tasks"]),
        (["--compare", "/no/a", "/no/b"], ["/no/a", "no such trajectory store"]),
        (["--recipe", "/no/recipe.yaml"], ["/no/recipe.yaml", "no such file"]),
    ],
)
def test_an_evaluation_that_cannot_work(
    stepgym: Callable[..., Any], tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    refused(stepgym("eval", *arguments, "--out", tmp_path / "run"), *parts)


@pytest.mark.parametrize("api", ["chat", "completions", "auto"])
def test_an_endpoint_that_does_not_answer(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path, api: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    where = ["--env", "colours:Colours", "--base-url", url, "--api", api, "--out", tmp_path / "run"]
    refused(stepgym("eval", *where, "--model", "x", "--tokenizer", start_server().folder), url)


@pytest.mark.parametrize("api", ["chat", "completions", "auto"])
def test_an_endpoint_that_serves_another_model(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path, api: str
) -> None:
    server = start_server()
    where = ["--env", "colours:Colours", "--base-url", server.url, "--api", api, "--out", tmp_path / "run"]
    refused(stepgym("eval", *where, "--model", "huge", "--tokenizer", server.folder), "huge", "tiny")


def test_an_endpoint_that_wants_a_key(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], tmp_path: Path
) -> None:
    server = start_server(api_key="secret")
    where = ["--env", "colours:Colours", "--base-url", server.url, "--model", "tiny", "--out", tmp_path / "run"]
    refused(stepgym("eval", *where), "key")


def test_a_model_without_a_chat_template(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(start_server().folder).iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = f"model={{kind: pretrained, path: {folder}}}"
    refused(stepgym("train", recipe, model, "--out", tmp_path / "a"), "no chat template")
    where = ["--env", "colours:Colours", "--engine", "transformers", "--model", folder]
    refused(stepgym("eval", *where, "--out", tmp_path / "b"), "no chat template")


@pytest.fixture
def sql_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes a data set of one row over one database, some fields changed or (None) left out."""

    def write(**changes: Any) -> Path:
        home = tmp_path / "databases" / "mine" / "shop"
        home.mkdir(parents=True)
        with sqlite3.connect(home / "shop.sqlite") as database:
            database.execute("CREATE TABLE item (name TEXT)")
        database.close()
        prompt = [{"role": "user", "content": "How many items?"}]
        gold = {"ground_truth": "SELECT count(*) FROM item"}
        row = {"prompt": prompt, "db_id": "shop", "data": "mine", "reward_spec": gold}
        row = {name: value for name, value in {**row, **changes}.items() if value is not None}
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        return path

    return write


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"prompt": None}, ["row 0", "prompt"]),
        ({"db_id": None}, ["row 0", "db_id"]),
        ({"reward_spec": None}, ["row 0", "reward_spec"]),
        ({"reward_spec": {}}, ["row 0", "ground_truth"]),
        ({"db_id": "elsewhere"}, ["row 0", "elsewhere"]),
    ],
)
def test_a_row_of_a_data_set_without_its_fields(
    stepgym: Callable[..., Any],
    start_server: Callable[..., Any],
    sql_rows: Callable[..., Path],
    tmp_path: Path,
    changes: dict[str, Any],
    parts: list[str],
) -> None:
    rows = sql_rows(**changes)
    server = start_server()
    where = ["eval", "--env", "sql", "--base-url", server.url, "--model", "tiny", "--out", tmp_path / "run"]
    done = stepgym(*where, f"env.test_dataset={rows}", f"env.database_root={tmp_path / 'databases'}")
    refused(done, rows, *parts)


def test_a_database_that_is_not_one(
    stepgym: Callable[..., Any], start_server: Callable[..., Any], sql_rows: Callable[..., Path], tmp_path: Path
) -> None:
    rows = sql_rows()
    database = tmp_path / "databases" / "mine" / "shop" / "shop.sqlite"
    database.write_text("not a database")
    server = start_server()
    where = ["eval", "--env", "sql", "--base-url", server.url, "--model", "tiny", "--out", tmp_path / "run"]
    refused(stepgym(*where, f"env.test_dataset={rows}", f"env.database_root={tmp_path / 'databases'}"), database)
    assert database.read_text() == "not a database"
