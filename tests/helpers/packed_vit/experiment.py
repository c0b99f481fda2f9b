"""Digits of mixed sizes, in rows of 64 patches."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg=None):
    """`arg`: `smoke` for a few steps."""
    smoke = arg == 'smoke'
    data = dict(source='packed_vit.data:', plan='packed_vit.data(side=4, length=64, most=4)')
    data['transforms'] = 'packed_vit.data.fit_patches(4, 64)'
    config = ConfigDict(dict(seed=0, batch_size=8, total='8 steps' if smoke else '20 epochs'))
    config.model = dict(name='packed_vit.model', num_classes=placeholder(int), dropout=0.1)
    config.model.update(most=4, longest=64)
    config.task = dict(name='packed_vit.tasks.packed', side=4)
    config.data = dict(split='train[:120]' if smoke else 'train', **data)
    config.evals = dict(test=dict(split='test[:40]' if smoke else 'test', **data))
    config.optim = dict(name='adamw', lr=3e-3)
    config.step, config.parallel = dict(accum_steps=2), dict(strategy='jit')
    config.every = dict(log='1', eval='50%', checkpoint='50%')
    config.checkpoint = dict(keep_last=2)
    return config
