r"""Accuracy over compute: six ViTs, seven BiT-ResNets and five hybrids, as in the ViT paper.

    python -m vit_jax scaling plan experiments/scaling/vit_compute.py:vit
    python -m vit_jax sweep create experiments/scaling/vit_compute.py:vit --study compute_vit
    python -m vit_jax sweep work compute_vit    # `:bit` and `:hybrid` likewise
    python -m vit_jax scaling report runs/ --x flops --y '1-fewshot/5_shot' --by model --holdout 0
    python -m vit_jax train experiments/scaling/vit_compute.py:L/16,epochs=14 --workdir runs/l16

Dosovitskiy et al., 2021, arXiv:2010.11929, section 4.4, figure 5 and table 6; hyperparameters of
table 3, which lacks R200x3 (here as for R152x2). JFT-300M is private: the images are ImageNet-21k
(see experiments/vit/imagenet21k.py, also for the head's bias), with the paper's number of examples,
149 epochs for 7 of JFT.

Expected, as published for JFT-300M after fine-tuning on ImageNet (table 6): B/32 80.73 %, B/16
84.15, L/32 84.37, L/16 86.30 (7 epochs) and 87.12 (14), H/14 88.08; R50x1 77.54, R50x2 82.12,
R101x1 80.67, R152x1 81.88, R152x2 84.97 and 85.56 (14), R200x3 87.22; R50+B/32 84.90, R50+B/16
85.58, R50+L/32 85.68, R50+L/16 86.60 and 87.12 (14). Fine-tune each with finetune.py of
experiments/vit or experiments/bit. Planned at 40 % of the peak: 3,334 TPU v3-core-days for the
ViTs, 2,673 for the BiTs, 1,474 for the hybrids. Not measured by this project yet.
"""

import dataclasses
from typing import Literal

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError, nearest
from vit_jax.models import vit
from vit_jax.sweeps.space import Sweep

JFT = 303e6  # images
# name: learning rate (table 3), epochs (table 6)
VIT = {
    'B/32': (8e-4, (7,)),
    'B/16': (8e-4, (7,)),
    'L/32': (6e-4, (7,)),
    'L/16': (4e-4, (7, 14)),
    'H/14': (3e-4, (14,)),
}
BIT = {
    'R50x1': (1e-3, (7,)),
    'R50x2': (1e-3, (7,)),
    'R101x1': (8e-4, (7,)),
    'R152x1': (6e-4, (7,)),
    'R152x2': (6e-4, (7, 14)),
    'R200x3': (6e-4, (14,)),
}
HYBRID = {
    'R50+B/32': (8e-4, (7,)),
    'R50+B/16': (8e-4, (7,)),
    'R50+L/32': (2e-4, (7,)),
    'R50+L/16': (4e-4, (7, 14)),
}
FAMILIES = {'vit': VIT, 'bit': BIT, 'hybrid': HYBRID}
RATES = {name: lr for family in FAMILIES.values() for name, (lr, _) in family.items()}
# blocks of each stage (He et al., 2015, table 1; He et al., 2016, for 200 layers)
STAGES = {
    'R50': (3, 4, 6, 3),
    'R101': (3, 4, 23, 3),
    'R152': (3, 8, 36, 3),
    'R200': (3, 24, 36, 3),
}
# If a token covers 16 pixels, the third stage also has the blocks of the fourth.
HYBRID_STAGES = {16: (3, 4, 9), 32: (3, 4, 6, 3)}
SMALL = {
    'vit': {**vit.variant('mu/4'), 'representation_size': 32},
    'bit_resnet': {'layers': (1, 1)},
    'hybrid': {**vit.variant('mu/1'), 'representation_size': 32, 'layers': (1,)},
}
FILE = 'experiments/scaling/vit_compute.py'


