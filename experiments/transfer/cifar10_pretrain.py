r"""Seven classes of CIFAR-10, for transfer to the three held-out classes.

    python -m vit_jax train --config experiments/transfer/cifar10_pretrain.py:vit \
        --workdir runs/transfer_vit
    python -m vit_jax train --config experiments/transfer/cifar10_pretrain.py:bit \
        --workdir runs/transfer_bit

Airplane to frog, 95 % of their training images; training never sees horse, ship and truck.
`fewshot`, `knn` and `probe` measure the features on these three, from at most 500 labels per class.
The models are a ViT with patch 4 and a BiT-ResNet with six blocks, of similar cost: 76.3 and 71.4
forward MFLOPs per image (matmuls and convolutions), 537,351 and 3,447,623 parameters.

Expected: test accuracy on the seven classes >= 0.60 for either. Measured on 2 busy CPU cores: 0.620
in 12 minutes (ViT), 0.727 in 19 (BiT); experiments/README.md has the features' numbers.
`cifar10_heldout.py` continues from here.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def small_vit(width: int, depth: int) -> dict:
    """Keywords of a ViT for images of 32 pixels."""
    return dict(
        name='vit',
        patch_size=4,
        width=width,
        depth=depth,
        num_heads=width // 32,
        mlp_dim=2 * width,
        pool='gap',
        posemb='sincos2d',
    )


# Of similar cost on purpose.
MODELS = {
    'smoke': small_vit(width=32, depth=1),
    'vit': small_vit(width=128, depth=4),
    'bit': dict(name='bit_resnet', layers=(2, 2, 2), width_factor=1),
}
OPTIMIZERS = {
    'vit': dict(name='adamw', lr=1e-3, b2=0.99, weight_decay=0.05),
    'bit': dict(name='sgd', lr=0.05, momentum=0.9, weight_decay=5e-4),
}
CLASSES, HELD_OUT = (0, 1, 2, 3, 4, 5, 6), (7, 8, 9)
ARGS = ('smoke', *OPTIMIZERS)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: vit (the default), bit, or smoke for a few steps on digits."""
    arg = arg or 'vit'
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '5 epochs'
    config.batch_size = 32 if smoke else 64

    config.model = dict(MODELS[arg], num_classes=placeholder(int))
    config.task = dict(name='classify')

    images = dict(source='digits' if smoke else 'tfds:cifar10', cache=True)
    config.data = dict(
        images, split='train[:95%]', classes=CLASSES, transforms='pad_and_crop(2)|flip', workers=0
    )
    images.update(transforms='', batch_size=100 if smoke else 500)
    features = dict(images, split='test', fit='train[:500 per class]', classes=HELD_OUT)
    if smoke:
        features['fit'] = 'train[:30 per class]'
    config.evals = dict(
        val=dict(images, split='train[95%:]', classes=CLASSES),
        test=dict(images, split='test', classes=CLASSES),
        fewshot=dict(features, evaluator='fewshot', shots=(1, 5, 10, 25), seeds=3),
        knn=dict(features, evaluator='knn'),
        probe=dict(features, evaluator='linear_probe'),
    )

    config.optim = dict(OPTIMIZERS.get(arg, OPTIMIZERS['vit']), clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '100', eval='20' if smoke else '5 epochs')
    config.every.checkpoint = '20' if smoke else '1 epoch'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
