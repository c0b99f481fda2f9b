"""EoMT on your own masks: any released ViT, or a whole EoMT, learns the classes of pixels.

    python -m vit_jax train --config experiments/eomt/finetune.py:auto \\
      --config.data.source=masks:/data/leaves --config.init.from=FILE --workdir runs/leaves

The encoder's size, patches and normalization come from the checkpoint, any ViT that `vit_jax.load`
reads (DINOv2, DINOv3, SigLIP, MAE, ...), and so does the image size; `auto,448` is for images of
448 pixels. The classes come from the data. It evaluates on their validation split, or on a held-out
fifth. Four blocks see queries, by default; the paper has three for ViT-S and B
(`--config.model.query_blocks=3`) and five for g. Without an argument it is DINOv2's ViT-S/14 at 448
pixels, and splits `train` and `val`.

The recipe is the paper's (Kerssies et al., 2025, arXiv:2503.19108, appendix A), for 2,000 steps of
16 images. Expected: depends on the data. Not measured.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER

ARGS = ('smoke', ...)
STEPS = 2_000


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `auto`, or `auto,448` for images of 448 pixels; `smoke` for a few steps of a tiny
    model.
    """
    smoke, (kind, _, size) = arg == 'smoke', (arg or '').partition(',')
    auto = kind == 'auto'
    if not smoke and (kind not in ('', 'auto') or (size and not size.isdecimal())):
        raise UserError(f'finetune.py:{arg}: write auto, or auto,448 for images of 448 pixels')
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else f'{STEPS} steps'
    config.batch_size = 8 if smoke else 16

    config.model = dict(num_classes=placeholder(int), query_blocks=placeholder(int))
    if smoke:
        config.model.update(name='eomt', patch_size=8, width=16, depth=2, mlp_dim=32, num_heads=2)
        config.model.update(query_blocks=1, num_queries=16)
    elif not auto:
        config.model.update(vit.variant('S/14'), name='eomt', query_blocks=3, num_queries=100)
        config.model.update(layer_scale=1e-5, gelu='erf', dtype='bfloat16')
        config.init = {'from': placeholder(str), 'select': ','.join(ENCODER)}
    else:
        config.model.update(name=placeholder(str), num_queries=placeholder(int), dtype='bfloat16')
        config.init = {'from': placeholder(str), 'into': 'eomt', 'posemb': 'bicubic'}
    # Masked attention ends in all blocks at once.
    start, end = (3, 17) if smoke else (STEPS // 6, STEPS * 5 // 6)
    config.task = dict(name='segment', kind='semantic', anneal_start=(start,), anneal_end=(end,))
    if smoke:
        config.task.points = 64

    source = 'scenes_panoptic:160' if smoke else placeholder(str) if auto else 'masks:data/masks'
    train, val = ('train', 'test[:16]') if smoke else ('train', 'val')
    size = '32' if smoke else size or ('{size}' if auto else '448')
    fields = "keep('image', 'segments', 'labels')"
    config.data = dict(source=source, split=placeholder(str) if auto else train)
    config.data.transforms = (
        f'number_masks|{fields}|drop_alpha|photometric_distortion|flip'
        f'|large_scale_jitter({size}, 0.5, 2.0)|pad_objects(100)'
    )
    seen = f"keep('image')|drop_alpha|sliding_windows({size})"
    split = placeholder(str) if auto else val
    config.evals = dict(
        val=dict(split=split, transforms=seen, evaluator='mean_iou', per_class=True)
    )

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=0.05, clip_norm=0.01)
    config.optim.layer_decay = 0.8
    # The heads learn first.
    config.optim.schedule = dict(name='polynomial', power=0.9, warmup='5%')
    parts = '|'.join(ENCODER)
    config.optim.lr_delays = ((f'^({parts})(/|$)', '5%', '10%'),)
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '2%', eval='20' if smoke else '10%')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
