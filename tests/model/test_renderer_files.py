"""Renderers that are saved and read back render the same."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from stepgym.errors import UserError
from stepgym.model.renderer import Renderer
from stepgym.model.renderer_files import load_renderer, redated, renderer_settings, save_renderer
from stepgym.model.tiny import CHAT_TEMPLATE, build_tiny_tokenizer

DATED = "{{ strftime_now('%d %B %Y') }}\n" + CHAT_TEMPLATE
CONVERSATION = [{"role": "user", "content": "Open the box."}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tiny_tokenizer(["Open the box. It is red. 2031 February"] * 4)


def same(one: Renderer, other: Renderer) -> bool:
    first, second = one.prompt(CONVERSATION), other.prompt(CONVERSATION)
    return first.text == second.text and first.new_ids.tolist() == second.new_ids.tolist()


def test_a_renderer_comes_back_with_all_that_its_prompts_depend_on(tokenizer: Any, tmp_path: Path) -> None:
    made = Renderer(
        tokenizer,
        chat_template=DATED,
        chat_template_kwargs={"tone": "curt"},
        today=date(2031, 2, 3),
        history="append",
    )
    read = load_renderer(save_renderer(made, tmp_path / "renderer"))
    assert same(made, read)
    assert "03 February 2031" in read.prompt(CONVERSATION).text
    assert read.history == "append"
    assert read.template.digest == made.template.digest
    assert renderer_settings(read) == renderer_settings(made)


def test_turns_come_back_too(tokenizer: Any, tmp_path: Path) -> None:
    made = Renderer(tokenizer, turns="continue", max_observation_tokens=3)
    read = load_renderer(save_renderer(made, tmp_path / "renderer"))
    for other in (read, redated(read, date(2031, 2, 4))):
        assert (other.turns, other.max_observation_tokens) == ("continue", 3)
    settings = json.loads((tmp_path / "renderer" / "renderer.json").read_text())
    del settings["turns"], settings["max_observation_tokens"]  # as runs of older versions have it
    (tmp_path / "renderer" / "renderer.json").write_text(json.dumps(settings))
    assert load_renderer(tmp_path / "renderer").turns == "conversation"


def test_the_first_one_stays(tokenizer: Any, tmp_path: Path) -> None:
    first = Renderer(tokenizer, today=date(2031, 2, 3))
    save_renderer(first, tmp_path / "renderer")
    save_renderer(Renderer(tokenizer, today=date(2032, 2, 3)), tmp_path / "renderer")
    assert load_renderer(tmp_path / "renderer").template.today == date(2031, 2, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["renderer"]


def test_a_tokenizer_alone_gives_its_own_template(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "plain")
    assert same(load_renderer(tmp_path / "plain"), Renderer(tokenizer))


def test_another_date_changes_only_the_date(tokenizer: Any) -> None:
    made = Renderer(tokenizer, chat_template=DATED, today=date(2031, 2, 3))
    moved = redated(made, date(2031, 2, 4))
    text = made.prompt(CONVERSATION).text
    assert moved.prompt(CONVERSATION).text == text.replace("03 February", "04 February")
    assert same(redated(moved, date(2031, 2, 3)), made)


def test_what_is_no_renderer_is_one_line(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_renderer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot be loaded"):
        load_renderer(tmp_path / "empty")
    folder = save_renderer(Renderer(tokenizer), tmp_path / "renderer")
    (folder / "renderer.json").write_text(json.dumps({"template_date": "tomorrow"}))
    with pytest.raises(UserError, match="not the settings of a renderer"):
        load_renderer(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save_renderer(Renderer(tokenizer), tmp_path / "file" / "renderer")
