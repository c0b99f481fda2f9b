"""Three classes of CIFAR-10 from 96 labels: fine-tuned after pre-training, or from scratch.

    python -m vit_jax train --config experiments/transfer/cifar10_heldout.py:vit,finetune \
        --workdir runs/cifar10_heldout_vit_finetune

`vit` or `bit`, and `finetune` or `scratch`: the first 32 training images each of horse, ship
and truck, 300 steps of 32 images in every case. Fine-tuning starts from the run that
`cifar10_pretrain.py` leaves in `runs/cifar10_pretrain_vit` (or `_bit`), which has never seen
these classes; another place is `--config.init.from=WORKDIR`. Hyperparameters are chosen by
`val`, 1,500 other training images, never by `test`.

Expected: fine-tuning is at least 0.10 better in test accuracy than training from scratch.
Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

# The models of `cifar10_pretrain.py`.
MODELS = {
    'smoke': dict(name='vit', patch_size=4, width=32, depth=1, num_heads=2, mlp_dim=64, pool='gap'),
    'vit': dict(name='vit', patch_size=4, width=128, depth=4, num_heads=4, mlp_dim=256, pool='gap'),
    'bit': dict(name='bit_resnet', layers=(2, 2, 2), width_factor=0.5),
}
OPTIMIZERS = {
    'smoke': dict(name='adamw', lr=1e-3),
    'vit,finetune': dict(name='adamw', lr=3e-4, weight_decay=0.05),
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
    config.init = {'from': f'runs/cifar10_pretrain_{family}' if start == 'finetune' else ''}
    config.task = dict(name='classify')

    enlarge = 'resize(64)' if family == 'bit' else ''
    augment = '|'.join(filter(None, ('pad_and_crop(2)|flip', enlarge)))
    images = dict(source='digits' if smoke else 'tfds:cifar10', classes=(7, 8, 9), cache=True)
    config.data = dict(images, split='train[:32 per class]', transforms=augment, workers=0)
    images.update(transforms=enlarge, batch_size=100 if smoke else 500)
    config.evals = dict(
        val=dict(images, split='train[-10%: per class]' if smoke else 'train[-500: per class]'),
        test=dict(images, split='test'),
    )

    config.optim = dict(OPTIMIZERS[arg], clip_norm=1.0, schedule=dict(name='cosine', warmup='10%'))
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '100')
    config.every.checkpoint = '10' if smoke else '100'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