def get_sweep(family: Literal['vit', 'bit', 'hybrid'] = 'vit', fast: bool = False) -> Sweep:
    """The models and lengths of a family; `fast` as in `get_config`."""
    points = [
        {
            **{f'model.{key}': _plain(value) for key, value in hidden(shape(name)).items()},
            'optim.lr': lr,
            'total': examples(epochs),
        }
        for name, (lr, lengths) in FAMILIES[family].items()
        for epochs in lengths
    ]
    config = f'{FILE}:{family}{",fast" * fast}'
    return Sweep(config=config, metric='fewshot/5_shot', points=points)


def smoke_sweep(sweep: Sweep) -> Sweep:
    """Reduce the sweep to two lengths of a tiny model."""
    totals = [{'total': f'{steps} steps'} for steps in (10, 20)]
    return dataclasses.replace(sweep, metric='val/accuracy', points=totals)


def hidden(size: dict) -> dict:
    """Add a ViT's tanh layer before the head, as in pre-training."""
    return {**size, 'representation_size': size['width']} if 'width' in size else size


def _plain(value: tuple[int, ...] | int) -> str | int:
    """Points may hold only numbers and strings."""
    return str(value) if isinstance(value, tuple) else value


def examples(epochs: int) -> str:
    """Examples in a number of epochs of JFT-300M."""
    return f'{epochs * JFT:.0f} examples'


def shape(name: str) -> dict[str, tuple[int, ...] | int]:
    """Keywords of a model by its name in table 6."""
    stages, plus, transformer = name.partition('+')
    if plus:
        patch = int(transformer.partition('/')[2])
        return {**vit.variant(transformer), 'patch_size': 1, 'layers': HYBRID_STAGES[patch]}
    stages, times, factor = name.partition('x')
    if times:
        return {'layers': STAGES[stages], 'width_factor': int(factor)}
    return vit.variant(name)


def get_config(variant: str = 'vit', epochs: int = 7, fast: bool = False) -> ConfigDict:
    """A model of table 6, or the smallest of a family, and the length of its training.

    `epochs` are of JFT-300M; `fast` keeps a ViT's residual stream in bfloat16.
    """
    name = next(iter(FAMILIES.get(variant, [variant])))
    if name not in RATES:
        raise UserError(nearest('model', name, (*FAMILIES, *RATES)))
    config = ConfigDict()
    config.total = examples(epochs)
    config.batch_size = 4096

    kind = 'hybrid' if '+' in name else 'vit' if '/' in name else 'bit_resnet'
    config.model = dict(name=kind, num_classes=placeholder(int), **hidden(shape(name)))
    config.model.dtype = 'bfloat16'
    if kind != 'bit_resnet' and not fast:
        config.model.residual_dtype = 'float32'
    # A bias of 0 would give a loss of 15,000 nats at the first step instead of 11.
    config.model.head_bias = -10.0
    config.task = dict(name='classify', loss_name='sigmoid')

    images, augment = 'folder:imagenet21k', 'inception_crop_tf(224)|flip'
    config.data = dict(source=images, split='train[1%: per class]', transforms=augment)
    center = 'resize_small_tf(256)|central_crop(224)'
    few = dict(source='tfds:imagenet2012', split='validation', fit='train[:65000]', shots=(5,))
    config.evals = dict(
        val=dict(source=images, split='train[:1% per class]', transforms=center),
        fewshot=dict(few, transforms='resize_tf(256)|central_crop(224)', evaluator='fewshot'),
    )

    config.optim = dict(name='adamw', lr=RATES[name], weight_decay=0.1, clip_norm=1.0)
    config.optim.schedule = dict(name='linear', warmup='10000 steps', final=1e-5)
    config.every = dict(log='50', eval='5%', checkpoint='1000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(SMALL[config.model.name])
    augment = 'inception_crop_tf(16)|flip'
    config.data = dict(source='digits', split='train[:90%]', transforms=augment)
    center, squashed = 'resize_small_tf(18)|central_crop(16)', 'resize_tf(18)|central_crop(16)'
    config.evals.val.update(source='digits', split='train[90%:]', transforms=center)
    few = dict(source='digits', split='test[:96]', fit='train[:12 per class]')
    config.evals.fewshot.update(few, transforms=squashed)
    config.optim.schedule.warmup = '10%'
    config.every = dict(log='10', eval='20', checkpoint='20')
