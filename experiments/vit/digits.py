"""A small ViT on scikit-learn's handwritten digits: the first run, which needs no network.

    python -m vit_jax train experiments/vit/digits.py --workdir runs/digits

1,437 training and 360 test images of 8x8 pixels. Expected: test accuracy >= 0.975. Measured: 0.983,
0.986 and 0.994 in three runs, 2 minutes on 2 CPU cores. `digits.py:lion` selects another optimizer.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# Step sizes for each optimizer; the weight decay is scaled to keep lr * decay similar.
OPTIMIZERS = {
    'adamw': dict(lr=3e-3, weight_decay=0.05, b2=0.99),
    'sgd': dict(lr=0.1, weight_decay=5e-4, momentum=0.9, nesterov=True),
    'adafactor': dict(lr=3e-3, weight_decay=0.05, min_dim_size_to_factor=32),
    'lion': dict(lr=3e-4, weight_decay=0.5, b2=0.99),
}


def get_config(optimizer: Literal['adamw', 'sgd', 'adafactor', 'lion'] = 'adamw') -> ConfigDict:
    """The recipe, with one of four optimizers."""
    config = ConfigDict()
    config.total = '120 epochs'
    config.batch_size = 64

    config.model = dict(name='vit', patch_size=2, width=96, depth=4, num_heads=4, mlp_dim=192)
    config.model.update(pool='gap', posemb='sincos2d', num_classes=placeholder(int))
    config.task = dict(name='classify', label_smoothing=0.1, mixup=0.2)

    config.data = dict(
        source='digits', split='train', transforms='pad_and_crop(1)', cache=True, workers=0
    )
    config.evals = dict(test=dict(split='test', cache=True))

    config.optim = dict(name=optimizer, clip_norm=1.0, **OPTIMIZERS[optimizer])
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.step = dict(ema_decay=0.99)
    config.every = dict(log='100', eval='10 epochs', checkpoint='10 epochs')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(width=32, depth=1)
    config.every = dict(log='10', eval='10', checkpoint='10', examples='')
