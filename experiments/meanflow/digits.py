"""Handwritten digits in one step: average velocities on a small JiT, in minutes.

    python -m vit_jax train experiments/meanflow/digits.py --workdir runs/meanflow_digits
    python -m vit_jax sample runs/meanflow_digits --count 12 --out digits.png
    python -m vit_jax sample runs/meanflow_digits --count 12 --steps 4 --out four_steps.png

Geng et al., 2025, arXiv:2512.02012 (iMF), with prediction of x as in arXiv:2601.22158 (pMF). The
model is the one of `experiments/jit/digits.py`, with four more conditions. Expected: legible digits
in one step. Measured with `epochs=65`, for the 8 CPU minutes in which JiT takes 120
epochs, with seeds 0, 1 and 2: Frechet distances of 0.766, 0.734 and 0.814 in one step, JiT's 0.503,
0.537 and 0.589 in 50 steps. The whole recipe is not measured. See docs/meanflow.md.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(epochs: int = 200) -> ConfigDict:
    """The recipe, with the number of epochs."""
    config = ConfigDict()
    config.total = f'{epochs} epochs'
    config.batch_size = 64

    config.model = dict(name='jit', patch_size=2, width=96, depth=6, mlp_dim=256, num_heads=4)
    config.model.update(bottleneck=4, context_tokens=4, context_start=1)
    config.model.update(attention='xla', num_classes=placeholder(int))
    config.task = dict(name='meanflow', guidance_range=3.0, guidance=1.5, samples=8)

    config.data = dict(source='digits', split='train', cache=True, workers=0)
    config.evals = dict(test=dict(source='digits', split='test', cache=True))

    config.optim = dict(name='adamw', lr=1e-3, b2=0.95, clip_norm=1.0)
    config.optim.schedule = dict(name='constant', warmup='15 epochs')
    config.step = dict(ema_decay=0.999)
    config.every = dict(log='100', eval='10 epochs', checkpoint='50 epochs', examples='25%')
    config.checkpoint = dict(keep_last=2)
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(width=32, depth=2, mlp_dim=64)
    config.optim.schedule.warmup = '10%'
    config.step.ema_decay = 0.9
    config.every = dict(log='10', eval='10', checkpoint='10', examples='')
