"""Texts of `--holdout`: a share of the range of x, or a factor below the largest."""

from __future__ import annotations

import re

from vit_jax.errors import UserError


def factor(text: str) -> float:
    """`4x` -> 4: all above a quarter of the largest x is held out.

    Raises:
      UserError: for another text, or a factor that holds out nothing.
    """
    match = re.fullmatch(r'(\d+(?:\.\d+)?)x', text.strip())
    if match is None or float(match[1]) <= 1:
        raise UserError(f'--holdout {text}: write a factor above 1, as 4x')
    return float(match[1])


def share(text: str) -> float:
    """The upper share of the range of x that is held out: `0.5` -> 0.5, `4x` -> 0.75.

    Raises:
      UserError: for another text, or a share that leaves nothing to fit.
    """
    if text.strip().endswith('x'):
        return 1 - 1 / factor(text)
    try:
        value = float(text)
    except ValueError as e:
        raise UserError(f'--holdout {text!r}: write a share below 1, or a factor, as 4x') from e
    if not 0 <= value < 1:
        raise UserError(
            f'--holdout {value}: must be at least 0 and less than 1, or a factor, as 4x'
        )
    return value
