"""A small Mixer of timm, with timm's own outputs, and the names of its S/32.

timm needs torchvision, so what it computes is stored. As a command this module asks it again:

    python tests/helpers/timm_mixer.py > tests/golden/timm_mixer.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from helpers import timm_forms

GOLDEN = Path(__file__).parents[1] / 'golden' / 'timm_mixer.json'
SIDE = 12
# As timm writes it, without preprocessing.
CONFIG = {
    'architecture': 'mixer_s16_224',
    'num_classes': 3,
    'global_pool': 'avg',
    'pretrained_cfg': {'input_size': [3, SIDE, SIDE], 'mean': [0.5] * 3, 'std': [0.5] * 3},
}


def made() -> Any:
    """A model of two blocks with random parameters."""
    from timm.models.mlp_mixer import MlpMixer

    sizes = {'img_size': SIDE, 'patch_size': 4, 'num_blocks': 2, 'embed_dim': 8, 'num_classes': 3}
    return timm_forms.drawn(MlpMixer(**sizes))


def golden() -> dict[str, Any]:
    """Shapes of the parameters, logits, a patch after each block, and the shapes of S/32."""
    import timm
    import torch

    model = made()
    batch = torch.from_numpy(timm_forms.images(SIDE).transpose(0, 3, 1, 2))
    with torch.no_grad():
        blocks = model.forward_intermediates(batch, norm=True, intermediates_only=True)
        return {
            'shapes': timm_forms.shapes(model),
            'logits': model(batch)[0].tolist(),
            'blocks': [block[0, :, 1, 2].tolist() for block in blocks],
            'S/32': timm_forms.shapes(timm.create_model('mixer_s32_224')),
        }


if __name__ == '__main__':
    sys.stdout.write(json.dumps(golden()) + '\n')
