"""RF-DETR on your own boxes or masks: from any released RF-DETR, or from a DINOv2 ViT.

    python -m vit_jax train experiments/rfdetr/own.py \\
      --config.data.source=coco:/data/cells --config.init.from=FOLDER --workdir runs/cells
    python -m vit_jax train experiments/rfdetr/own.py:vit \\
      --config.data.source=coco:/data/cells --config.init.from=hf://facebook/dinov2-small \\
      --workdir runs/cells

The model and the normalization come from the checkpoint, an RF-DETR that `vit_jax.load` reads or a
run of this project; its classes are replaced by the data's. `:vit` takes only the encoder of a
ViT-S/14. It evaluates on the data's validation split, or on a held-out fifth. `own.py:size=560` is
the side of the padded images in pixels, which windows of patches must tile. See docs/boxes.md for
the layouts of the data. `:masks` also learns the masks of data that have them, from an RF-DETR for
instance segmentation, or with `:vit,masks` from a ViT.

Clipping, weight decay, the layers' rates and the average follow the authors (Robinson et al., 2025,
arXiv:2511.09554, and their package rfdetr); 1,000 steps of 16 images, whose first twentieth is the
warm-up. Expected: depends on the data. Not measured.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.models import rf_detr

KEPT = "keep('image', 'boxes', 'labels')"
KEPT_MASKS = "number_masks|keep('image', 'boxes', 'labels', 'segments')"


def get_config(vit: bool = False, size: int = 448, masks: bool = False) -> ConfigDict:
    """From a ViT-S/14 or an RF-DETR; images of at most `size` pixels on either side."""
    config = ConfigDict()
    config.total = '1000 steps'
    config.batch_size = 16

    config.model = dict(name=placeholder(str), num_classes=placeholder(int))
    config.init = {'from': placeholder(str)}
    if vit:
        config.model.update(rf_detr.variant('S'), patch_size=14, layer_scale=1e-5, gelu='erf')
        config.model.update(name='rf_detr')
        config.init.update(select='patch_embed,cls_token,pos_embed,encoder', posemb='bicubic')
        config.model.update(dict(masks=dict(stride=4)) if masks else {})
    config.task = dict(name='segment_groups' if masks else 'detect_groups')

    fields = f'{KEPT_MASKS if masks else KEPT}|drop_alpha'
    scales = tuple(size * share // 10 for share in (6, 7, 8, 9, 10))
    config.data = dict(source=placeholder(str), split=placeholder(str), sizes=((size, size),))
    config.data.transforms = f'{fields}|flip|scale_and_crop({scales}, {size})|pad_objects(100)'
    val = dict(split=placeholder(str), sizes=((size, size),))
    val.update(dict(evaluator='mask_ap', weighted=False) if masks else dict(evaluator='coco_ap'))
    val.update(transforms=f'{fields}|resize_small({size}, max={size})|pad_objects(100)')
    config.evals = dict(val=val)

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=1e-4, clip_norm=0.1)
    config.optim.layer_decay = 0.8
    config.optim.schedule = dict(name='cosine', warmup='5%')
    config.step = dict(ema_decay=0.993)
    config.every = dict(log='2%', eval='10%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes, from scratch."""
    config.total = '20 steps'
    config.batch_size = 8
    config.model = dict(name='rf_detr', num_classes=placeholder(int), patch_size=8, width=16)
    config.model.update(depth=2, mlp_dim=32, num_heads=2, num_queries=8, groups=2)
    config.model.update(decoder_width=32, decoder_depth=1, decoder_heads=2, cross_heads=4)
    config.model.update(decoder_mlp_dim=32, projector_blocks=1)
    config.init = {'from': ''}
    masks = config.task.name == 'segment_groups'
    config.model.update(dict(masks=dict(stride=4)) if masks else {})
    fields, scenes = (KEPT_MASKS, 'scenes_panoptic:160') if masks else (KEPT, 'scenes:160')
    config.data.update(source=scenes, split='train', sizes=((32, 32),))
    config.data.transforms = f'{fields}|flip|pad_objects(6)'
    config.evals.val.update(split='test[:16]', sizes=((32, 32),))
    config.evals.val.transforms = f'{fields}|pad_objects(6)'
    config.step.ema_decay = 0.0
    config.every = dict(log='10', eval='20')
