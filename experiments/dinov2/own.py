r"""One's own images: the pre-training of a released DINOv2 or DINOv3 goes on with them, unlabeled.

    python -m vit_jax train experiments/dinov2/own.py --config.data.source=folder:/data/photos \
        --config.init.from=hf://facebook/dinov2-small --workdir runs/own
    python -m vit_jax train experiments/dinov2/own.py:S/16,v3,gram \
        --config.data.source=folder:/data/photos --workdir runs/own3 \
        --config.init.from=hf://facebook/dinov3-vits16-pretrain-lvd1689m
    python -m vit_jax embed runs/own photos --neighbors near.png

Student and average start from the encoder; the heads, of which nothing is released, and the mask
token are new. For the first tenth of the steps only they learn, then the encoder warms up; its
layers learn at rates that fall by 0.9 from each to the one before.

`gram` keeps the similarities of an image's patches near a Gram teacher's, which sees the crops in
twice the size and without changed colors: a copy of the average at step 0, the released model, or
`config.task.gram_teacher`. `high` goes on from such a run, `--config.init.from=runs/own`, with its
heads, at twice the size, where the Gram teacher sees 1.5 times that.

Losses and crops are DINOv2's (Oquab et al., 2023, arXiv:2304.07193), the anchoring is DINOv3's
(Simeoni et al., 2025, arXiv:2508.10104, section 4), whose Gram teacher is replaced every 10,000
steps: `config.task.gram_refresh`. Rates and lengths are not published for this use. Compare
`embed --neighbors`, or `knn` on images with labels, before and after: on few images features can
get worse. Expected: depends on the images. Measured from a released ViT-S/14 (`S/14,cifar10`, one
seed): 100 steps of 16 images of CIFAR-10 at 56 pixels raise kNN from 0.442 to 0.555, with `gram` to
0.587, in 4 and 5 minutes of CPU time.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit

# Of images in [0, 1], as in the files of DINOv2.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# All but biases, norms and layer scales, as in imagenet.py.
DECAYING = 'kernel$|_tokens?$|pos_embed$|prototypes/scale$'
HEADS = dict(prototypes=4096, patch_prototypes=4096, hidden=1024)
SMALL_HEADS = dict(prototypes=16, patch_prototypes=8, hidden=16, bottleneck=8, patch_bottleneck=8)


def get_config(
    variant: str = 'S/14',
    registers: bool = False,
    v3: bool = False,
    gram: bool = False,
    high: bool = False,
    cifar10: bool = False,
) -> ConfigDict:
    """The checkpoint's ViT, and what the training adds.

    Args:
      variant: a ViT such as `B/14`.
      registers: the checkpoint has four registers.
      v3: the checkpoint is a DINOv3, with rotary positions and registers.
      gram: Gram anchoring.
      high: a last stage at twice the size, a tenth as long.
      cifar10: a short run on CIFAR-10.
    """
    config = ConfigDict()
    config.batch_size = 16 if cifar10 else 64
    steps = 100 if cifar10 else 500 if high else 5_000
    config.total = f'{steps} steps'

    config.model = dict(name='dinov2', **vit.variant(variant), layer_scale=1.0, gelu='erf', **HEADS)
    config.model.update(registers=4 if registers or v3 else 0, drop_path=0.1)
    encoder = ['patch_embed', 'cls_token', 'encoder', 'pos_embed']
    if v3:
        encoder.remove('pos_embed')
        config.model.update(posemb='none', positions='rope_dinov3(rescale=2.0)', norm_eps=1e-5)
        config.model.no_bias = ('key',)
    if config.model.registers:
        encoder.append('register_tokens')
    config.init = {'from': placeholder(str)}
    if not high:
        config.init.select = ','.join(encoder)
    config.task = dict(name='dinov2', warmup=steps // 10, mean=MEAN, std=STD)

    patch = config.model.patch_size
    side, local, count = (
        (4 * patch, 2 * patch, 4) if cifar10 else (224, round(98 / patch) * patch, 8)
    )
    side, large = (2 * side, 3 * side) if high else (side, 2 * side)
    if gram:
        config.task.update(gram=2.0, gram_teacher='average', gram_size=large)
    source = 'tfds:cifar10' if cifar10 else 'folder:photos'
    augment = crops(side, local, count, large if gram else 0)
    config.data = dict(source=source, split='train[:90%]', transforms=augment)
    # Evaluations use the training source.
    images = dict(transforms=f"resize({side}, method='bicubic')")
    config.evals = dict(minival=dict(images, split='train[90%:]', batch_size=32))
    if cifar10:
        config.data.workers = 0
        knn = dict(images, evaluator='knn', split='test[:100 per class]', batch_size=100)
        config.evals = dict(knn=dict(knn, fit='train[:200 per class]', every='100%'))

    config.optim = dict(name='adamw', lr=1e-5 if high else 1e-4, weight_decay=0.04, clip_norm=3.0)
    config.optim.update(decay_mask=DECAYING, layer_decay=0.9)
    if not high:
        delays = (('/prototypes/', '2%'), (f'^({"|".join(encoder)})(/|$)', '10%', '10%'))
        config.optim.update(lr_delays=delays, lr_mults=(('_head/', 10.0),))
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.step = dict(ema_decay=0.99, ema_schedule=dict(name='cosine', final=1.0))
    config.every = dict(log='10', eval='20%', checkpoint='20%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits, from scratch."""
    config.total = '20 steps'
    config.batch_size = 16
    config.model.update(vit.variant('mu/2'), **SMALL_HEADS)
    config.init['from'] = ''
    config.task = dict(name='dinov2', warmup=2)
    augment = crops(8, 4, 2, large=0)
    config.data = dict(source='digits', split='train[:90%]', transforms=augment, workers=0)
    config.evals = dict(minival=dict(split='train[90%:]', batch_size=32))
    config.every = dict(log='10', eval='20', checkpoint='20')


def crops(side: int, local: int, count: int, large: int) -> str:
    """Two global crops of `side` pixels and `count` local ones, all with changed colors.

    The global crops are also in the size `large`, without, unless it is 0.
    """
    colors = 'color_jitter()|random_gray()|gaussian_blur()'
    crop = "inception_crop({}, {}, 'bicubic')|flip"
    views = [f'views("local_image", {count}, "{crop.format(local, "5, 32")}|{colors}")']
    if large:
        views += [
            f'views("large_image", 2, "{crop.format(large, "32, 100")}")',
            f'views("image", 2, "resize({side}, \'bicubic\')|{colors}", of="large_image")',
        ]
    else:
        views.append(f'views("image", 2, "{crop.format(side, "32, 100")}|{colors}")')
    return '|'.join(views)
