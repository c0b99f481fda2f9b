"""A small FlexiViT on handwritten digits, one model for patches of five sizes; needs no network.

    python -m vit_jax train experiments/vit/digits_flexi.py --workdir runs/flexi_digits

The digits of `digits.py`, enlarged to 24 x 24 pixels. As in FlexiViT (arXiv:2212.08013), every step
draws its patch size, 12, 8, 6, 4 or 3 pixels, and the model resizes its kernel and positions to it.
Evaluation uses patches of 3 pixels (`test`), and of each other size (`test_4`).
`digits_flexi.py:fixed` trains only with patches of 4 pixels and is evaluated likewise. Expected:
test accuracy >= 0.97. Measured, with patches of 12, 8, 6, 4 and 3 pixels: 0.967, 0.961, 0.956,
0.989 and 0.989.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

IMAGE, SIDES, FIXED = 24, (12, 8, 6, 4, 3), 4


def get_config(fixed: bool = False) -> ConfigDict:
    """Patches of five sizes; `fixed` for one."""
    config = ConfigDict()
    config.total = '80 epochs'
    config.batch_size = 64

    config.model = dict(name='naflex', patch_size=SIDES[-1], width=96, depth=4)
    config.model.update(num_heads=4, mlp_dim=192, num_classes=placeholder(int), pool='gap')
    config.model.update(pos_grid=6, kernel_size=FIXED if fixed else 8)
    config.task = dict(name='classify', label_smoothing=0.1)

    data = dict(source=f'digits:{IMAGE}-{IMAGE}', cache=True, workers=0)
    sides = (FIXED,) if fixed else SIDES
    config.data = dict(data, split='train', transforms='pad_and_crop(3)', plan=plan(*sides))
    data.update(split='test', transforms=f'resize({IMAGE})')
    config.evals = dict(test=dict(data, plan=plan(SIDES[-1])))
    config.evals.update({f'test_{side}': dict(data, plan=plan(side)) for side in SIDES[:-1]})

    config.optim = dict(name='adamw', lr=3e-3, weight_decay=0.05, b2=0.99, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.step = dict(ema_decay=0.99)
    config.every = dict(log='100', eval='20 epochs', checkpoint='20 epochs')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(width=32, depth=1)
    config.evals = dict(test=config.evals.test)
    config.every = dict(log='10', eval='10', checkpoint='10', examples='')


def plan(*sides: int) -> str:
    """The plan of patches of these sizes in pixels, which all tile the image."""
    lengths = tuple((IMAGE // side) ** 2 for side in sides)
    return f'patches(patch_size={sides}, lengths={lengths})'
