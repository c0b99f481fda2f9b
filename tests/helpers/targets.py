"""Programs that are traced as if for other devices than those of this machine."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest

from vit_jax.nn import attention_choice
from vit_jax.nn.attention_choice import Target


def runs_on(target: Target) -> contextlib.AbstractContextManager:
    """A context in which attention is chosen for these devices."""
    return mock.patch.object(attention_choice, 'current_target', return_value=target)


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let all devices be of a kind; meshes stay as they are."""
    real = attention_choice.current_target
    monkeypatch.setattr(attention_choice, 'current_target', lambda: real()._replace(kind=kind))
