"""Points that are held out: above a share of the range, or above a fraction of the largest."""

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
