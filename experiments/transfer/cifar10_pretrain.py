r"""Seven classes of CIFAR-10, for transfer to the three held-out classes.

    python -m vit_jax train experiments/transfer/cifar10_pretrain.py:vit \
        --workdir runs/transfer_vit
    python -m vit_jax train experiments/transfer/cifar10_pretrain.py:bit \
        --workdir runs/transfer_bit

Airplane to frog, 95 % of their training images; training never sees horse, ship and truck.
`fewshot`, `knn` and `probe` measure the features on these three, from at most 500 labels per class.
The models are a ViT with patch 4 and a BiT-ResNet with six blocks, of similar cost: 76.3 and 71.4
forward MFLOPs per image (matmuls and convolutions), 537,351 and 3,447,623 parameters.

Expected: test accuracy on the seven classes >= 0.60 for either. Measured on 2 busy CPU cores: 0.620
in 12 minutes (ViT), 0.727 in 19 (BiT); experiments/README.md has the features' numbers.
`cifar10_heldout.py` continues from here.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# Of similar cost on purpose.
MODELS = {
    'vit': dict(
        name='vit',
        patch_size=4,
        width=128,
        depth=4,
        num_heads=4,
        mlp_dim=256,
        pool='gap',
        posemb='sincos2d',
    ),
    'bit': dict(name='bit_resnet', layers=(2, 2, 2), width_factor=1),
}
OPTIMIZERS = {
    'vit': dict(name='adamw', lr=1e-3, b2=0.99, weight_decay=0.05),
    'bit': dict(name='sgd', lr=0.05, momentum=0.9, weight_decay=5e-4),
}
CLASSES, HELD_OUT = (0, 1, 2, 3, 4, 5, 6), (7, 8, 9)


def get_config(model: Literal['vit', 'bit'] = 'vit') -> ConfigDict:
    """One of the two models."""
    config = ConfigDict()
    config.total = '5 epochs'
    config.batch_size = 64

    config.model = dict(MODELS[model], num_classes=placeholder(int))
    config.task = dict(name='classify')

    images = dict(source='tfds:cifar10', cache=True)
    config.data = dict(images, split='train[:95%]', classes=CLASSES, workers=0)
    config.data.transforms = 'pad_and_crop(2)|flip'
    images.update(batch_size=500)
    features = dict(images, split='test', fit='train[:500 per class]', classes=HELD_OUT)
    config.evals = dict(
        val=dict(images, split='train[95%:]', classes=CLASSES),
        test=dict(images, split='test', classes=CLASSES),
        fewshot=dict(features, evaluator='fewshot', shots=(1, 5, 10, 25), seeds=3),
        knn=dict(features, evaluator='knn'),
        probe=dict(features, evaluator='linear_probe'),
    )

    config.optim = dict(OPTIMIZERS[model], clip_norm=1.0)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.every = dict(log='100', eval='5 epochs', checkpoint='1 epoch')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    if config.model.name == 'vit':
        config.model.update(width=32, depth=1, num_heads=1, mlp_dim=64)
    config.data.source = 'digits'
    for entry in config.evals.values():
        entry.update(source='digits', batch_size=100)
        if 'fit' in entry:
            entry.fit = 'train[:30 per class]'
    config.every = dict(log='10', eval='20', checkpoint='20')
