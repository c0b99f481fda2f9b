r"""Few-shot accuracy over compute: eleven ViTs, eight lengths, three numbers of images.

    python -m vit_jax scaling plan experiments/scaling/zhai.py
    python -m vit_jax sweep create experiments/scaling/zhai.py --study zhai
    python -m vit_jax sweep work zhai    # any number of workers; they resume after a restart
    python -m vit_jax scaling report runs/zhai --out zhai/ \
        --x flops --y '1-fewshot/10_shot' --frontier
    python -m vit_jax train experiments/scaling/zhai.py:L/16 --workdir runs/zhai_l16

A part of the grid is `zhai.py:L/16,B/16,images=1M,images=14M`. Until the cooldown, the rsqrt
learning rate does not depend on the length: for each size and number of images one run is trained
for the longest, and keeps the steps from which the shorter ones branch off to cool down.

Zhai et al., 2021, arXiv:2106.04560, figure 2 and appendix. Adafactor, learning rate, cooldown and
transforms come from the authors' ViT-g config in google-research/big_vision; docs/recipes.md
compares them. g/14 and G/14 have the lengths of the paper's table 4, in batches of 4096. JFT is
private: instead of 30 million to 3 billion of its images, subsets of 1, 4 and 14 million of
ImageNet-21k, as in section 2.4 (see experiments/vit/imagenet21k.py).

Expected, ImageNet 10-shot of the longest runs on 3 billion images: 52.1 % (Ti/16), 70.6 (B/32),
67.6 (S/16), 76.8 (B/16), 81.5 (L/16), 84.5 (g/14) and 84.9 (G/14); the frontier is .12 + .63 (C +
.52)^-.32 for C in TPU v3-core-days. docs/scaling_published_zhai.csv has all published numbers.
Planned at 40 % of the peak: 62,555 TPU v3-core-days, of which 27,942 are for G/14, 20,224 for g/14,
9,051 for L/16 and 5,338 for the eight others. Not measured by this project yet.
"""

import dataclasses

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError, nearest
from vit_jax.models import vit
from vit_jax.sweeps.space import Point, Sweep

STEPS = (20_000, 30_000, 60_000, 120_000, 400_000, 1_200_000, 2_000_000, 4_000_000)
# In batches of 4096, whatever theirs were (table 4).
GIANT = {'g/14': (*STEPS[3:], 6_300_000), 'G/14': (5_000_000,)}
MODELS = (
    *('s/28', 's/16', 'S/32', 'Ti/16', 'B/32', 'S/16', 'B/28', 'B/16', 'L/16'),
    *GIANT,
)
SMALL = {'width': 256, 'depth': 6, 'mlp_dim': 1024, 'num_heads': 8}  # s of table 2
# Images: the first hundredth of every class is held out for `val`.
SPLITS = {
    '1M': 'train[1%:8% per class]',
    '4M': 'train[1%:29% per class]',
    '14M': 'train[1%: per class]',
}
FILE = 'experiments/scaling/zhai.py'


def get_sweep(
    models: tuple[str, ...] = MODELS, images: tuple[str, ...] = tuple(SPLITS), fast: bool = False
) -> Sweep:
    """Models and numbers of images; g/14 and G/14 have the largest. `fast` as in `get_config`."""
    splits = [split for number, split in SPLITS.items() if number in images]
    trunks = [
        _trunk({**_shape(name), 'data.split': split}, steps, tuple(map(cooldown, steps)))
        for name in sorted(models, key=MODELS.index, reverse=True)
        for split in (splits[-1:] if name in GIANT else splits)
        for steps in [GIANT.get(name, STEPS)]
    ]
    config = f'{FILE}:fast' if fast else FILE
    return Sweep(config=config, metric='fewshot/10_shot', points=_points(trunks))


def smoke_sweep(sweep: Sweep) -> Sweep:
    """Reduce the sweep to a run and a branch of it."""
    trunks = [_trunk({'data.split': 'train[:90%]'}, (10, 20), (5, 5))]
    return dataclasses.replace(sweep, points=_points(trunks))


