"""Features of digits without labels, evaluated by nearest neighbors."""

from ml_collections import ConfigDict

SMOKE = dict(patch_size=2, width=16, depth=1, num_heads=2, hidden=16, bottleneck=8, prototypes=16)
SMALL = dict(patch_size=2, width=64, depth=3, num_heads=4, hidden=64, bottleneck=32, prototypes=64)
LOCAL = "views('local_image', 4, 'inception_crop(4, 15, 50)')"
GLOBAL = "views('image', 2, 'inception_crop(8, 50)')"


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `smoke` for a few steps of a tiny model."""
    smoke, config = arg == 'smoke', ConfigDict()
    config.seed, config.batch_size = 0, 16 if smoke else 64
    config.total, every = ('12 steps', '6') if smoke else ('40 epochs', '10 epochs')
    config.task = dict(name='helpers.self_distillation.tasks.dino', warmup=8 if smoke else 250)
    config.model = dict(SMOKE if smoke else SMALL, name='helpers.self_distillation.models.dino')
    config.data = dict(source='digits', split='train', transforms=f'{LOCAL}|{GLOBAL}')
    test = dict(source='digits', split='test', transforms='', batch_size=100)
    config.evals = dict(test=test, knn=dict(test, evaluator='knn', fit='train[:30 per class]'))
    config.optim = dict(name='adamw', lr=2e-3, weight_decay=0.04, clip_norm=3.0)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.optim.decay_schedule = dict(name='cosine', final=0.4)
    config.step = dict(ema_decay=0.9 if smoke else 0.99, ema_schedule=dict(name='cosine', final=1))
    config.every = dict(log='4' if smoke else '22', eval=every, checkpoint=every)
    config.checkpoint, config.parallel = dict(keep_last=2), dict(strategy='jit')
    return config
