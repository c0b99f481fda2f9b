"""Models of transformers to compare with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np


def perturbed(model: Any, special: Callable[[str, Any], Any] = lambda name, p: None) -> Any:
    """The model for evaluation, with parameters none of which is zero, one or like another.

    Args:
      model: of torch.
      special: the value of a parameter, by its name and what it is; None for a random one.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.eval().named_parameters():
            mean = float(bool(re.search(r'norm\w*\.weight$', name)))
            value = special(name, p)
            p.copy_(
                mean + 0.2 * torch.randn(p.shape, generator=generator) if value is None else value
            )
    return model


def theirs(model: Any, images: Any, **inputs: Any) -> Any:
    """A model's outputs for images [B, H, W, C] and other arrays."""
    import torch

    tensors = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}
    with torch.no_grad():
        return model(torch.from_numpy(np.array(images).transpose(0, 3, 1, 2)), **tensors)
