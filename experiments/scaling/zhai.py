r"""Few-shot accuracy over compute: eleven ViTs, eight lengths, three numbers of images.

    python -m vit_jax scaling plan experiments/scaling/zhai.py
    python -m vit_jax sweep create experiments/scaling/zhai.py --study zhai
    python -m vit_jax sweep work zhai    # any number of workers; they resume after a restart
    python -m vit_jax scaling report runs/zhai --output zhai/ \
        --x flops --y '1-fewshot/10_shot' --frontier

The report has the double-saturating law through the frontier of all runs. `--by model,parameters`
instead of `--frontier` draws a curve for each size. A part of the grid, here L/16 and B/16 on a
million images and on all, or one run, B/16 by default:

    python -m vit_jax sweep create experiments/scaling/zhai.py:L/16,B/16,1M,14M --study zhai_part
    python -m vit_jax train --config experiments/scaling/zhai.py --workdir runs/zhai_b16
    python -m vit_jax preflight --config experiments/scaling/zhai.py:G/14,fast --topology v5p:4x4x4

Until the cooldown, the rsqrt learning rate does not depend on the length: of each size and number
of images one run is trained for the longest, and keeps the steps from which the shorter ones
branch off (`config.branch`) to cool down.

Zhai et al., 2021, arXiv:2106.04560, figure 2 and appendix: batch 4096, Adafactor with momentum,
sigmoid loss, attention pooling, 224 pixels, 10,000 steps of warm-up, a cooldown of 10,000 steps up
to 60,000 and of 50,000 beyond; weight decay 3.0 on the head and 0.03 elsewhere. Adafactor, learning
rate, cooldown and transforms come from the authors' ViT-g config in google-research/big_vision;
docs/recipes.md compares them. g/14 and G/14 have the lengths of its table 4, in batches of 4096.
JFT is private: instead of 30 million to 3 billion of its images, subsets of 1, 4 and 14 million of
ImageNet-21k, as in section 2.4 (see imagenet21k.py in experiments/vit).

Expected, as published for B/16 after 20, 30, 60, 120, 400 thousand and 1.2, 2, 4 million steps,
ImageNet 10-shot in %: 45.4, 52.2, 60.5, 65.4, 70.4, 71.4, 71.1, 70.5 on 30 million images of JFT;
45.7, 53.1, 61.0, 66.0, 72.4, 74.9, 76.3, 76.8 on 3 billion. On these, the longest runs have 52.1
(Ti/16), 70.6 (B/32), 67.6 (S/16), 81.5 (L/16), 84.5 (g/14) and 84.9 (G/14): the frontier is .12 +
.63 (C + .52)^-.32 for C in TPU v3-core-days. docs/scaling_published_zhai.csv has all of its tables,
and those after fine-tuning, for `scaling plot --overlay`. Planned at 40 % of the peak: 62,555 TPU
v3-core-days, of which 27,942 are for G/14, 20,224 for g/14, 9,051 for L/16 and 5,338 for the eight
others; B/16 on all images takes 820 for the longest run and 47 for the seven others. Not measured
by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.errors import UserError
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
ARGS = ('smoke', 'fast', 'Ti/16', ...)


def get_sweep(arg: str | None = None) -> Sweep:
    """`arg`: some of the models and numbers of images, all by default, except that g/14 and G/14
    have all images; `fast` as in `get_config`; `smoke` for a run on digits and a branch of it.
    """
    words = [word for word in (arg or '').split(',') if word]
    if words == ['smoke']:
        base = f'{FILE}:smoke'
        trunks = [_trunk({'data.split': 'train[:90%]'}, (10, 20), (5, 5))]
    else:
        base = f'{FILE}:fast' if 'fast' in words else FILE
        models, images = _chosen(words)
        trunks = [
            _trunk(
                {**_shape(name), 'data.split': SPLITS[number]}, steps, tuple(map(cooldown, steps))
            )
            for name in reversed(models)
            for number in (images[-1:] if name in GIANT else images)
            for steps in [GIANT.get(name, STEPS)]
        ]
    points = [point for point, _ in trunks]
    for number, (_, branches) in enumerate(trunks):
        points += [{**branch, 'branch.from': f'trial:{number}'} for branch in branches]
    return Sweep(config=base, metric='fewshot/10_shot', points=points)


def _chosen(words: list[str]) -> tuple[list[str], list[str]]:
    """The models and numbers of images of an argument, in the order of the tables above."""
    if unknown := [word for word in words if word not in (*MODELS, *SPLITS, 'fast')]:
        raise UserError(
            f'zhai.py:{unknown[0]}: the models are {", ".join(MODELS)}, the numbers of images '
            f'{", ".join(SPLITS)}'
        )
    models, images = ([name for name in known if name in words] for known in (MODELS, SPLITS))
    return models or list(MODELS), images or list(SPLITS)


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
    kept = {'checkpoint.keep_steps': str(tuple(starts[:-1])), 'branch.step': 0}
    return {**runs[-1], **kept}, runs[:-1]


def cooldown(steps: int) -> int:
    """Cooldown steps of a run of `steps` steps."""
    return 10_000 if steps <= 60_000 else 50_000


def _shape(name: str) -> Point:
    """Values of a model of table 2; positions start as there."""
    letter, _, patch = name.partition('/')
    size = {'patch_size': int(patch), **SMALL} if letter == 's' else vit.variant(name)
    size = {**size, 'posemb_std': size['width'] ** -0.5}
    return {f'model.{key}': value for key, value in size.items()}


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: a model, B/16 by default, for its longest run on all images; `fast` for a residual
    stream in bfloat16; `smoke` for a few steps on digits.
    """
    arg, dtypes = precision(arg)
    smoke, name = arg == 'smoke', arg or 'B/16'
    if not smoke and name not in MODELS:
        raise UserError(f'zhai.py:{name}: the models are {", ".join(MODELS)}')
    longest = GIANT.get(name, STEPS)[-1]
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{longest} steps'
    config.batch_size = 32 if smoke else 4096

    size = {key.removeprefix('model.'): v for key, v in _shape('mu/4' if smoke else name).items()}
    # A bias of 0 would give a loss of thousands of nats at the first step.
    config.model = dict(name='vit', **size, pool='map', head_bias=-10.0)
    config.model.update(num_classes=placeholder(int), **dtypes)
    config.task = dict(name='classify', loss_name='sigmoid')

    source, pixels = ('digits', 16) if smoke else ('folder:imagenet21k', 224)
    center = f'resize_small_tf({pixels * 8 // 7})|central_crop({pixels})'
    config.data = dict(
        source=source,
        split='train[:90%]' if smoke else SPLITS['14M'],
        transforms=f'inception_crop_tf({pixels})|flip',
    )
    held_out = 'train[90%:]' if smoke else 'train[:1% per class]'
    config.evals = dict(val=dict(source=source, split=held_out, transforms=center))
    few = dict(source='tfds:imagenet2012', split='validation', fit='train[:65000]')
    if smoke:
        few = dict(source='digits', split='test[:96]', fit='train[:12 per class]')
    squashed = f'resize_tf({pixels * 8 // 7})|central_crop({pixels})'
    config.evals.fewshot = dict(few, transforms=squashed, evaluator='fewshot', shots=(10,))

    config.optim = dict(name='adafactor_zhai', lr=8e-4, weight_decay=0.03, clip_norm=1.0)
    config.optim.decay_mults = (('^head/kernel$', 100.0),)
    config.optim.schedule = dict(
        name='rsqrt',
        warmup='5 steps' if smoke else '10000 steps',
        timescale='5 steps' if smoke else '10000 steps',
        cooldown='5 steps' if smoke else f'{cooldown(longest)} steps',
        cooldown_form='product',
    )
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='5' if smoke else '50', eval='20' if smoke else '1%')
    config.every.checkpoint = '20' if smoke else '5000'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
