"""Writes the pictures of commands."""

from __future__ import annotations

import pathlib
from typing import Any

from vit_jax.errors import UserError


def save_figure(figure: Any, path: str | pathlib.Path, flag: str) -> Any:
    """Writes a figure, and returns its path.

    Raises:
      UserError: if it cannot be written; `flag` is what named the path.
    """
    from vit_jax.viz import figures

    try:
        return figures.save(figure, path)
    except OSError as e:
        raise UserError(f'{flag} {str(path)!r} cannot be written: {e.strerror}') from e
