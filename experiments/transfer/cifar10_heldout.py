r"""Three classes of CIFAR-10 from 96 labels: fine-tuned after pre-training, or from scratch.

    python -m vit_jax train --config experiments/transfer/cifar10_heldout.py:vit,finetune \
        --workdir runs/transfer_vit_finetune

`vit` or `bit`, and `finetune` or `scratch`: the first 32 training images each of horse, ship and
truck, always 300 steps of 32 images. Fine-tuning starts from the run of `cifar10_pretrain.py` in
`runs/transfer_vit` (or `_bit`), which has never seen these classes, or from
`--config.init.from=WORKDIR`. Hyperparameters are tuned on `val`, 1,500 other training images, never
on `test`.

Expected: fine-tuning beats training from scratch by at least 0.05 in test accuracy. Measured on 2
CPU cores, a minute or two each: 0.744 against 0.674 (ViT), 0.818 against 0.721 (BiT).
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


# As in `cifar10_pretrain.py`.
MODELS = {
    'smoke': small_vit(width=32, depth=1),
    'vit': small_vit(width=128, depth=4),
    'bit': dict(name='bit_resnet', layers=(2, 2, 2), width_factor=1),
}
OPTIMIZERS = {
    'smoke': dict(name='adamw', lr=1e-3),
    'vit,finetune': dict(name='adamw', lr=1e-4, weight_decay=0.05),
    'vit,scratch': dict(name='adamw', lr=1e-3, weight_decay=0.05),
    'bit,finetune': dict(name='sgd', lr=0.01, momentum=0.9),
    'bit,scratch': dict(name='sgd', lr=0.05, momentum=0.9, weight_decay=5e-4),
}
ARGS = tuple(OPTIMIZERS)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: vit or bit, a comma, finetune or scratch; or smoke for a few steps on digits."""
    arg = arg or 'vit,finetune'
    family, _, start = arg.partition(',')
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '300 steps'
    config.batch_size = 32

    config.model = dict(MODELS[family], num_classes=placeholder(int))
    config.init = {'from': f'runs/transfer_{family}' if start == 'finetune' else ''}
    config.task = dict(name='classify')

    images = dict(source='digits' if smoke else 'tfds:cifar10', classes=(7, 8, 9), cache=True)
    config.data = dict(
        images, split='train[:32 per class]', transforms='pad_and_crop(2)|flip', workers=0
    )
    images.update(transforms='', batch_size=100 if smoke else 500)
    config.evals = dict(
        val=dict(images, split='train[-10%: per class]' if smoke else 'train[-500: per class]'),
        test=dict(images, split='test'),
    )

    config.optim = dict(OPTIMIZERS[arg], clip_norm=1.0, schedule=dict(name='cosine', warmup='10%'))
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '100')
    config.every.checkpoint = '20' if smoke else '100'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
