r"""Compute-optimal ViTs on CIFAR-10: six sizes at four budgets over a factor of 30.

    python -m vit_jax scaling study experiments/scaling/cifar10_isoflop.py --measure
    python -m vit_jax scaling study experiments/scaling/cifar10_isoflop.py --study isoflop
    python -m vit_jax sweep work isoflop    # any number of workers, here or elsewhere
    python -m vit_jax scaling collect runs/isoflop --out isoflop.csv
    python -m vit_jax scaling optimal --csv isoflop.csv --n parameters --c flops --y val/loss

Hoffmann et al. 2022, section 3, with branches of a constant learning rate instead of a cosine per
length (Hägele et al. 2024, arXiv:2405.18392): the last fifth of a run is the cooldown. Two seeds at
the smallest two budgets. `:cosine` trains each run separately. `val` holds 5,000 training images,
held out from all runs. The rate falls as 1 / sqrt(width); it is not tuned. `:digits` is four sizes
at three budgets of handwritten digits, in minutes. `:target` is four times the largest budget, for
five sizes near the predicted optima.

A single run, the smallest model at the smallest budget:

    python -m vit_jax train experiments/scaling/cifar10_isoflop.py --workdir runs/one

Expected: a minimum between the smallest and the largest size at every budget. Measured: at 2,626
parameters for 5e10 and 1.5e11 FLOPs, 4,266 for 4.6e11, 7,546 for 1.5e12; docs/predictions.md has
the table, the laws, and their prediction for 6e12 with its result.
"""

import dataclasses
from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.sweeps.isoflop import Isoflop

# width, depth
SIZES = ((8, 1), (12, 1), (16, 1), (16, 2), (24, 2), (24, 3))
SMALL = ((8, 1), (12, 1), (16, 1), (32, 1))
BUDGETS = (5e10, 1.5e11, 4.6e11, 1.5e12)
# Near the optima that the laws predict for four times the largest budget; the smallest budget
# sets the warm-up.
TARGET_SIZES = ((16, 2), (20, 2), (24, 2), (24, 3), (32, 2))
TARGET_BUDGETS = (BUDGETS[0], 4 * BUDGETS[-1])
# sizes, budgets, seeds at each budget
STUDIES = {
    'cifar10': (SIZES, BUDGETS, (2, 2, 1)),
    'target': (TARGET_SIZES, TARGET_BUDGETS, (1,)),
    'digits': (SMALL, (4e10, 1e11, 2.5e11), (1,)),
}
FILE = 'experiments/scaling/cifar10_isoflop.py'


def get_sweep(
    study: Literal['cifar10', 'target', 'digits'] = 'cifar10', cosine: bool = False
) -> Isoflop:
    """The budgets of a study; `cosine` trains each run separately, without branches."""
    sizes, budgets, seeds = STUDIES[study]
    return Isoflop(
        config=f'{FILE}:{study}',
        metric='val/loss',
        shapes=[shape(*size) for size in sizes],
        budgets=budgets,
        seeds=seeds,
        warmup=0.1,
        cooldown=0.0 if cosine else 0.2,
    )


def smoke_sweep(sweep: Isoflop) -> Isoflop:
    """Reduce the study to two tiny budgets of digits."""
    shapes = [shape(*size) for size in SMALL]
    return dataclasses.replace(sweep, shapes=shapes, budgets=(2e9, 4e9), seeds=(1,))


def shape(width: int, depth: int) -> dict[str, int | float]:
    """A ViT with heads of 16 channels, and its learning rate."""
    size = {'width': width, 'depth': depth, 'mlp_dim': 4 * width, 'num_heads': max(1, width // 16)}
    return {**{f'model.{key}': value for key, value in size.items()}, 'optim.lr': rate(width)}


def rate(width: int) -> float:
    """Learning rate for a width; a rule, not tuned."""
    return round(0.024 * width**-0.5, 5)


def get_config(study: Literal['cifar10', 'target', 'digits'] = 'cifar10') -> ConfigDict:
    """The smallest model, on the images of a study."""
    digits = study == 'digits'
    config = ConfigDict()
    config.total = '2000 steps'
    config.batch_size = 64 if digits else 32

    width, depth = SIZES[0]
    config.model = dict(name='vit', patch_size=2 if digits else 4, width=width, depth=depth)
    config.model.update(mlp_dim=4 * width, num_heads=max(1, width // 16))
    config.model.update(pool='gap', posemb='sincos2d', num_classes=placeholder(int))
    config.task = dict(name='classify')

    images = dict(source='digits' if digits else 'tfds:cifar10', cache=True)
    augment = 'pad_and_crop(1)' if digits else 'pad_and_crop(4)|flip'
    split, held_out = ('[:80%]', '[80%:]') if digits else ('[:45000]', '[45000:]')
    config.data = dict(images, split=f'train{split}', transforms=augment, workers=0)
    images.update(batch_size=100 if digits else 500)
    config.evals = dict(val=dict(images, split=f'train{held_out}'), test=dict(images, split='test'))

    config.optim = dict(name='adamw', lr=rate(width), b2=0.99, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='10%', eval='100%', checkpoint='20%', examples='')
    config.checkpoint = dict(keep_last=1)
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.update(get_config('digits').to_dict())
    config.total = '20 steps'
