"""A small BiT of timm, with timm's own outputs.

timm needs torchvision, so what it computes is stored. As a command this module asks it again:

    python tests/helpers/timm_bit.py > tests/golden/timm_bit.json
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from helpers import timm_forms

GOLDEN = Path(__file__).parents[1] / 'golden' / 'timm_bit.json'
SIDE = 32
# As timm writes it, without preprocessing.
CONFIG = {
    'architecture': 'resnetv2_50x1_bit',
    'num_classes': 3,
    'global_pool': 'avg',
    'model_args': {'num_classes': 3},
    'pretrained_cfg': {'input_size': [3, SIDE, SIDE], 'mean': [0.5] * 3, 'std': [0.5] * 3},
}


def golden() -> dict[str, Any]:
    """The shapes of the parameters and the logits, of a BiT of two stages."""
    import torch
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    # The arguments of its BiTs, but for the sizes.
    conv = functools.partial(StdConv2d, eps=1e-8)
    sizes = {'layers': (2, 1), 'channels': (256, 512), 'num_classes': 3}
    model = timm_forms.drawn(ResNetV2(**sizes, stem_type='fixed', conv_layer=conv))
    batch = torch.from_numpy(timm_forms.images(SIDE).transpose(0, 3, 1, 2))
    with torch.no_grad():
        return {'shapes': timm_forms.shapes(model), 'logits': model(batch)[0].tolist()}


if __name__ == '__main__':
    sys.stdout.write(json.dumps(golden()) + '\n')
