r"""One's own images: the pre-training of a released DINOv2 goes on with them, without labels.

    python -m vit_jax train --config experiments/dinov2/own.py:S/14 \
        --config.data.source=folder:/data/photos --config.init.from=hf://facebook/dinov2-small \
        --workdir runs/own
    python -m vit_jax embed runs/own photos --neighbors near.png

The argument is the checkpoint's ViT, as B/14, and after commas `registers` if it has four of them,
`gram` for Gram anchoring, `high` for a last stage at twice the size, and `cifar10`. Student and
average start from the encoder; the heads, of which nothing is released, and the mask token are new.
For the first tenth of the steps only they learn, then the encoder warms up. Its layers learn at
rates that fall by 0.9 from each to the one before.

`gram` keeps the similarities of an image's patches near those of a model that is not trained, the
released one or an earlier run, which sees the crops in twice the size and without changed colors:

    python -m vit_jax train --config experiments/dinov2/own.py:S/14,gram \
        --config.data.source=folder:/data/photos --config.init.from=hf://facebook/dinov2-small \
        --config.task.gram_teacher=hf://facebook/dinov2-small --workdir runs/own_gram

`high` goes on from such a run, with its heads, for a tenth of the steps:

    python -m vit_jax train --config experiments/dinov2/own.py:S/14,high \
        --config.data.source=folder:/data/photos --config.init.from=runs/own --workdir runs/own_high

Losses and crops are DINOv2's (Oquab et al., 2023, arXiv:2304.07193), the anchoring is DINOv3's
(Simeoni et al., 2025, arXiv:2508.10104, section 4), whose Gram teacher is replaced every 10,000
steps; here it stays. Rates and lengths are not published for this use. Compare `embed --neighbors`,
or `knn` on images with labels, before and after: on few images features can get worse. Expected:
depends on the images. Measured from a released ViT-S/14 (`S/14,cifar10`, one seed): 100 steps of 16
images of CIFAR-10 at 56 pixels raise kNN from 0.442 to 0.555, with `gram` to 0.587, in 4 and 5
minutes of CPU time.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.dinov2 import ENCODER

WORDS = ('registers', 'gram', 'high', 'cifar10')
ARGS = ('smoke', 'S/14', 'B/14,registers', 'S/14,high', 'S/14,cifar10', ...)
# Of images in [0, 1], as in the files of DINOv2.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# All but biases, norms and layer scales, as in imagenet.py.
DECAYING = 'kernel$|_tokens?$|pos_embed$|prototypes/scale$'
HEADS = dict(prototypes=4096, patch_prototypes=4096, hidden=1024)
SMALL_HEADS = dict(prototypes=16, patch_prototypes=8, hidden=16, bottleneck=8, patch_bottleneck=8)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT and WORDS, as `S/14,gram`; `smoke` for a few steps on digits."""
    smoke = arg == 'smoke'
    name, *words = ('mu/2' if smoke else arg or 'S/14').split(',')
    if unknown := set(words) - set(WORDS):
        raise UserError(f'own.py:{arg}: {min(unknown)!r} is none of {", ".join(WORDS)}')
    gram, high, cifar10 = (word in words for word in WORDS[1:])
    config = ConfigDict()
    config.seed, config.batch_size = 0, 16 if smoke or cifar10 else 64
    steps = 20 if smoke else 100 if cifar10 else 500 if high else 5_000
    config.total = f'{steps} steps'

    heads = SMALL_HEADS if smoke else HEADS
    config.model = dict(name='dinov2', **vit.variant(name), layer_scale=1.0, gelu='erf', **heads)
    config.model.update(registers=4 if 'registers' in words else 0, drop_path=0.1)
    tokens = ['register_tokens'] if 'registers' in words else []
    config.init = {'from': '' if smoke else placeholder(str)}
    if not high:
        config.init.select = ','.join([*ENCODER, *tokens])
    config.task = dict(name='dinov2', warmup=steps // 10)
    if not smoke:
        config.task.update(mean=MEAN, std=STD)

    side, local, count = (56, 28, 4) if cifar10 else (224, 98, 8)
    side = 2 * side if high else side
    if gram:
        config.task.update(gram=2.0, gram_teacher='', gram_size=2 * side)
    source = 'digits' if smoke else 'tfds:cifar10' if cifar10 else 'folder:photos'
    sizes = (8, 4, 2) if smoke else (side, local, count)
    config.data = dict(source=source, split='train[:90%]', transforms=crops(*sizes, gram))
    if smoke or cifar10:
        config.data.workers = 0
    whole = '' if smoke else f"resize({side}, method='bicubic')"
    images = dict(source=source, transforms=whole, batch_size=100 if cifar10 else 32)
    config.evals = dict(minival=dict(images, split='train[90%:]'))
    if cifar10:
        knn = dict(images, evaluator='knn', split='test[:100 per class]')
        config.evals = dict(knn=dict(knn, fit='train[:200 per class]', every='100%'))

    config.optim = dict(name='adamw', lr=1e-5 if high else 1e-4, weight_decay=0.04, clip_norm=3.0)
    config.optim.decay_mask = DECAYING
    config.optim.layer_decay = 0.9
    if not high:
        encoder = f'^({"|".join([*ENCODER, *tokens])})(/|$)'
        config.optim.lr_delays = (('/prototypes/', '2%'), (encoder, '10%', '10%'))
        config.optim.lr_mults = (('_head/', 10.0),)
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.step = dict(ema_decay=0.99, ema_schedule=dict(name='cosine', final=1.0))
    config.every = dict(log='10', eval='20' if smoke else '20%')
    config.every.checkpoint = '20' if smoke else '20%'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config


def crops(side: int, local: int, count: int, gram: bool) -> str:
    """Two global crops of `side` pixels and `count` local ones, all with changed colors.

    With `gram`, the global crops are also in twice the size, without.
    """
    colors = 'color_jitter()|random_gray()|gaussian_blur()'
    crop = "inception_crop({}, {}, 'bicubic')|flip"
    views = [f'views("local_image", {count}, "{crop.format(local, "5, 32")}|{colors}")']
    if gram:
        views += [
            f'views("large_image", 2, "{crop.format(2 * side, "32, 100")}")',
            f'views("image", 2, "resize({side}, \'bicubic\')|{colors}", of="large_image")',
        ]
    else:
        views.append(f'views("image", 2, "{crop.format(side, "32, 100")}|{colors}")')
    return '|'.join(views)
