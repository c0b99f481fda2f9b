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


def golden() -> dict[str, dict[str, Any]]:
    """By architecture: config.json, shapes, the logits, and the last cell of each stage's map."""
    import timm
    import torch

    found = {}
    for name in FORMS:
        model = timm_forms.drawn(timm.create_model(name, **FORMS[name]))
        batch = torch.from_numpy(timm_forms.images(SIDE).transpose(0, 3, 1, 2))
        with torch.no_grad():
            maps = model.forward_intermediates(batch, intermediates_only=True)
            logits = model(batch)[0].tolist()
        found[name] = {
            'config': timm_forms.plain_config(name, FORMS[name]),
            'shapes': timm_forms.shapes(model),
            'logits': logits,
            'stages': [stage[0, :, -1, -1].tolist() for stage in maps],
        }
    return found


if __name__ == '__main__':
    sys.stdout.write(json.dumps(golden()) + '\n')
