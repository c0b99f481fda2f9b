"""A small Transformer that learns to reverse digits, or to copy them: no data needed.

    python -m vit_jax train --config experiments/translate/synthetic.py --workdir runs/reverse

Sequences of 4 to 12 digits. Expected: all of the 1,000 test sequences correct. `synthetic.py:copy`
is the easier task.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

ARGS = ('smoke', 'reverse', 'copy')


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `reverse` or `copy`, or `smoke` for a few steps of the former."""
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '1000 steps'
    config.batch_size = 256 if smoke else 1024

    width = 16 if smoke else 64
    config.model = dict(name='seq2seq', width=width, depth=1 if smoke else 2)
    config.model.update(num_heads=4, mlp_dim=2 * width)
    config.model.update(vocab_size=placeholder(int), norm='pre', dropout=0.0)
    config.task = dict(name='translate', label_smoothing=0.0, search='greedy')

    data = dict(source=f'synthetic:{"copy" if arg == "copy" else "reverse"}', buckets=(8, 13))
    config.data = dict(split='train[:2000]' if smoke else 'train', cache=True, **data)
    test = dict(split='test[:100]' if smoke else 'test', **data)
    config.evals = dict(test=dict(test, batch_size=1024 if smoke else 4096))

    config.optim = dict(name='adam', lr=3e-3, b2=0.98, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '200')
    config.every.checkpoint = '20' if smoke else '300'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
