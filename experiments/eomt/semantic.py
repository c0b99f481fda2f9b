"""EoMT for semantic segmentation of ADE20K or Cityscapes: DINOv2 with registers.

    python -m vit_jax train --config experiments/eomt/semantic.py:ade20k,L \\
      --config.init.from=hf://facebook/dinov2-with-registers-large --workdir runs/eomt_ade20k
    python -m vit_jax train --config experiments/eomt/semantic.py:cityscapes,L \\
      --config.init.from=hf://facebook/dinov2-with-registers-large --workdir runs/eomt_cityscapes

S, B or L, the default; patches of 14 pixels are resized to 16. ADE20K's scene parsing release, 150
classes, is unpacked in data/ADEChallengeData2016: images/ and annotations/, each with training/ and
validation/, and objectInfo150.txt. Of Cityscapes, leftImg8bit/ and gtFine/ are unpacked in
data/cityscapes; the 19 classes of the benchmark are taken.

Kerssies et al., 2025, arXiv:2503.19108, appendix A, and the authors' code: 31 epochs of 16 images
of 512 pixels (ADE20K) or 107 of 1,024 pixels (Cityscapes), color distortion, large-scale jitter,
AdamW at 1e-4 with layer-wise decay of 0.8. The heads warm up in 500 steps, then the encoder in
1,000, then both rates decay polynomially. Evaluation is in windows of the same size. ADE20K's
scores are not interpolated to the sizes of the files unless `config.task.frame` is the largest of
them; those of Cityscapes have the images' own size.

Expected (published in the authors' model zoo): mIoU 58.4 (ADE20K, L) and 84.2 (Cityscapes, L). Not
measured.

By `preflight`, a step of ADE20K's L takes 5.6 of 16 GiB and at least 42 ms on v5e:4x4, 8.0 of 59.3
GiB and at least 28 ms on h100:8; Cityscapes' 11.1 GiB and 208 ms, 20.5 GiB and 81 ms. The trainings
take at least 7 and 2 chip-hours, and 18 and 4.
"""

from typing import NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.config.defaults import precision
from vit_jax.errors import check_choice
from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER


class Data(NamedTuple):
    """A data set, the size of its images, and how long it is learned.

    Attributes:
      images: number of those of training.
      side: of crops and windows in pixels.
      windows: of an evaluation image, at most.
      frame: see `config.task.frame`.
    """

    folder: str
    train: str
    val: str
    images: int
    classes: int
    epochs: int
    side: int
    windows: int
    frame: tuple[int, int] | None = None


DATA = {
    'ade20k': Data(
        folder='data/ADEChallengeData2016',
        train='training',
        val='validation',
        images=20_210,
        classes=150,
        epochs=31,
        side=512,
        windows=6,
    ),
    'cityscapes': Data(
        folder='data/cityscapes',
        train='train',
        val='val',
        images=2_975,
        classes=19,
        epochs=107,
        side=1024,
        windows=2,
        frame=(1024, 2048),
    ),
}
SMOKE = Data('', 'train', 'test[:16]', images=160, classes=7, epochs=1, side=32, windows=6)
BLOCKS = {'S': 3, 'B': 3, 'L': 4}  # with queries
ARGS = ('smoke', *DATA, *(f'{data},{size}' for data in DATA for size in BLOCKS), 'ade20k,L,fast')
BATCH = 16


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: data, S, B or L, and `fast`, as in `ade20k,L,fast`; `smoke` for a few tiny steps."""
    arg, dtypes = precision(arg)
    smoke = arg == 'smoke'
    chosen, _, size = ('ade20k,S' if smoke else arg or 'ade20k').partition(',')
    check_choice('data set', chosen, tuple(DATA))
    check_choice('size', size := size or 'L', tuple(BLOCKS))
    data, blocks = (SMOKE, 1) if smoke else (DATA[chosen], BLOCKS[size])
    steps = 20 if smoke else data.epochs * data.images // BATCH
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{data.epochs} epochs'
    config.batch_size = 8 if smoke else BATCH

    config.model = dict(name='eomt', num_classes=placeholder(int), query_blocks=blocks, **dtypes)
    if smoke:
        config.model.update(num_queries=16, patch_size=8, width=16, depth=2)
        config.model.update(mlp_dim=32, num_heads=2)
    else:
        config.model.update(vit.variant(f'{size}/16'), num_queries=100, remat='dots')
        config.model.update(layer_scale=1e-5, gelu='erf', registers=4)
        config.init = {'from': placeholder(str), 'select': ','.join(ENCODER)}

    # Masked attention ends block by block, between the sixth and the five sixths of training.
    config.task = dict(name='segment', kind='semantic', points=64 if smoke else 12_544)
    starts = [1 + 3 * i / max(blocks - 1, 1) for i in range(blocks)]
    config.task.anneal_start = tuple(int(steps * x / 6) for x in starts)
    config.task.anneal_end = tuple(int(steps * (x + 1) / 6) for x in starts)
    if data.frame is not None:
        config.task.frame = data.frame

    source = 'scenes_panoptic:160' if smoke else f'masks:{data.folder}'
    prepare = (
        "number_masks|keep('image', 'segments', 'labels')|photometric_distortion|flip"
        f'|large_scale_jitter({data.side}, 0.5, 2.0)|pad_objects({data.classes})'
    )
    config.data = dict(source=source, split=data.train, transforms=prepare)
    val = dict(source=source, split=data.val, batch_size=4, evaluator='mean_iou')
    val['transforms'] = f"keep('image')|sliding_windows({data.side}, most={data.windows})"
    config.evals = dict(val=val)

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
