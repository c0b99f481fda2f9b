r"""ImageNet-1k without labels, with the authors' short DINOv2 recipe, or any folder of images.

    python -m vit_jax train --config experiments/dinov2/imagenet.py:L/16 --workdir runs/dinov2_l16
    python -m vit_jax train --config experiments/dinov2/imagenet.py:S/14,own \
        --config.data.source=folder:/data/photos --config.batch_size=256 \
        --config.total='50_000 steps' --config.optim.lr=2e-3 --workdir runs/dinov2_photos

The argument is a ViT (L/16, the default, or S/14, B/14, ...), `own` for images without labels,
which may be in one subfolder of the folder, and `fast` for a residual stream in bfloat16. The
recipe's learning rates scale with the square root of the batch size: 0.004 for 1,024 images.

Oquab et al., 2023, arXiv:2304.07193, and `vitl16_short.yaml` of facebookresearch/dinov2. Expected
for L/16, as published by the authors after one day on 32 A100: 81.6 % with 20 nearest neighbors and
82.9 % with a linear probe. Not measured by this project yet. The paper distills its smaller ViTs
from the largest; here they use L/16's recipe, for which nothing is published.

Differences from that code: Sinkhorn-Knopp balances targets as in the authors' longer recipes, not a
moving average; gradients are clipped by their global norm; stochastic depth rises from block to
block; docs/recipes.md lists the rest.
"""

from ml_collections import ConfigDict

from vit_jax.config.defaults import precision
from vit_jax.errors import UserError
from vit_jax.models import vit

# All but biases, norms and layer scales.
DECAYING = 'kernel$|_tokens?$|pos_embed$|prototypes/scale$'
ARGS = ('smoke', 'L/16', 'S/14,own', 'B/14,fast', ...)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a ViT, `own` and `fast`, as `S/14,own`; `smoke` for a few steps on digits."""
    arg, dtypes = precision(arg)
    smoke = arg == 'smoke'
    words = ['mu/2'] if smoke else [word for word in arg.split(',') if word]
    own = 'own' in words
    names = [word for word in words if word != 'own'] or ['L/16']
    if len(names) > 1:
        raise UserError(f"imagenet.py:{arg}: write one ViT, such as L/16, and 'own' or 'fast'")
    config = ConfigDict()
    config.seed, config.batch_size, config.total = 0, 2048, '125_000 steps'
    config.model = dict(name='dinov2', **vit.variant(names[0]), **dtypes)
    config.model.update(layer_scale=1e-5, drop_path=0.3)
    config.task = dict(name='dinov2', warmup=37_500)
    side, patch = 224, config.model.patch_size
    sizes = (8, 4, 2) if smoke else (side, round(96 / patch) * patch, 8)
    source = 'digits' if smoke else 'folder:photos' if own else 'tfds:imagenet2012'
    config.data = dict(source=source, split='train[:99%]', transforms=crops(*sizes))
    config.evals = evaluations(smoke, own)

    config.optim = dict(name='adamw', lr=0.004 * 2**0.5, weight_decay=0.04, clip_norm=3.0)
    config.optim.decay_mask = DECAYING
    config.optim.layer_decay = 0.9
    config.optim.lr_mults = (('^patch_embed/', 0.2),)
    config.optim.lr_delays = (('/prototypes/', '1%'),)
    config.optim.schedule = dict(name='cosine', warmup='10%', final=1e-6)
    config.optim.decay_schedule = dict(name='cosine', final=0.4)
    config.step = dict(ema_decay=0.992, ema_schedule=dict(name='cosine', final=1.0))
    config.every = dict(log='10' if smoke else '50', checkpoint='20' if smoke else '1000')
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    if smoke:
        config.batch_size, config.total, config.task.warmup = 16, '20 steps', 10
        config.model.update(prototypes=16, hidden=16, bottleneck=8)
    return config


def crops(side: int, local: int, count: int) -> str:
    """The crops of the authors' code.

    Its blur has the probability 1 - p where the text says p, so the first global crop is never
    blurred and the second nine times out of ten.
    """

    def views(name: str, count: int, size: int, areas: str, rest: str) -> str:
        crop = f"inception_crop({size}, {areas}, 'bicubic')|flip|color_jitter()|random_gray()"
        return f'views({name!r}, {count}, "{crop}{rest}")'

    return '|'.join(
        [
            views('local_image', count, local, '5, 32', '|gaussian_blur()'),
            views('second_image', 1, side, '32, 100', '|gaussian_blur(p=0.9)|solarize()'),
            views('image', 1, side, '32, 100', ''),
        ]
    )


def evaluations(smoke: bool, own: bool) -> dict[str, dict]:
    """Nearest neighbors on held-out training images, and both of the paper's numbers at the end.

    Without labels, only the prototypes' entropy. All use the training source.
    """
    center = '' if smoke else "resize_small(256, 'bicubic')|central_crop(224)"
    minival = dict(split='train[99%:]', transforms=center, every='10%')
    if own:
        return dict(minival=minival)
    knn = dict(evaluator='knn', transforms=center, fit='train[:99%]', every='100%')
    knn['split'] = 'test' if smoke else 'validation'
    return dict(
        minival=dict(minival, evaluator='knn', fit='train[:20 per class]'),
        knn=knn,
        probe=dict(knn, evaluator='linear_probe'),
    )
