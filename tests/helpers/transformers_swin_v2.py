"""Small Swins v2 of transformers to compare with."""

from __future__ import annotations

from typing import Any

from helpers.transformers_models import perturbed
from helpers.transformers_swin import SHAPE


def reference(cls: str = 'Swinv2ForImageClassification', **fields: Any) -> Any:
    """The model, with parameters none of which is zero, one or like another.

    Scales are so small that the masks of shifted windows, -100 for the authors and timm and -200
    for transformers, both leave no weight.
    """
    import torch
    import transformers

    def special(name: str, p: Any) -> Any:
        return torch.linspace(2, 3.4, p.numel()).reshape(p.shape) if 'logit_scale' in name else None

    config = transformers.Swinv2Config(**{**SHAPE, **fields})
    return perturbed(getattr(transformers, cls)(config), special)
