"""A renderer on disk: its tokenizer, and everything that its prompts depend on. With it a run explains itself.

The folder holds what `tokenizer.save_pretrained` writes, and `renderer.json`: the chat template, its variables, its
date, and how the renderer works (`kind`, `history`, `turns`, `max_observation_tokens`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from stepgym.errors import UserError
from stepgym.model.renderer import Renderer

SETTINGS = "renderer.json"


def save_renderer(renderer: Renderer, folder: str | os.PathLike[str]) -> Path:
    """Write a renderer into a folder, whole or not at all; a folder that is there already stays as it is.

    Raises `UserError` when the disk refuses.
    """
    path = Path(folder)
    if (path / SETTINGS).exists():
        return path
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        renderer.tokenizer.save_pretrained(str(temporary))
        text = json.dumps(renderer_settings(renderer), indent=2, ensure_ascii=False)
        (temporary / SETTINGS).write_text(text + "\n", encoding="utf-8")
        try:
            temporary.rename(path)
        except OSError:
            if not (path / SETTINGS).exists():  # else another process has written it meanwhile
                raise
    except OSError as error:
        raise UserError(f"{path}: cannot write the renderer here: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def load_renderer(folder: str | os.PathLike[str]) -> Renderer:
    """The renderer that `save_renderer` wrote; a folder or hub name with a tokenizer only gives its own template.

    Nothing is downloaded for a folder, and no code that lies in it is run. Raises `UserError` where there is none.
    """
    from transformers import AutoTokenizer

    path = Path(folder).expanduser()
    if str(folder).startswith(("/", ".", "~")) and not path.is_dir():
        raise UserError(f"{folder}: there is no such folder with a tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path if path.is_dir() else folder))
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{folder}: the tokenizer cannot be loaded: {reason}") from None
    settings: dict[str, Any] = {}
    if (path / SETTINGS).exists():
        try:
            settings = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
            day = date.fromisoformat(settings["template_date"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{path / SETTINGS}: not the settings of a renderer") from None
        return _make(tokenizer, settings, day)
    return _make(tokenizer, settings, date.today())


def renderer_settings(renderer: Renderer) -> dict[str, Any]:
    """All that a renderer's prompts depend on besides its tokenizer, as JSON."""
    template = renderer.template
    return {
        "kind": renderer.kind,
        "history": renderer.history,
        "turns": renderer.turns,
        "max_observation_tokens": renderer.max_observation_tokens,
        "chat_template": template.source,
        "chat_template_kwargs": template.kwargs,
        "template_date": template.today.isoformat(),
        "template_digest": template.digest,
    }


def recorded_date(folder: str | os.PathLike[str]) -> date:
    """The date that the templates of a saved renderer are told. Raises `UserError` for a folder without one."""
    path = Path(folder) / SETTINGS
    try:
        return date.fromisoformat(json.loads(path.read_text(encoding="utf-8"))["template_date"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not the settings of a renderer") from None


def redated(renderer: Renderer, day: date) -> Renderer:
    """The same renderer, with a template that is told another date."""
    return _make(renderer.tokenizer, renderer_settings(renderer), day)


def _make(tokenizer: Any, settings: Mapping[str, Any], day: date) -> Renderer:
    kind = settings.get("kind", "auto")
    own = getattr(tokenizer, "chat_template", None)
    source = settings.get("chat_template")
    return Renderer(
        tokenizer,
        kind=kind,
        history=settings.get("history", "template"),
        turns=settings.get("turns", "conversation"),
        max_observation_tokens=settings.get("max_observation_tokens"),
        # The library's renderers stand for a model's own template and take no other.
        chat_template=None if kind not in ("auto", "template") or source == own else source,
        chat_template_kwargs=settings.get("chat_template_kwargs") or {},
        today=day,
    )
