"""Nested state in two: tensors, which go to files of tensors, and plain values, which go to JSON."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch


def take_apart(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Part tensors from plain values.

    Args:
        state: Nested mappings with texts as keys, of tensors and plain JSON values.

    Returns:
        The tensors by the path of their keys, as `learner/optimizer/updates`; and the rest, nested as before.

    Raises:
        ValueError: A key is no text, or has a slash in it.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key:
            raise ValueError(f"a key of a state must be a text without a slash, not {key!r}")
        if isinstance(value, torch.Tensor):
            tensors[key] = value.detach()
        elif isinstance(value, Mapping):
            inner, plain[key] = take_apart(value)
            tensors |= {f"{key}/{path}": tensor for path, tensor in inner.items()}
        else:
            plain[key] = value
    return tensors, plain


def put_together(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> dict[str, Any]:
    """What `take_apart` took apart; the plain values are copied."""
    state: dict[str, Any] = copy.deepcopy(dict(plain))
    for path, tensor in tensors.items():
        *outer, last = path.split("/")
        inner = state
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = tensor
    return state
