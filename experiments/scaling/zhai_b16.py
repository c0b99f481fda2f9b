r"""Few-shot accuracy of ViT-B/16 over training length: eight lengths, one long run.

    python -m vit_jax scaling plan --config experiments/scaling/zhai_b16.py
    python -m vit_jax train --config experiments/scaling/zhai_b16.py --workdir runs/zhai_b16
    python -m vit_jax scaling plan experiments/scaling/zhai_b16.py
    python -m vit_jax sweep create experiments/scaling/zhai_b16.py --study zhai_b16_short
    python -m vit_jax sweep work zhai_b16_short
    python -m vit_jax scaling report runs/zhai_b16 runs/zhai_b16_short --output zhai/ \
        --x examples_seen --y '1-fewshot/10_shot'

The first run, of 4 million steps, keeps its state every 10,000 steps, about half a GB each. Until
the cooldown its rsqrt learning rate does not depend on its length: every shorter run branches off
(`config.branch`) where its own cooldown begins. Start the sweep once these steps are saved, 10,000
to 1,950,000.

Zhai et al., 2021, arXiv:2106.04560, appendix: batch 4096, Adafactor with momentum, sigmoid loss,
attention pooling, 224 pixels, 10,000 steps of warm-up, a cooldown of 10,000 steps up to 60,000 and
of 50,000 beyond; weight decay 3.0 on the head and 0.03 elsewhere. Adafactor, learning rate,
cooldown and transforms come from the authors' ViT-g config in google-research/big_vision;
docs/recipes.md compares them. JFT is private: the default is ImageNet-21k (see imagenet21k.py in
experiments/vit).

Expected, as published, for 20, 30, 60, 120, 400 thousand and 1.2, 2, 4 million steps, ImageNet
10-shot in %: 45.4, 52.2, 60.5, 65.4, 70.4, 71.4, 71.1, 70.5 on 30 million images of JFT, of which
ImageNet-21k has half as many; 45.7, 53.1, 61.0, 66.0, 72.4, 74.9, 76.3, 76.8 on 3 billion. After
fine-tuning at 384 pixels: 73.0, 76.9, 80.5, 82.2, 84.4, 84.9, 84.8, 84.9 and 73.4, 77.1, 80.5,
82.5, 85.1, 86.0, 86.3, 86.6. Planned at 40 % of the peak: 820 TPU v3-core-days for the first run,
47 for the seven others. Not measured by this project yet.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.models import vit
from vit_jax.sweeps.space import Sweep

LONGEST = 4_000_000
STEPS = (20_000, 30_000, 60_000, 120_000, 400_000, 1_200_000, 2_000_000)
FILE = 'experiments/scaling/zhai_b16.py'
TRUNK = 'runs/zhai_b16'
ARGS = ('smoke', 'fast')


def cooldown(steps: int) -> int:
    """Cooldown steps of a run of `steps` steps."""
    return 10_000 if steps <= 60_000 else 50_000


def get_sweep(arg: str | None = None) -> Sweep:
    """The shorter runs; `arg`: `fast` as in `get_config`, `smoke` for one that branches off from
    runs/zhai_b16_smoke.
    """
    smoke = arg == 'smoke'
    lengths = {10: 5} if smoke else {steps: cooldown(steps) for steps in STEPS}
    points = [
        {
            'total': f'{steps} steps',
            'branch.step': steps - length,
            'optim.schedule.cooldown': f'{length} steps',
        }
        for steps, length in lengths.items()
    ]
    return Sweep(
        config=f'{FILE}:{arg}' if arg else FILE,
        metric='fewshot/10_shot',
        points=points,
        overrides={'branch.from': f'{TRUNK}_smoke' if smoke else TRUNK},
    )


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `fast` for a residual stream in bfloat16; `smoke` for a few steps on digits."""
    arg, dtypes = precision(arg)
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{LONGEST} steps'
    config.batch_size = 32 if smoke else 4096

    config.model = dict(name='vit', **vit.variant('mu/4' if smoke else 'B/16'), pool='map')
    config.model.update(num_classes=placeholder(int), **dtypes)
    # A bias of 0 would give a loss of thousands of nats at the first step.
    config.model.update(head_bias=-10.0, posemb_std=config.model.width**-0.5)
    config.task = dict(name='classify', loss_name='sigmoid')

    source, pixels = ('digits', 16) if smoke else ('folder:imagenet21k', 224)
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
    config.evals.fewshot = dict(few, transforms=squashed, evaluator='fewshot', shots=(10,))

    config.optim = dict(name='adafactor_zhai', lr=8e-4, weight_decay=0.03, clip_norm=1.0)
    config.optim.decay_mults = (('^head/kernel$', 100.0),)
    config.optim.schedule = dict(
        name='rsqrt',
        warmup='5 steps' if smoke else '10000 steps',
        timescale='5 steps' if smoke else '10000 steps',
        cooldown='5 steps' if smoke else f'{cooldown(LONGEST)} steps',
        cooldown_form='product',
    )
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='5' if smoke else '50', eval='20' if smoke else '1%')
    config.every.checkpoint = '20' if smoke else '5000'
    config.checkpoint = dict(keep_last=2, keep_every='5' if smoke else '10000')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
