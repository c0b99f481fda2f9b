"""ImageNet-1k from scratch: ViT-5 by DeiT III's recipe.

    python -m vit_jax train experiments/vit/vit5.py --workdir runs/vit5

Wang et al., 2026, arXiv:2602.08071: RMSNorm, also of queries and keys, layer scale, registers,
learned and rotary positions, no biases in queries, keys and values; 800 epochs. `B/16` and `L/16`
(400 epochs) train at 192 pixels.

Expected, as published by the authors (github.com/wangf3014/ViT-5): 82.2 % for S/16, 84.2 % for B/16
and 84.9 % for L/16, the latter two after 20 more epochs at 224 pixels, which are also listed for
S/16. The hours are not published. Not measured by this project yet.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

# Image size, epochs, learning rate and stochastic depth.
SIZES = {
    'S/16': (224, 800, 4e-3, 0.05),
    'B/16': (192, 800, 3e-3, 0.2),
    'L/16': (192, 400, 3e-3, 0.35),
}


def get_config(
    variant: Literal['S/16', 'B/16', 'L/16'] = 'S/16', epochs: int = 0, fast: bool = False
) -> ConfigDict:
    """A ViT and its epochs, the published ones if 0; `fast` keeps residuals in bfloat16."""
    size, published_epochs, lr, drop_path = SIZES[variant]
    config = ConfigDict()
    config.total = f'{epochs or published_epochs} epochs'
    config.batch_size = 2048

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant(variant))
    config.model.update(norm='rms', qk_norm='rms', layer_scale=1e-4, no_bias='query|key|value')
    config.model.update(registers=4, positions=f'rope(reference={size // 16}, registers=100.0)')
    config.model.update(gelu='erf', drop_path=drop_path)
    config.model.update(dtype='bfloat16', residual_dtype=None if fast else 'float32')
    config.task = dict(name='classify', loss_name='sigmoid', mixup=0.8, cutmix=1.0)

    images = dict(source='tfds:imagenet2012')
    augment = 'flip|three_augment|color_jitter(0.3, 0.3, 0.3, 0, 1)'
    config.data = dict(images, split='train[:99%]')
    config.data.transforms = f"inception_crop({size}, 8, method='bicubic')|{augment}"
    images.update(transforms=f"resize_small({size}, 'bicubic')|central_crop({size})")
    config.evals = dict(
        val=dict(images, split='validation'), minival=dict(images, split='train[99%:]')
    )

    config.optim = dict(name='lamb', lr=lr, eps=1e-8, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5 epochs', init=1e-6, final=1e-5)
    config.every = dict(log='50', eval='5 epochs', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(vit.variant('mu/4'), positions='rope(reference=4, registers=100.0)')
    augment = config.data.transforms.partition('|')[2]
    config.data = dict(source='digits', split='train', transforms=f'resize(16)|{augment}')
    config.evals = dict(val=dict(source='digits', split='test', transforms='resize(16)'))
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
