"""DETR on BCCD, blood cells of three kinds: 205 training photographs, on a CPU.

    python -m vit_jax train --config experiments/detr/bccd.py --workdir runs/bccd
    python -m vit_jax train --config experiments/detr/bccd.py:scenes --workdir runs/bccd_scenes \\
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

ARGS = ('smoke', 'scenes')
# From the detector of scenes.py: all but its queries, which are fewer, and its classes.
KEPT = 'backbone, input_proj, encoder, decoder, bbox_embed'
FIELDS = "keep('image', 'boxes', 'labels')"
SCALES = (72, 80, 88, 96)


def get_config(arg: str | None = None) -> ConfigDict:
    """`arg`: `scenes` to start from a detector of digits; `smoke` for a few steps on scenes."""
    smoke = arg == 'smoke'
    config = ConfigDict()
    config.seed = 0
    config.total = '20 steps' if smoke else '150 epochs'
    config.batch_size = 8

    config.model = dict(name='detr', num_classes=placeholder(int), dropout=0.0, norm='pre')
    config.model.update(backbone_norm='group', layers=(1,) if smoke else (1, 1))
    if smoke:
        config.model.update(backbone_width=4, num_queries=8, width=16)
        config.model.update(depth=1, decoder_depth=2, num_heads=2, mlp_dim=32)
    else:  # as in scenes.py, but with up to 30 cells
        config.model.update(backbone_width=24, num_queries=40, width=128)
        config.model.update(depth=1, decoder_depth=3, num_heads=4, mlp_dim=256)
    config.task = dict(name='detect')
    config.init = {'from': placeholder(str) if arg == 'scenes' else '', 'select': KEPT}

    source, frame = ('scenes:160', (32, 32)) if smoke else ('coco:data/bccd', (96, 128))
    data = dict(source=source, sizes=(frame,), cache=True)
    test = dict(data, transforms=f'{FIELDS}|resize_small({frame[0]}, max={frame[1]})')
    test['transforms'] += '|pad_objects(32)'
    scales = 'resize_small(32, max=32)' if smoke else f'scale_and_crop({SCALES}, {frame[1]})'
    augment = f'{FIELDS}|flip|{scales}|pad_objects(32)'
    config.data = dict(data, split='train', transforms=augment)
    val = dict(test, split='test[:16]' if smoke else 'val', evaluator='coco_ap')
    config.evals = dict(val=val, test=dict(val, split=val['split'] if smoke else 'test'))
    config.evals.test.every = '20' if smoke else '100%'

    config.optim = dict(name='adamw', lr=5e-4, weight_decay=1e-4, clip_norm=0.1, b2=0.99)
    config.optim.schedule = dict(name='cosine', warmup='2 steps' if smoke else '200 steps')
    config.step = dict(accum_steps=1, ema_decay=0.0)
    config.every = dict(log='10' if smoke else '50', eval='20' if smoke else '10%')
    config.every.checkpoint = '20' if smoke else '5%'
    config.checkpoint = dict(keep_last=2, keep_every='')
    config.parallel = dict(strategy='jit', fsdp=1, tensor=1)
    return config
