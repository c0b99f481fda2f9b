"""Your own boxes: any released DETR learns your classes.

    python -m vit_jax train experiments/detr/own.py \\
        --config.data.source=coco:/data/cells --config.init.from=hf://facebook/detr-resnet-50 \\
        --workdir runs/cells

The model and the normalization come from the checkpoint, any DETR that `vit_jax.load` reads or a
run of this project; its classes are replaced by the data's. It evaluates on their validation
split, or on a held-out fifth. `own.py:size=480` is the longer side of images in pixels. See
docs/boxes.md for the layouts of the data.

AdamW, clipping and a tenth of the rate for the backbone are the paper's (Carion et al., 2020,
arXiv:2005.12872), the classes learn ten times faster; 1,000 steps of 8 images, whose first tenth is
the warm-up. Expected: depends on the data. Not measured.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(size: int = 640) -> ConfigDict:
    """Images of at most `size` pixels on either side."""
    config = ConfigDict()
    config.total = '1000 steps'
    config.batch_size = 8

    config.model = dict(name=placeholder(str), num_classes=placeholder(int))
    # All but the classes.
    parts = 'backbone,input_proj,query_embed,encoder,decoder,bbox_embed'
    config.init = {'from': placeholder(str), 'select': parts}
    config.task = dict(name='detect')

    fields, frame = "keep('image', 'boxes', 'labels')|drop_alpha", -(-size // 32) * 32
    scales = tuple(size * share // 10 for share in (6, 7, 8, 9, 10))
    config.data = dict(source=placeholder(str), split=placeholder(str), sizes=((frame, frame),))
    config.data.transforms = f'{fields}|flip|scale_and_crop({scales}, {size})|pad_objects(100)'
    val = dict(split=placeholder(str), sizes=((frame, frame),), evaluator='coco_ap')
    val.update(transforms=f'{fields}|resize_small({size}, max={size})|pad_objects(100)')
    config.evals = dict(val=val)

    config.optim = dict(name='adamw', lr=1e-4, weight_decay=1e-4, decay_mask='.', clip_norm=0.1)
    config.optim.lr_mults = (('^backbone/', 0.1), ('^class_embed/', 10.0))
    config.optim.freeze = ('^backbone/.*norm',)
    config.optim.schedule = dict(name='cosine', warmup='10%')
    config.every = dict(log='2%', eval='10%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes, from scratch."""
    config.total = '20 steps'
    config.model = dict(name='detr', num_classes=placeholder(int), layers=(1,), backbone_width=4)
    config.model.update(num_queries=8, width=16, depth=1, decoder_depth=1, num_heads=2, mlp_dim=32)
    config.init['from'] = ''
    fields = "keep('image', 'boxes', 'labels')"
    config.data.update(source='scenes:160', split='train', sizes=((32, 32),))
    config.data.transforms = f'{fields}|flip|pad_objects(6)'
    config.evals.val.update(split='test[:16]', sizes=((32, 32),))
    config.evals.val.transforms = f'{fields}|pad_objects(6)'
    config.every = dict(log='10', eval='20')
