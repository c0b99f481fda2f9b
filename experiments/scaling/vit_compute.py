r"""Accuracy over compute: six ViTs, seven BiT-ResNets and five hybrids, as in the ViT paper.

    python -m vit_jax scaling plan experiments/scaling/vit_compute.py:vit
    python -m vit_jax sweep create experiments/scaling/vit_compute.py:vit --study compute_vit
    python -m vit_jax sweep work compute_vit    # `:bit` and `:hybrid` likewise
    python -m vit_jax scaling report runs/ --x flops --y '1-fewshot/5_shot' --by model --holdout 0

A single run, here L/16 for as many examples as 14 epochs of JFT-300M:

    python -m vit_jax train --config experiments/scaling/vit_compute.py:L/16,14 --workdir runs/l16

Dosovitskiy et al., 2021, arXiv:2010.11929, section 4.4, figure 5 and table 6; hyperparameters of
table 3, which lacks R200x3 (here as for R152x2). The head's bias is the authors' for the sigmoid
loss (see imagenet21k.py in experiments/vit). JFT-300M is private: the default is ImageNet-21k (see
imagenet21k.py in experiments/vit), with the paper's number of examples, 149 epochs for 7 of JFT.
`--config.data.source=...` selects other images.

Expected, as published for JFT-300M after fine-tuning on ImageNet (table 6): B/32 80.73 %, B/16
84.15, L/32 84.37, L/16 86.30 (7 epochs) and 87.12 (14), H/14 88.08; R50x1 77.54, R50x2 82.12,
R101x1 80.67, R152x1 81.88, R152x2 84.97 and 85.56 (14), R200x3 87.22; R50+B/32 84.90, R50+B/16
85.58, R50+L/32 85.68, R50+L/16 86.60 and 87.12 (14). Fine-tune each with finetune.py of
experiments/vit or experiments/bit. Planned at 40 % of the peak: 3,334 TPU v3-core-days for the
ViTs, 2,673 for the BiTs, 1,474 for the hybrids. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.errors import UserError
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
FILE = 'experiments/scaling/vit_compute.py'
ARGS = ('smoke', 'vit', 'bit', 'hybrid,fast', 'smoke-bit', ...)


def get_sweep(arg: str | None = None) -> Sweep:
    """`arg`: vit (the default), bit or hybrid, and `fast`; with `smoke-` in front, two sizes on
    digits.
    """
    if (arg or '').startswith('smoke'):
        totals = [{'total': f'{steps} steps'} for steps in (10, 20)]
        return Sweep(config=f'{FILE}:{arg}', metric='val/accuracy', points=totals)
    points = [
        {
            **{f'model.{key}': _plain(value) for key, value in hidden(shape(name)).items()},
            'optim.lr': lr,
            'total': examples(epochs),
        }
        for name, (lr, lengths) in FAMILIES[precision(arg)[0] or 'vit'].items()
        for epochs in lengths
    ]
    return Sweep(config=f'{FILE}:{arg or "vit"}', metric='fewshot/5_shot', points=points)


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


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a family of `get_sweep`, for its smallest model, or a model, as in `L/16,14`,
    and `fast` for a residual stream in bfloat16.
    """
    arg, dtypes = precision(arg)
    arg = arg or 'vit'
    smoke = arg.startswith('smoke')
    family = FAMILIES.get('bit' if arg == 'smoke-bit' else 'vit' if smoke else arg)
    name, _, epochs = (next(iter(family)) if family else arg).partition(',')
    if name not in RATES:
        raise UserError(f'vit_compute.py:{arg}: the models are {", ".join(RATES)}')
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else examples(int(epochs or 7))
    config.batch_size = 32 if smoke else 4096

    kind = 'hybrid' if '+' in name else 'vit' if '/' in name else 'bit_resnet'
    size = shape(name)
    if smoke:
        size = vit.variant('mu/4') if kind == 'vit' else {'layers': (1, 1), 'width_factor': 1}
    config.model = dict(name=kind, num_classes=placeholder(int), **hidden(size))
    config.model.update({'dtype': 'bfloat16'} if kind == 'bit_resnet' else dtypes)
    # A bias of 0 would give a loss of 15,000 nats at the first step instead of 11.
    config.model.head_bias = -10.0
    config.task = dict(name='classify', loss_name='sigmoid')

    pixels = 16 if smoke else 224
    source = 'digits' if smoke else 'folder:imagenet21k'
    center = f'resize_small_tf({pixels * 8 // 7})|central_crop({pixels})'
    config.data = dict(
        source=source,
        split='train[:90%]' if smoke else 'train[1%: per class]',
        transforms=f'inception_crop_tf({pixels})|flip',
    )
    held_out = 'train[90%:]' if smoke else 'train[:1% per class]'
    config.evals = dict(val=dict(source=source, split=held_out, transforms=center))
    few = dict(source='tfds:imagenet2012', split='validation', fit='train[:65000]')
    if smoke:
        few = dict(source='digits', split='test[:96]', fit='train[:12 per class]')
    squashed = f'resize_tf({pixels * 8 // 7})|central_crop({pixels})'
    config.evals.fewshot = dict(few, transforms=squashed, evaluator='fewshot', shots=(5,))

    config.optim = dict(name='adamw', lr=RATES[name], weight_decay=0.1, clip_norm=1.0)
    warmup = '10%' if smoke else '10000 steps'
    config.optim.schedule = dict(name='linear', warmup=warmup, final=1e-5)
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5%')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
