"""Detect spots with a model from this package."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `smoke`, the only size."""
    del arg
    config = ConfigDict()
    config.seed = 0
    config.total = '12 steps'
    config.batch_size = 16
    config.model = dict(name='my_lab.models.spots', num_classes=placeholder(int))
    config.task = dict(name='my_lab.tasks.spots')
    data = dict(source='my_lab.sources.spots:', sizes=((16, 16),))
    augment = 'my_lab.transforms.upside_down|flip|pad_objects(3)'
    config.data = dict(split='train', transforms=augment, **data)
    config.evals = dict(test=dict(split='test', transforms='pad_objects(3)', **data))
    config.optim = dict(name='adamw', lr=1e-2, layer_decay=0.9)
    config.step = dict(accum_steps=2)
    config.every = dict(log='4', eval='6', checkpoint='6')
    config.checkpoint = dict(keep_last=2)
    config.parallel = dict(strategy='jit')
    return config
