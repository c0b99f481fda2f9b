"""Shapes and captions in two towers; set `--config.data.vocab` to the captions' vocabulary."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg=None):
    config = ConfigDict()
    config.seed, config.batch_size = 0, 32
    config.total = '24 steps' if arg == 'smoke' else '400 steps'
    config.model = dict(name='helpers.two_towers.model', vocab_size=placeholder(int))
    config.task = dict(name='helpers.two_towers.tasks.captions')
    data = dict(source='helpers.two_towers.source:', transforms="tokenize('caption', 16)")
    config.data = dict(data, split='train', vocab=placeholder(str))
    config.evals = dict(test=dict(data, split='test'))
    config.optim = dict(name='adamw', lr=3e-3, clip_norm=1.0)
    config.step = dict(accum_steps=2)
    config.every = dict(log='4', eval='12', checkpoint='12')
    config.checkpoint, config.parallel = dict(keep_last=2), dict(strategy='jit')
    return config
