"""Your own masks: any released ViT, or a whole EoMT, learns the classes of pixels.

    python -m vit_jax train experiments/eomt/own.py \\
      --config.data.source=masks:/data/leaves --config.init.from=FILE --workdir runs/leaves

The encoder's size, patches and normalization come from the checkpoint, any ViT that `vit_jax.load`
reads (DINOv2, DINOv3, SigLIP, MAE, ...), and so does the image size; `own.py:size=448` is for
images of 448 pixels. The classes come from the data. It evaluates on their validation split, or on
a held-out fifth. Four blocks see queries, by default; the paper has three for ViT-S and B
(`--config.model.query_blocks=3`) and five for g.

The recipe is the paper's (Kerssies et al., 2025, arXiv:2503.19108, appendix A), for 2,000 steps of
16 images. Expected: depends on the data. Not measured.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models.eomt import ENCODER

STEPS = 2_000


def get_config(size: int = 0) -> ConfigDict:
    """Images of `size` pixels, the checkpoint's size if 0."""
    side = str(size or '{size}')  # the latter is filled in from the checkpoint
    config = ConfigDict()
    config.total = f'{STEPS} steps'
    config.batch_size = 16

    config.model = dict(name=placeholder(str), num_classes=placeholder(int), dtype='bfloat16')
    config.model.update(query_blocks=placeholder(int), num_queries=placeholder(int))
    config.init = {'from': placeholder(str), 'into': 'eomt', 'posemb': 'bicubic'}
    # Masked attention ends in all blocks at once.
    config.task = dict(name='segment', kind='semantic')
    config.task.update(anneal_start=(STEPS // 6,), anneal_end=(STEPS * 5 // 6,))

    config.data = dict(source=placeholder(str), split=placeholder(str))
    config.data.transforms = (
        "number_masks|keep('image', 'segments', 'labels')|drop_alpha|photometric_distortion|flip"
        f'|large_scale_jitter({side}, 0.5, 2.0)|pad_objects(100)'
    )
    val = dict(split=placeholder(str), evaluator='mean_iou', per_class=True)
    val.update(transforms=f"keep('image')|drop_alpha|sliding_windows({side})")
    config.evals = dict(val=val)

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=0.05, clip_norm=0.01)
    config.optim.layer_decay = 0.8
    # The heads learn first.
    config.optim.schedule = dict(name='polynomial', power=0.9, warmup='5%')
    config.optim.lr_delays = ((f'^({"|".join(ENCODER)})(/|$)', '5%', '10%'),)
    config.every = dict(log='2%', eval='10%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes, from scratch."""
    config.total = '20 steps'
    config.batch_size = 8
    config.model = dict(name='eomt', num_classes=placeholder(int), query_blocks=1, num_queries=16)
    config.model.update(patch_size=8, width=16, depth=2, mlp_dim=32, num_heads=2)
    config.init = {'from': ''}
    config.task.update(anneal_start=(3,), anneal_end=(17,), points=64)
    config.data.update(source='scenes_panoptic:160', split='train')
    config.data.transforms = config.data.transforms.replace('{size}', '32')
    config.evals.val.update(split='test[:16]')
    config.evals.val.transforms = config.evals.val.transforms.replace('{size}', '32')
    config.every = dict(log='10', eval='20')
