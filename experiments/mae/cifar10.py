r"""CIFAR-10 without labels, then with few: the value of masked pre-training on two cores.

    python -m vit_jax train --config experiments/mae/cifar10.py --workdir runs/mae_cifar10
    python -m vit_jax train --config experiments/mae/cifar10.py:finetune,10% \
        --workdir runs/mae_cifar10_finetune_10
    python -m vit_jax train --config experiments/mae/cifar10.py:scratch,10% \
        --workdir runs/mae_cifar10_scratch_10

`pretrain` (the default) sees 45,000 training images without their labels, 8 epochs of them;
`finetune,1%`, `10%` and `100%` start from its run in `runs/mae_cifar10` (or
`--config.init.from=WORKDIR`) and use this fraction of the labels, the first of each class;
`scratch,1%` and so on start from scratch. `probe` trains a linear classifier on the frozen encoder
with the paper's recipe, LARS after a batch norm; `pretrain` itself ends with logistic regression,
on the test images.

Expected: a linear probe with a test accuracy of at least 0.50, and with 1 % of the labels better
results from fine-tuning than from scratch. Measured on one busy CPU core, with 16 minutes of
pre-training: linear probe 0.524, 20 nearest neighbors 0.365 (on `val`, of 2,000 labels); fine-tuned
on 1, 10 and 100 % of the labels 0.404, 0.471 and 0.556, and 0.300, 0.520 and 0.550 from scratch
with the FLOPs of pre-training and fine-tuning together.

`val`, the last 5,000 training images, is for tuning; all recipes were fixed before their one run.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError, nearest

ENCODERS = {
    'smoke': dict(patch_size=4, width=32, depth=1, mlp_dim=64, num_heads=2),
    'small': dict(patch_size=4, width=128, depth=4, mlp_dim=256, num_heads=4),
}
DECODERS = {
    'smoke': dict(decoder_width=16, decoder_depth=1, decoder_mlp_dim=32, decoder_heads=2),
    'small': dict(decoder_width=64, decoder_depth=1, decoder_mlp_dim=128, decoder_heads=2),
}
ENCODER = 'patch_embed, cls_token, pos_embed, encoder'  # a pre-trained run's ViT

# Split, and images seen: in fine-tuning, and from scratch at the FLOPs of both trainings together.
LABELS = {
    '1%': ('train[:45 per class]', 13_500, 130_500),
    '10%': ('train[:450 per class]', 22_500, 139_500),
    '100%': ('train[:90%]', 45_000, 162_000),
}
STARTS = ('finetune', 'scratch')
ARGS = ('smoke', 'smoke-finetune', 'probe', 'finetune,10%', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: pretrain (the default), probe, or e.g. `finetune,10%`; smoke for a few steps."""
    arg = arg or 'pretrain'
    if arg in ('pretrain', 'smoke'):
        return pretraining(arg == 'smoke')
    if arg == 'probe':
        return probe()
    start, _, labels = arg.partition(',')
    smoke = start == 'smoke-finetune'
    return supervised('finetune' if smoke else start, '100%' if smoke else labels, smoke)


def pretraining(smoke: bool) -> ConfigDict:
    """Section 4 of the paper with a small model: only crops and flips, no color changes."""
    size = 'smoke' if smoke else 'small'
    config = base(smoke)
    config.total = '20 steps' if smoke else '8 epochs'
    config.batch_size = 32 if smoke else 128
    config.model = dict(name='mae', **ENCODERS[size], **DECODERS[size], mask_ratio=0.75)
    config.task = dict(name='reconstruct')
    config.data.transforms = 'flip' if smoke else 'inception_crop(32, 20)|flip'

    images = config.evals.val
    images.transforms = '' if smoke else 'resize(32)'
    knn = dict(images, evaluator='knn', fit='train[:30 per class]')
    if not smoke:
        knn.update(split='train[96%:]', fit='train[:200 per class]')
        config.evals.probe = dict(images, split='test', fit='train[:90%]', every='100%')
        config.evals.probe.update(evaluator='linear_probe', c=(0.01, 1.0))
    config.evals.knn = knn
    del config.evals.test

    config.optim = dict(name='adamw', lr=1.5e-3, b2=0.95, weight_decay=0.05)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    return config


def supervised(start: str, labels: str, smoke: bool) -> ConfigDict:
    """From the encoder or from scratch, on a fraction of the labels."""
    for what, name, known in (('start', start, STARTS), ('share of labels', labels, LABELS)):
        if name not in known:
            raise UserError('cifar10.py: ' + nearest(what, name, known))
    split, *seen = LABELS[labels]
    config = base(smoke)
    config.total = '20 steps' if smoke else f'{seen[STARTS.index(start)]} examples'
    config.batch_size = 32 if smoke else 64
    config.model = classifier(smoke, pool='patches')
    config.task = dict(name='classify', label_smoothing=0.1)
    config.data.update(split=split, transforms='pad_and_crop(2)|flip')
    pretrained = start == 'finetune' and not smoke
    config.init = {'from': 'runs/mae_cifar10' if pretrained else '', 'select': ENCODER}
    config.optim = dict(name='adamw', lr=1e-3, weight_decay=0.05)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    if start == 'finetune':
        config.optim.layer_decay = 0.75
    return config


def probe() -> ConfigDict:
    """Appendix A.1 of the paper: only the head is trained."""
    config = base(smoke=False)
    config.total = '3 epochs'
    config.batch_size = 512
    config.model = classifier(smoke=False, pool='patches', head_norm='batch')
    config.task = dict(name='classify')
    config.data.transforms = 'flip'
    config.init = {'from': 'runs/mae_cifar10', 'select': ENCODER}
    config.optim = dict(name='lars', lr=0.2, momentum=0.9)
    config.optim.freeze = ('^(patch_embed|cls_token|pos_embed|encoder)(/|$)',)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    return config


def classifier(smoke: bool, **fields: str) -> ConfigDict:
    """The encoder as a ViT; `gelu` as in pre-training."""
    encoder = ENCODERS['smoke' if smoke else 'small']
    return ConfigDict(
        dict(name='vit', num_classes=placeholder(int), gelu='erf', **encoder, **fields)
    )


def base(smoke: bool) -> ConfigDict:
    """The shared settings."""
    config = ConfigDict()
    config.seed = 0
    images = dict(source='digits' if smoke else 'tfds:cifar10', cache=True)
    config.data = dict(images, split='train[:90%]', workers=0)
    images.update(transforms='', batch_size=100 if smoke else 500)
    config.evals = dict(
        val=dict(images, split='train[90%:]'), test=dict(images, split='test', every='100%')
    )
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '25%')
    config.every.checkpoint = '20' if smoke else '5%'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
