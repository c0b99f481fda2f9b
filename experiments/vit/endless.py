r"""Compute-optimal ViTs on images that never repeat: twelve runs at three budgets.

    python -m vit_jax scaling study experiments/vit/endless.py:isoflop --measure
    python -m vit_jax scaling study experiments/vit/endless.py:isoflop --study endless
    python -m vit_jax sweep work endless    # any number of workers, here or elsewhere
    python -m vit_jax scaling collect runs/endless --out endless.csv
    python -m vit_jax scaling optimal --csv endless.csv --n parameters --c flops --y val/loss

Hoffmann et al. 2022, section 3, on the source `endless`: every image is new, so that the loss is a
function only of model and data size. Seven sizes of 2,400 to 107,000 parameters; each budget
trains the four nearest to its own optimum, branched from runs at a constant rate (Hägele et al.
2024, arXiv:2405.18392). The rate falls as 1 / sqrt(width); it is not tuned. `:target` is four times
the largest budget, for sizes near the predicted optimum.

A single run, the smallest model:

    python -m vit_jax train experiments/vit/endless.py --workdir runs/one

Expected: a minimum between the smallest and the largest size at every budget. Measured: at 7,904
parameters for 6e9 and 2e10 FLOPs, 16,456 for 6e10; docs/predictions.md has the table, and the
prediction for 2.4e11 with its result.
"""

import dataclasses
from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.sweeps.isoflop import Isoflop

WIDTHS = (8, 12, 16, 24, 32, 48, 64)
TARGET_WIDTHS = (24, 32, 40, 48, 64)  # around the optimum predicted for four times the budget
BUDGETS = (6e9, 2e10, 6e10)
OPTIMUM = (11_000, 2e10)  # estimated from single runs
EXPONENT = 0.55
FILE = 'experiments/vit/endless.py'


def get_sweep(study: Literal['isoflop', 'target'] = 'isoflop') -> Isoflop:
    """The three budgets, or the one to predict."""
    is_target = study == 'target'
    return Isoflop(
        config=FILE,
        metric='val/loss',
        shapes=[shape(width) for width in (TARGET_WIDTHS if is_target else WIDTHS)],
        budgets=(4 * BUDGETS[-1],) if is_target else BUDGETS,
        warmup=0.02 if is_target else 0.1,  # the others' is a share of their shortest run
        cooldown=0.2,
        optimum=None if is_target else OPTIMUM,
        exponent=EXPONENT,
        per_budget=4,
    )


def smoke_sweep(sweep: Isoflop) -> Isoflop:
    """Reduce the study to three sizes at two tiny budgets."""
    return dataclasses.replace(
        sweep, shapes=sweep.shapes[:3], budgets=(2e9, 4e9), optimum=None, cooldown=0.0
    )


def shape(width: int) -> dict[str, int | float]:
    """A ViT of two blocks with heads of about 8 channels, and its learning rate."""
    size = {'width': width, 'mlp_dim': 4 * width, 'num_heads': max(1, width // 8)}
    return {**{f'model.{key}': value for key, value in size.items()}, 'optim.lr': rate(width)}


def rate(width: int) -> float:
    """Learning rate for a width; a rule, not tuned."""
    return round(0.024 * width**-0.5, 5)


def get_config(difficulty: float = 1.0) -> ConfigDict:
    """The smallest model; a `difficulty` gives the rare kinds of images more weight."""
    config = ConfigDict()
    config.total = '1000 steps'
    config.batch_size = 32

    width = WIDTHS[0]
    config.model = dict(name='vit', patch_size=8, width=width, depth=2, mlp_dim=4 * width)
    config.model.update(num_heads=max(1, width // 8))
    config.model.update(pool='gap', posemb='sincos2d', num_classes=placeholder(int))
    config.task = dict(name='classify')

    source = f'endless:difficulty={difficulty:g}'
    config.data = dict(source=source, split='train', workers=0)
    config.evals = dict(val=dict(source=source, split='val', batch_size=500, cache=False))

    config.optim = dict(name='adamw', lr=rate(width), b2=0.99, weight_decay=0.0, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.every = dict(log='10%', eval='100%', checkpoint='100%', examples='')
    config.checkpoint = dict(keep_last=1)
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps and 500 images of validation."""
    config.total = '20 steps'
    config.evals.val.split = 'val[:500]'