def _points(trunks: list[tuple[Point, list[Point]]]) -> list[Point]:
    """All trunks, then their branches."""
    points = [point for point, _ in trunks]
    for number, (_, branches) in enumerate(trunks):
        points += [{**branch, 'branch.from': f'trial:{number}'} for branch in branches]
    return points


def _trunk(
    point: Point, steps: tuple[int, ...], cooldowns: tuple[int, ...]
) -> tuple[Point, list[Point]]:
    """The longest run, which keeps the steps before the shorter ones' cooldowns, and these."""
    starts = [length - down for length, down in zip(steps, cooldowns, strict=True)]
    runs = [
        {
            **point,
            'total': f'{length} steps',
            'optim.schedule.cooldown': f'{down} steps',
            'checkpoint.keep_steps': '()',
            'branch.from': '',
            'branch.step': start,
        }
        for length, down, start in zip(steps, cooldowns, starts, strict=True)
    ]
    trunk = {'checkpoint.keep_steps': str(tuple(starts[:-1])), 'branch.step': 0}
    return {**runs[-1], **trunk}, runs[:-1]


def cooldown(steps: int) -> int:
    """Cooldown steps of a run of `steps` steps."""
    return 10_000 if steps <= 60_000 else 50_000


def _shape(name: str) -> Point:
    return {f'model.{key}': value for key, value in _size(name).items()}


def _size(name: str) -> Point:
    """Values of a model of table 2; positions start as there."""
    letter, _, patch = name.partition('/')
    size = {'patch_size': int(patch), **SMALL} if letter == 's' else vit.variant(name)
    return {**size, 'posemb_std': size['width'] ** -0.5}


def get_config(variant: str = 'B/16', fast: bool = False) -> ConfigDict:
    """A model's longest run on all images; `fast` keeps the residual stream in bfloat16."""
    if variant not in MODELS:
        raise UserError(nearest('model', variant, MODELS))
    longest = GIANT.get(variant, STEPS)[-1]
    config = ConfigDict()
    config.total = f'{longest} steps'
    config.batch_size = 4096

    # A bias of 0 would give a loss of thousands of nats at the first step.
    config.model = dict(name='vit', pool='map', head_bias=-10.0, num_classes=placeholder(int))
    config.model.update(_size(variant), dtype='bfloat16')
    config.model.residual_dtype = None if fast else 'float32'
    config.task = dict(name='classify', loss_name='sigmoid')

    images, augment = 'folder:imagenet21k', 'inception_crop_tf(224)|flip'
    config.data = dict(source=images, split=SPLITS['14M'], transforms=augment)
    center = 'resize_small_tf(256)|central_crop(224)'
    few = dict(source='tfds:imagenet2012', split='validation', fit='train[:65000]', shots=(10,))
    config.evals = dict(
        val=dict(source=images, split='train[:1% per class]', transforms=center),
        fewshot=dict(few, transforms='resize_tf(256)|central_crop(224)', evaluator='fewshot'),
    )

    config.optim = dict(name='adafactor_zhai', lr=8e-4, weight_decay=0.03, clip_norm=1.0)
    config.optim.decay_mults = (('^head/kernel$', 100.0),)
    config.optim.schedule = dict(
        name='rsqrt',
        warmup='10000 steps',
        timescale='10000 steps',
        cooldown=f'{cooldown(longest)} steps',
        cooldown_form='product',
    )
    config.every = dict(log='50', eval='1%', checkpoint='5000')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on digits."""
    config.total = '20 steps'
    config.batch_size = 32
    config.model.update(_size('mu/4'))
    augment = 'inception_crop_tf(16)|flip'
    config.data = dict(source='digits', split='train[:90%]', transforms=augment)
    center, squashed = 'resize_small_tf(18)|central_crop(16)', 'resize_tf(18)|central_crop(16)'
    config.evals.val.update(source='digits', split='train[90%:]', transforms=center)
    few = dict(source='digits', split='test[:96]', fit='train[:12 per class]')
    config.evals.fewshot.update(few, transforms=squashed)
    config.optim.schedule.update(warmup='5 steps', timescale='5 steps', cooldown='5 steps')
    config.every = dict(log='5', eval='20', checkpoint='20')
