"""Small image encoders of Segment Anything of timm, with timm's own outputs.

timm needs torchvision, so what it computes is stored. As a command this module asks it again:

    python tests/helpers/timm_sam.py > tests/golden/timm_sam.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from helpers import timm_forms

GOLDEN = Path(__file__).parents[1] / 'golden' / 'timm_sam.json'
SIDE = 24
_SMALL = {
    **{'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'patch_size': 4, 'img_size': SIDE},
    **{'window_size': 4, 'global_attn_indexes': [1], 'num_classes': 3},
}
# With positions and a neck, and without.
FORMS = {
    'samvit_base_patch16': {**_SMALL, 'neck_chans': 6},
    'samvit_base_patch16_224': _SMALL,
}


def images(side: int) -> np.ndarray:
    """The input [1 side side 3]."""
    return np.random.default_rng(0).normal(size=(1, side, side, 3)).astype(np.float32)


def made(name: str) -> Any:
    """A model of one of FORMS with random parameters."""
    import timm

    return timm_forms.drawn(timm.create_model(name, **FORMS[name]))


def config(name: str) -> dict[str, Any]:
    """Its config.json."""
    return timm_forms.plain_config(name, FORMS[name])


def golden() -> dict[str, dict[str, Any]]:
    """By architecture: config.json, shapes, the map of the last block, the logits, and the logits
    of images of 32 pixels.
    """
    import torch

    found = {}
    for name in FORMS:
        model = made(name)

        def asked(side: int, call: Any) -> list[Any]:
            with torch.no_grad():
                out: list[Any] = call(torch.from_numpy(images(side).transpose(0, 3, 1, 2))).tolist()
            return out

        found[name] = {
            'config': config(name),
            'shapes': timm_forms.shapes(model),
            'logits': asked(SIDE, model),
            'resized': asked(32, model),
            'block': asked(SIDE, _last_block(model)),
        }
    return found


def _last_block(model: Any) -> Any:
    return lambda x: model.forward_intermediates(x, intermediates_only=True)[-1]


if __name__ == '__main__':
    sys.stdout.write(json.dumps(golden()) + '\n')
