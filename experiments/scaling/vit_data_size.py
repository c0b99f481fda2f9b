r"""Few-shot accuracy over the number of pre-training images: ViT against BiT, as in the ViT paper.

    python -m vit_jax scaling plan experiments/scaling/vit_data_size.py:vit
    python -m vit_jax sweep create experiments/scaling/vit_data_size.py:vit --study data_vit
    python -m vit_jax sweep work data_vit    # `:bit` likewise; any number of workers
    python -m vit_jax scaling report runs/data_vit runs/data_bit --output data_size/ \
        --x data_size --y '1-fewshot/5_shot' --by model,parameters --form power --holdout 0

Dosovitskiy et al., 2021, arXiv:2010.11929, section 4.3 and figure 4: B/32 with all dimensions
halved, B/32, L/32, L/16 and R50x1, R152x2 on random subsets, each model with the same
hyperparameters on all of them and without further regularization, measured by linear 5-shot
accuracy on ImageNet. JFT-300M is private: the subsets are 10, 30 and 99 % of ImageNet-21k (see
imagenet21k.py in experiments/vit), each trained on as many examples as 90 epochs of all of it.
Learning rates and weight decay are those of its table 3 for JFT. The paper stops early by
validation; here metrics.jsonl has all evaluations, and a report uses the last. For one run and its
accuracy after fine-tuning:

    python -m vit_jax train --config experiments/scaling/vit_data_size.py:bit --workdir runs/r50
    python -m vit_jax train --config experiments/vit/finetune.py:imagenet2012,B/32 \
        --config.init.from=runs/data_vit/0001 --workdir runs/data_vit_finetuned/0001

For figure 3, with regularization chosen per dataset, see imagenet2012_paper.py and imagenet21k.py
in experiments/vit.

Expected, as published in words: with 9 million images of JFT B/32 is far below R50x1, with 90
million and more above it, and L/16 against R152x2 likewise; only the plot has the values. Planned
at 40 % of the peak: 893 TPU v3-core-days for the ViTs, 541 for the BiTs. Not measured by this
project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
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
FILE = 'experiments/scaling/vit_data_size.py'
ARGS = ('smoke', 'vit', 'vit,fast', 'bit', 'smoke-bit')


def get_sweep(arg: str | None = None) -> Sweep:
    """`arg`: vit (the default) or bit; with `smoke-` in front, two subsets of the digits."""
    arg = arg or 'vit'
    smoke = arg.startswith('smoke')
    if smoke:
        points = [{'data.split': split} for split in ('train[:100]', 'train[:200]')]
    else:
        points = [
            {
                **{f'model.{key}': _plain(value) for key, value in hidden(size).items()},
                'optim.lr': lr,
                'data.split': split,
            }
            for split in SPLITS
            for size, lr in SIZES[precision(arg)[0]]
        ]
    metric = 'val/accuracy' if smoke else 'fewshot/5_shot'
    return Sweep(config=f'{FILE}:{arg}', metric=metric, points=points)


def hidden(size: dict) -> dict:
    """Add a ViT's tanh layer before the head, as in pre-training."""
    return {**size, 'representation_size': size['width']} if 'width' in size else size


def _plain(value: tuple[int, ...] | int) -> str | int:
    """Points may hold only numbers and strings."""
    return str(value) if isinstance(value, tuple) else value


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: as for `get_sweep`; returns the smallest model on all images."""
    arg, dtypes = precision(arg)
    smoke, family = arg.startswith('smoke'), 'bit' if arg.endswith('bit') else 'vit'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else TOTAL
    config.batch_size = 32 if smoke else 4096

    size, lr = SIZES[family][0]
    if smoke:
        size = vit.variant('mu/4') if family == 'vit' else {'layers': (1, 1), 'width_factor': 1}
    name = 'vit' if family == 'vit' else 'bit_resnet'
    config.model = dict(name=name, num_classes=placeholder(int), **size)
    config.model.update(dtypes if family == 'vit' else {'dtype': 'bfloat16'})
    # A bias of 0 would give a loss of 15,000 nats at the first step instead of 11.
    config.model.head_bias = -10.0
    if family == 'vit':
        config.model.representation_size = config.model.width
    config.task = dict(name='classify', loss_name='sigmoid')

    source, pixels = ('digits', 16) if smoke else ('folder:imagenet21k', 224)
    center = f'resize_small_tf({pixels * 8 // 7})|central_crop({pixels})'
    config.data = dict(
        source=source,
        split='train[:80%]' if smoke else SPLITS[-1],
        transforms=f'inception_crop_tf({pixels})|flip',
    )
    held_out = 'train[80%:]' if smoke else 'train[:1% per class]'
    config.evals = dict(val=dict(source=source, split=held_out, transforms=center))
    few = dict(source='tfds:imagenet2012', split='validation', fit='train[:65000]')
    if smoke:
        few = dict(source='digits', split='test[:96]', fit='train[:12 per class]')
    squashed = f'resize_tf({pixels * 8 // 7})|central_crop({pixels})'
    config.evals.fewshot = dict(few, transforms=squashed, evaluator='fewshot', shots=(5,))

    config.optim = dict(name='adamw', lr=lr, weight_decay=0.1, clip_norm=1.0)
    warmup = '10%' if smoke else '10000 steps'
    config.optim.schedule = dict(name='linear', warmup=warmup, final=1e-5)
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '5%')
    config.every.checkpoint = '20' if smoke else '1000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
