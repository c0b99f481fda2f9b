"""DETR on BCCD, blood cells of three kinds: 205 training photographs, on a CPU.

    python -m vit_jax train experiments/detr/bccd.py --workdir runs/bccd
    python -m vit_jax train experiments/detr/bccd.py:scenes --workdir runs/bccd_scenes \\
      --config.init.from=runs/scenes

The images and their boxes (github.com/cosmicad/dataset, MIT) are in data/bccd in COCO format:
images/*.jpg and instances_train.json, instances_val.json, instances_test.json, of 205, 87 and 72
images of 640 x 480 pixels, resized to 128 x 96; `--config.data.source=coco:PATH` and the same for
`config.evals.*` name another folder. `:scenes` starts from the detector of scenes.py, without its
queries and classes.

Expected: better from scenes than from scratch, which sees only 205 images. Measured on the 72 test
images, after 150 epochs in about 15 minutes of one CPU core each: AP50 0.246 (AP 0.081) from
scratch, AP50 0.640 (AP 0.360) from scenes. On `val`, which was not used for tuning, 0.288 and
0.633.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

FIELDS = "keep('image', 'boxes', 'labels')"


def get_config(scenes: bool = False) -> ConfigDict:
    """From scratch, or from a detector of `scenes`."""
    config = ConfigDict()
    config.total = '150 epochs'
    config.batch_size = 8

    # As in scenes.py, but with up to 30 cells.
    config.model = dict(name='detr', num_classes=placeholder(int), dropout=0.0, norm='pre')
    config.model.update(backbone_norm='group', layers=(1, 1), backbone_width=24, num_queries=40)
    config.model.update(width=128, depth=1, decoder_depth=3, num_heads=4, mlp_dim=256)
    # All but the queries, which are fewer, and the classes.
    loaded = 'backbone, input_proj, encoder, decoder, bbox_embed'
    config.init = {'from': placeholder(str) if scenes else '', 'select': loaded}
    config.task = dict(name='detect')

    data = dict(source='coco:data/bccd', sizes=((96, 128),), cache=True)
    scales = 'scale_and_crop((72, 80, 88, 96), 128)'
    config.data = dict(data, split='train')
    config.data.transforms = f'{FIELDS}|flip|{scales}|pad_objects(32)'
    test = dict(data, transforms=f'{FIELDS}|resize_small(96, max=128)|pad_objects(32)')
    test.update(evaluator='coco_ap')
    config.evals = dict(val=dict(test, split='val'), test=dict(test, split='test', every='100%'))

    config.optim = dict(name='adamw', lr=5e-4, weight_decay=1e-4, clip_norm=0.1, b2=0.99)
    config.optim.schedule = dict(name='cosine', warmup='200 steps')
    config.every = dict(log='50', eval='10%', checkpoint='5%')
    return config


def smoke(config: ConfigDict) -> None:
    """Shrink the run to 20 steps of a tiny model on scenes, from scratch."""
    config.total = '20 steps'
    config.model.update(layers=(1,), backbone_width=4, num_queries=8, width=16)
    config.model.update(depth=1, decoder_depth=2, num_heads=2, mlp_dim=32)
    config.init['from'] = ''
    resize = 'resize_small(32, max=32)|pad_objects(32)'
    config.data.update(source='scenes:160', sizes=((32, 32),))
    config.data.transforms = f'{FIELDS}|flip|{resize}'
    for entry in config.evals.values():
        entry.update(source='scenes:160', split='test[:16]', sizes=((32, 32),))
        entry.transforms = f'{FIELDS}|{resize}'
    config.evals.test.every = '20'
    config.optim.schedule.warmup = '2 steps'
    config.every = dict(log='10', eval='20', checkpoint='20')
