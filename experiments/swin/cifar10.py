r"""CIFAR-10 from scratch: the value of a hierarchy of windows, against a ViT of similar cost.

    python -m vit_jax train --config experiments/swin/cifar10.py:swin --workdir runs/swin
    python -m vit_jax train --config experiments/swin/cifar10.py:vit --workdir runs/swin_vit

Both train with the recipe of experiments/vit/cifar10.py for half as many epochs, five. An image of
32 pixels takes 23.9 forward MFLOPs (matmuls) in the Swin, which has three stages of two blocks and
windows of 4 x 4 tokens, and 26.4 in the ViT; they have 321,182 and 173,458 parameters.

Expected: test accuracy >= 0.50 for either. Measured: 0.544 (Swin) and 0.588 (ViT), in about 15
minutes each on one busy CPU core; experiments/README.md discusses it.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# Of similar cost on purpose.
MODELS = {
    'swin': dict(
        name='swin', patch_size=2, width=24, depths=(2, 2, 2), num_heads=(2, 4, 8), window=4
    ),
    'vit': dict(
        name='vit',
        patch_size=4,
        width=72,
        depth=4,
        num_heads=6,
        mlp_dim=144,
        pool='gap',
        posemb='sincos2d',
    ),
}
ARGS = ('smoke', *MODELS)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: swin (the default), vit, or smoke for a few steps on digits."""
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '5 epochs'
    config.batch_size = 32 if smoke else 64

    config.model = dict(MODELS['swin' if smoke else arg or 'swin'], num_classes=placeholder(int))
    if smoke:
        config.model.update(depths=(2,), num_heads=(2,))
    config.task = dict(name='classify')

    source = 'digits' if smoke else 'tfds:cifar10'
    augment = 'pad_and_crop(2)|flip'
    config.data = dict(source=source, split='train', transforms=augment, cache=True, workers=0)
    config.evals = dict(
        test=dict(source=source, split='test', transforms='', cache=True, batch_size=500)
    )

    config.optim = dict(name='adamw', lr=1e-3, b2=0.99, weight_decay=0.05, clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '200', eval='20' if smoke else '100%')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
