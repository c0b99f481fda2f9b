r"""Few-shot accuracy over the number of pre-training images: ViT against BiT, as in the ViT paper.

    python -m vit_jax scaling plan experiments/scaling/vit_data_size.py:vit
    python -m vit_jax sweep create experiments/scaling/vit_data_size.py:vit --study data_vit
    python -m vit_jax sweep work data_vit    # `:bit` likewise; any number of workers
    python -m vit_jax scaling report runs/data_vit runs/data_bit --out data_size/ \
        --x data_size --y '1-fewshot/5_shot' --by model,parameters --form power --holdout 0

Dosovitskiy et al., 2021, arXiv:2010.11929, section 4.3 and figure 4: B/32 with all dimensions
halved, B/32, L/32, L/16 and R50x1, R152x2 on random subsets, each model with the same
hyperparameters on all of them, measured by linear 5-shot accuracy on ImageNet. JFT-300M is private:
the subsets are 10, 30 and 99 % of ImageNet-21k (see experiments/vit/imagenet21k.py), each trained
on as many examples as 90 epochs of all of it, with learning rates and weight decay of the paper's
table 3 for JFT. The paper stops early by validation; here a report uses the last evaluation. For
one run, and its accuracy after fine-tuning:

    python -m vit_jax train experiments/scaling/vit_data_size.py:bit --workdir runs/r50
    python -m vit_jax train experiments/vit/finetune.py:imagenet2012,variant=B/32 \
        --config.init.from=runs/data_vit/0001 --workdir runs/data_vit_finetuned/0001

Expected, as published in words: with 9 million images of JFT B/32 is far below R50x1, with 90
million and more above it, and L/16 against R152x2 likewise; only the plot has the values. Planned
at 40 % of the peak: 893 TPU v3-core-days for the ViTs, 541 for the BiTs. Not measured by this
project yet.
"""

import dataclasses
from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import bit_resnet, vit
from vit_jax.sweeps.space import Sweep

HALF = {'patch_size': 32, 'width': 384, 'depth': 12, 'mlp_dim': 1536, 'num_heads': 6}
# keywords of the model, learning rate (table 3 of the paper, which lacks the half-size B/32)
SIZES = {
    'vit': [
        (HALF, 8e-4),
        (vit.variant('B/32'), 8e-4),
        (vit.variant('L/32'), 6e-4),
        (vit.variant('L/16'), 4e-4),
    ],
    'bit': [(bit_resnet.variant('R50x1'), 1e-3), (bit_resnet.variant('R152x2'), 6e-4)],
}
# The first hundredth of every class is held out for `val`.
SPLITS = ('train[1%:11% per class]', 'train[1%:31% per class]', 'train[1%: per class]')
TOTAL = f'{90 * 14_197_122} examples'
SMALL = {
    'vit': {**vit.variant('mu/4'), 'representation_size': 32},
    'bit_resnet': {'layers': (1, 1)},
}
FILE = 'experiments/scaling/vit_data_size.py'


def get_sweep(family: Literal['vit', 'bit'] = 'vit', fast: bool = False) -> Sweep:
    """The models of a family on three subsets; `fast` as in `get_config`."""
    points = [
        {
            **{f'model.{key}': _plain(value) for key, value in hidden(size).items()},
            'optim.lr': lr,
            'data.split': split,
        }
        for split in SPLITS
        for size, lr in SIZES[family]
    ]
    config = f'{FILE}:{family}{",fast" * fast}'
    return Sweep(config=config, metric='fewshot/5_shot', points=points)


def smoke_sweep(sweep: Sweep) -> Sweep:
    """Reduce the sweep to two subsets of the digits."""
    points = [{'data.split': split} for split in ('train[:100]', 'train[:200]')]
    return dataclasses.replace(sweep, metric='val/accuracy', points=points)


def hidden(size: dict) -> dict:
    """Add a ViT's tanh layer before the head, as in pre-training."""
    return {**size, 'representation_size': size['width']} if 'width' in size else size


def _plain(value: tuple[int, ...] | int) -> str | int:
    """Points may hold only numbers and strings."""
    return str(value) if isinstance(value, tuple) else value


def get_config(family: Literal['vit', 'bit'] = 'vit', fast: bool = False) -> ConfigDict:
    """The smallest model on all images; `fast` keeps a ViT's residual stream in bfloat16."""
    config = ConfigDict()
    config.total = TOTAL
    config.batch_size = 4096

    size, lr = SIZES[family][0]
    name = 'vit' if family == 'vit' else 'bit_resnet'
    config.model = dict(name=name, num_classes=placeholder(int), **hidden(size))
    config.model.dtype = 'bfloat16'
    if family == 'vit' and not fast:
        config.model.residual_dtype = 'float32'
    # A bias of 0 would give a loss of 15,000 nats at the first step instead of 11.
    config.model.head_bias = -10.0
    config.task = dict(name='classify', loss_name='sigmoid')

    images, augment = 'folder:imagenet21k', 'inception_crop_tf(224)|flip'
    config.data = dict(source=images, split=SPLITS[-1], transforms=augment)
    center = 'resize_small_tf(256)|central_crop(224)'
    few = dict(source='tfds:imagenet2012', split='validation', fit='train[:65000]', shots=(5,))
    config.evals = dict(
        val=dict(source=images, split='train[:1% per class]', transforms=center),
        fewshot=dict(few, transforms='resize_tf(256)|central_crop(224)', evaluator='fewshot'),
    )

    config.optim = dict(name='adamw', lr=lr, weight_decay=0.1, clip_norm=1.0)
    config.optim.schedule = dict(name='linear', warmup='10000 steps', final=1e-5)
    config.every = dict(log='50', eval='5%', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(SMALL[config.model.name])
    augment = 'inception_crop_tf(16)|flip'
    config.data = dict(source='digits', split='train[:80%]', transforms=augment)
    center, squashed = 'resize_small_tf(18)|central_crop(16)', 'resize_tf(18)|central_crop(16)'
    config.evals.val.update(source='digits', split='train[80%:]', transforms=center)
    few = dict(source='digits', split='test[:96]', fit='train[:12 per class]')
    config.evals.fewshot.update(few, transforms=squashed)
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
