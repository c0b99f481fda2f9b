r"""CIFAR-10 from scratch: the value of a hierarchy of windows, against a ViT of similar cost.

    python -m vit_jax train experiments/swin/cifar10.py:swin --workdir runs/swin
    python -m vit_jax train experiments/swin/cifar10.py:vit --workdir runs/swin_vit

Both train with the recipe of experiments/vit/cifar10.py for half as many epochs, five. An image of
32 pixels takes 23.9 forward MFLOPs (matmuls) in the Swin, which has three stages of two blocks and
windows of 4 x 4 tokens, and 26.4 in the ViT; they have 321,182 and 173,458 parameters.

Expected: test accuracy >= 0.50 for either. Measured: 0.544 (Swin) and 0.588 (ViT), in about 15
minutes each on one busy CPU core; experiments/README.md discusses it.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# Of similar cost on purpose.
MODELS = {
    'swin': dict(
        name='swin', patch_size=2, width=24, depths=(2, 2, 2), num_heads=(2, 4, 8), window=4
    ),
    'vit': dict(
        name='vit',
        patch_size=4,
        width=72,
        depth=4,
        num_heads=6,
        mlp_dim=144,
        pool='gap',
        posemb='sincos2d',
    ),
}


def get_config(model: Literal['swin', 'vit'] = 'swin') -> ConfigDict:
    """One of the two models."""
    config = ConfigDict()
    config.total = '5 epochs'
    config.batch_size = 64

    config.model = dict(MODELS[model], num_classes=placeholder(int))
    config.task = dict(name='classify')

    images = dict(source='tfds:cifar10', cache=True)
    config.data = dict(images, split='train', transforms='pad_and_crop(2)|flip', workers=0)
    config.evals = dict(test=dict(images, split='test', batch_size=500))

    config.optim = dict(name='adamw', lr=1e-3, b2=0.99, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='200', eval='100%', checkpoint='1 epoch')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    if config.model.name == 'swin':
        config.model.update(depths=(2,), num_heads=(2,))
    else:
        config.model.update(depth=1)
    config.data.source = config.evals.test.source = 'digits'
    config.every = dict(log='10', eval='20', checkpoint='20')
