"""EoMT for semantic segmentation of ADE20K: DINOv2 with registers, 512 pixels.

    python -m vit_jax train --config experiments/eomt/ade20k.py:L \\
      --config.init.from=hf://facebook/dinov2-with-registers-large --workdir runs/eomt_ade20k

S, B or L; patches of 14 pixels are resized to 16. ADE20K's scene parsing release, 150 classes, is
unpacked in data/ADEChallengeData2016: images/ and annotations/, each with training/ and
validation/, and objectInfo150.txt.

Kerssies et al., 2025, arXiv:2503.19108, appendix A, and the authors' code: 31 epochs of 16 images,
color distortion, large-scale jitter, AdamW at 1e-4 with layer-wise decay of 0.8. The heads warm up
in 500 steps, then the encoder in 1,000, then both rates decay polynomially. Evaluation is in
windows of 512 pixels; scores are not interpolated to the sizes of the files unless
`config.task.frame` is the largest of them.

Expected (published in the authors' model zoo): mIoU 58.4 (L). Not measured.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.errors import check_choice
from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER

BLOCKS = {'S': 3, 'B': 3, 'L': 4}  # with queries
ARGS = ('smoke', *BLOCKS, 'L,fast')
EPOCHS, IMAGES, BATCH, SIDE = 31, 20_210, 16, 512


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: S, B or L, and `fast`; `smoke` for a few steps of a tiny model on scenes."""
    arg, dtypes = precision(arg)
    smoke, name = arg == 'smoke', 'S' if arg == 'smoke' else arg or 'L'
    check_choice('ade20k.py', name, tuple(BLOCKS))
    blocks = 1 if smoke else BLOCKS[name]
    steps = 20 if smoke else EPOCHS * IMAGES // BATCH
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{EPOCHS} epochs'
    config.batch_size = 8 if smoke else BATCH

    config.model = dict(name='eomt', num_classes=placeholder(int), query_blocks=blocks, **dtypes)
    if smoke:
        config.model.update(num_queries=16, patch_size=8, width=16, depth=2)
        config.model.update(mlp_dim=32, num_heads=2)
    else:
        config.model.update(vit.variant(f'{name}/16'), num_queries=100, remat='dots')
        config.model.update(layer_scale=1e-5, gelu='erf', registers=4)
        config.init = {'from': placeholder(str), 'select': ','.join(ENCODER)}

    # Masked attention ends block by block, between the sixth and the five sixths of training.
    config.task = dict(name='segment', kind='semantic', points=64 if smoke else 12_544)
    starts = [1 + 3 * i / max(blocks - 1, 1) for i in range(blocks)]
    config.task.anneal_start = tuple(int(steps * x / 6) for x in starts)
    config.task.anneal_end = tuple(int(steps * (x + 1) / 6) for x in starts)

    source = 'scenes_panoptic:160' if smoke else 'masks:data/ADEChallengeData2016'
    side, count = (32, 7) if smoke else (SIDE, 150)
    keep = "number_masks|keep('image', 'segments', 'labels')|photometric_distortion|flip"
    config.data = dict(source=source, split='train' if smoke else 'training')
    config.data.transforms = f'{keep}|large_scale_jitter({side}, 0.5, 2.0)|pad_objects({count})'
    val = dict(source=source, split='test[:16]' if smoke else 'validation', batch_size=4)
    val['transforms'] = f"keep('image')|sliding_windows({side}, most=6)"
    config.evals = dict(val=dict(val, evaluator='mean_iou'))

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=0.05, decay_mask='.', clip_norm=0.01)
    config.optim.layer_decay = 0.8
    first, second = ('2 steps', '4 steps') if smoke else ('500 steps', '1000 steps')
    config.optim.schedule = dict(name='polynomial', power=0.9, warmup=first)
    config.optim.lr_delays = ((f'^({"|".join(ENCODER)})(/|$)', first, second),)
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '10%')
    config.every.checkpoint = '20' if smoke else '2000 steps'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
