"""An isoFLOP study of three tiny ViTs on digits."""

from experiments.vit import digits
from vit_jax.sweeps import isoflop


def get_config():
    """The smoke size of the digits, narrower."""
    config = digits.get_config()
    digits.smoke(config)
    config.batch_size = 8
    config.model.update(width=8, mlp_dim=16, num_heads=1)
    return config


def get_sweep(branched: bool = False) -> isoflop.Isoflop:
    """Three widths at three budgets; `branched` from trunks."""
    return isoflop.Isoflop(
        config='tests/helpers/isoflop_file.py',
        metric='test/loss',
        shapes=[{'model.width': width, 'model.mlp_dim': 2 * width} for width in (8, 12, 16)],
        budgets=(1e8, 4e8, 1.6e9),
        cooldown=0.2 if branched else 0.0,
    )
