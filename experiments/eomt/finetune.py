"""EoMT on your own masks from DINOv2's ViT-S/14, at 448 pixels.

    python -m vit_jax train experiments/eomt/finetune.py \\
      --config.data.source=masks:/data/leaves --config.evals.val.source=masks:/data/leaves \\
      --config.init.from=hf://facebook/dinov2-small --workdir runs/leaves

See own.py for other checkpoints; here the splits are `train` and `val`. The recipe is the paper's
(Kerssies et al., 2025, arXiv:2503.19108, appendix A), for 2,000 steps of 16 images. Expected:
depends on the data. Not measured.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER

STEPS = 2_000


def get_config() -> ConfigDict:
    """The recipe."""
    config = ConfigDict()
    config.total = f'{STEPS} steps'
    config.batch_size = 16

    config.model = dict(name='eomt', num_classes=placeholder(int), **vit.variant('S/14'))
    config.model.update(query_blocks=3, num_queries=100, layer_scale=1e-5, gelu='erf')
    config.model.dtype = 'bfloat16'
    encoder = 'patch_embed,cls_token,pos_embed,encoder'
    config.init = {'from': placeholder(str), 'select': encoder}
    # Masked attention ends in all blocks at once.
    config.task = dict(name='segment', kind='semantic')
    config.task.update(anneal_start=(STEPS // 6,), anneal_end=(STEPS * 5 // 6,))

    data = dict(source='masks:data/masks')
    config.data = dict(data, split='train')
    config.data.transforms = (
        "number_masks|keep('image', 'segments', 'labels')|drop_alpha|photometric_distortion|flip"
        '|large_scale_jitter(448, 0.5, 2.0)|pad_objects(100)'
    )
    data.update(transforms="keep('image')|drop_alpha|sliding_windows(448)")
    config.evals = dict(val=dict(data, split='val', evaluator='mean_iou', per_class=True))

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
    del config.init
    config.task.update(anneal_start=(3,), anneal_end=(17,), points=64)
    config.data.source = config.evals.val.source = 'scenes_panoptic:160'
    config.data.transforms = config.data.transforms.replace('448', '32')
    config.evals.val.update(split='test[:16]', transforms="keep('image')|drop_alpha")
    config.evals.val.transforms += '|sliding_windows(32)'
    config.every = dict(log='10', eval='20')
