"""A small Transformer that learns to reverse digits, or to copy them: no data needed.

    python -m vit_jax train experiments/translate/synthetic.py --workdir runs/reverse

Sequences of 4 to 12 digits. Expected: all of the 1,000 test sequences correct. `synthetic.py:copy`
is the easier task.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(task: Literal['reverse', 'copy'] = 'reverse') -> ConfigDict:
    """What to do with the digits."""
    config = ConfigDict()
    config.total = '1000 steps'
    config.batch_size = 1024

    config.model = dict(name='seq2seq', width=64, depth=2, num_heads=4, mlp_dim=128)
    config.model.update(norm='pre', dropout=0.0, vocab_size=placeholder(int))
    config.task = dict(name='translate', label_smoothing=0.0, search='greedy')

    data = dict(source=f'synthetic:{task}', buckets=(8, 13))
    config.data = dict(data, split='train', cache=True)
    config.evals = dict(test=dict(data, split='test', batch_size=4096))

    config.optim = dict(name='adam', lr=3e-3, b2=0.98, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='50', eval='200', checkpoint='300')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model."""
    config.total = '20 steps'
    config.batch_size = 256
    config.model.update(width=16, depth=1, mlp_dim=32)
    config.data.split = 'train[:2000]'
    config.evals.test.update(split='test[:100]', batch_size=1024)
    config.every = dict(log='10', eval='20', checkpoint='20')
