"""Small Swins v2 CR of timm, with timm's own outputs.

timm needs torchvision, so what it computes is stored. As a command this module asks it again:

    python tests/helpers/timm_swin_cr.py > tests/golden/timm_swin_cr.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from helpers import timm_forms

GOLDEN = Path(__file__).parents[1] / 'golden' / 'timm_swin_cr.json'
SIDE = 32
_SMALL = {
    **{'embed_dim': 8, 'depths': [2, 3, 1], 'num_heads': [1, 2, 2], 'img_size': SIDE},
    **{'window_size': 4, 'num_classes': 3},
}
# With norms after each stage, after every other block, and after the last block alone.
FORMS = {
    'swinv2_cr_tiny_224': _SMALL,
    'swinv2_cr_tiny_ns_224': _SMALL,
    'swinv2_cr_huge_224': {**_SMALL, 'extra_norm_period': 2},
}


def made(name: str) -> Any:
    """A model of one of FORMS with random parameters."""
    import timm
    import torch

    model = timm.create_model(name, **FORMS[name]).eval()
    arrays = timm_forms.parameters({key: list(x.shape) for key, x in model.state_dict().items()})
    model.load_state_dict({key: torch.from_numpy(value) for key, value in arrays.items()})
    return model


def config(name: str) -> dict[str, Any]:
    """Its config.json."""
    return {
        'architecture': name,
        'num_classes': 3,
        'model_args': FORMS[name],
        'pretrained_cfg': {'input_size': [3, SIDE, SIDE], 'mean': [0.5] * 3, 'std': [0.5] * 3},
    }


def golden() -> dict[str, dict[str, Any]]:
    """By architecture: config.json, shapes, the logits, and the last cell of each stage's map."""
    import torch

    found = {}
    for name in FORMS:
        model = made(name)
        batch = torch.from_numpy(timm_forms.images(SIDE).transpose(0, 3, 1, 2))
        with torch.no_grad():
            maps = model.forward_intermediates(batch, intermediates_only=True)
            logits = model(batch)[0].tolist()
        found[name] = {
            'config': config(name),
            'shapes': {key: list(value.shape) for key, value in model.state_dict().items()},
            'logits': logits,
            'stages': [stage[0, :, -1, -1].tolist() for stage in maps],
        }
    return found


if __name__ == '__main__':
    sys.stdout.write(json.dumps(golden()) + '\n')
