"""One tiny model for each family of files and each kind of run: the rows of `test_doors`."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from helpers import detr, inception, released, timm_forms, timm_swin_cr
from vit_jax import interop
from vit_jax.config.load import from_dict
from vit_jax.errors import modules
from vit_jax.interop import families, files
from vit_jax.interop.trained import TrainedModel, fields
from vit_jax.models import (
    bit_resnet,
    clip,
    dpt,
    eomt,
    hybrid,
    mae,
    mixer,
    pmt,
    rf_detr,
    sam_encoder,
    siglip,
    siglip_naflex,
    swin,
    swin_v2,
    text_encoder,
    tips,
    vit,
)
from vit_jax.trainer.train import train

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'golden'
RUNS = tuple(sorted(path.name for path in GOLDEN.glob('run_*')))
VIT = dict(num_classes=3, patch_size=4, width=32, depth=2, mlp_dim=24, num_heads=2)
BARE = VIT | {'num_classes': None}
ROTARY = BARE | {
    **{'posemb': 'none', 'positions': 'rope_dinov3(rescale=2.0)', 'layer_scale': 1e-5},
    **{'gelu': 'erf', 'norm_eps': 1e-5, 'no_bias': 'key'},
}
EOMT = VIT | {'mlp_dim': 64, 'layer_scale': 0.1, 'num_queries': 3, 'query_blocks': 1}
DPT = {key: VIT[key] for key in ('patch_size', 'width', 'depth', 'num_heads')} | {
    **{'mlp_dim': 64, 'layer_scale': 0.1, 'maps': ((1, 2, 4), (2, 0.5, 6))},
    **{'fusion_width': 8, 'gelu': 'erf'},
}
RF_DETR = {
    key: VIT[key] for key in ('num_classes', 'patch_size', 'width', 'depth', 'num_heads')
} | {
    **{'mlp_dim': 64, 'layer_scale': 0.1, 'gelu': 'erf', 'maps': (1, 2), 'num_queries': 3},
    **{'groups': 2, 'decoder_width': 32, 'decoder_depth': 1, 'decoder_heads': 2, 'cross_heads': 4},
    **{'decoder_mlp_dim': 8, 'projector_blocks': 1},
}
TIPS = {
    **{'registers': 1, 'readout': 'project', 'readout_gelu': 'tanh', 'head_width': 0},
    **{'fits_image': False, 'no_bias': ('fusion',)},
}
TOWERS = {
    **{'vocab_size': 9, 'length': 4, 'patch_size': 4, 'width': 32, 'depth': 1, 'mlp_dim': 24},
    **{'num_heads': 2, 'text_width': 16, 'text_depth': 2, 'text_mlp_dim': 8},
    **{'text_num_heads': 4, 'embed_dim': 32},
}
WORDS = {'vocab_size': 9, 'length': 4, 'width': 16, 'depth': 2, 'mlp_dim': 8, 'num_heads': 4}
STAGES = {'num_classes': 3, 'patch_size': 4, 'width': 8, 'depths': (1, 1), 'num_heads': (1, 2)}
MIXER = {'num_classes': 3, 'patch_size': 32, 'tokens_mlp_dim': 4, 'channels_mlp_dim': 8}
# The model of each key of WRITERS: by its name, or by name and form.
MODELS = {
    'vit': vit.Model(**VIT),
    'vit authors': vit.Model(**ROTARY),
    'hybrid': hybrid.Model(**VIT | {'patch_size': 1}, layers=()),
    'bit_resnet': bit_resnet.Model(num_classes=3, layers=(1, 1)),
    'swin': swin.Model(**STAGES, window=4),
    'swin_v2': swin_v2.Model(**STAGES, window=4, image_size=32),
    # Of a width and depth that timm has.
    'mixer': mixer.Model(**MIXER, width=512, depth=8, gelu='erf'),
    'mixer npz': mixer.Model(**MIXER, width=8, depth=1),
    'sam_encoder': sam_encoder.Model(
        **{'patch_size': 4, 'width': 32, 'depth': 2, 'mlp_dim': 24, 'num_heads': 2},
        **{'window': 3, 'global_blocks': (1,), 'neck': 8},
    ),
    'mae': mae.Model(patch_size=4, width=32, depth=2, mlp_dim=24, num_heads=2, decoder_depth=1),
    'detr': detr.MODEL,
    'detr_panoptic': detr.PANOPTIC,
    'eomt': eomt.Model(**EOMT, posemb_prefix='none'),
    'pmt': pmt.Model(**EOMT, posemb='none', positions='rope_dinov3(rescale=2.0)'),
    'dpt': dpt.Model(**DPT),
    'rf_detr': rf_detr.Model(**RF_DETR),
    'siglip': siglip.Model(**TOWERS),
    'siglip_naflex': siglip_naflex.Model(**TOWERS, pos_grid=8),
    'clip': clip.Model(**TOWERS, eos=8, no_bias='patch_embed'),
    'tips': tips.Model(**TOWERS | {'text_width': 32}),
    'text_encoder': text_encoder.Model(num_classes=3, **WORDS),
}
# Models of families that write none, or not by default, by family: the model, and its form.
OTHERS = {
    'transformers_beit': (vit.Model(**VIT, posemb='none', positions='relative'), 'transformers'),
    'transformers_dinov2': (
        vit.Model(**VIT, pool='cls_patches', layer_scale=0.1, registers=2, mlp='swiglu'),
        'transformers',
    ),
    'transformers_dinov3': (vit.Model(**ROTARY, registers=2), 'transformers'),
    'transformers_dinov3 gated': (vit.Model(**ROTARY, mlp='swiglu'), 'transformers'),
    'authors_dinov3 gated': (vit.Model(**ROTARY, mlp='swiglu'), 'authors'),
    'transformers_vision_tower': (vit.Model(**BARE, pool='map'), 'transformers'),
    'transformers_yolos': (
        vit.Model(**BARE, registers=2, posemb_prefix='all', representation_size=32),
        'transformers',
    ),
    'transformers_eomt dinov3': (
        eomt.Model(**EOMT, posemb='none', positions='rope_dinov3(rescale=2.0)'),
        'transformers',
    ),
    'authors_pmt dinov2': (pmt.Model(**EOMT, registers=2, map_norm='none'), 'authors'),
    'transformers_depth dpt': (
        dpt.Model(**DPT | {'layer_scale': None, 'readout': 'project', 'final_norm': False}).clone(
            fits_image=False
        ),
        'transformers',
    ),
    'transformers_tips_dpt': (
        dpt.Model(**DPT | TIPS | {'bins': (8, 0.001, 10.0)}),
        'transformers',
    ),
    'transformers_tips_dpt classes': (
        dpt.Model(**DPT | TIPS | {'output': 'classes', 'num_classes': 3}),
        'transformers',
    ),
    'rf_detr masks': (
        rf_detr.Model(**RF_DETR, mask_stride=2, mask_mlp_dim=8),
        'transformers',
    ),
    'transformers_lw_detr': (
        rf_detr.Model(
            **RF_DETR | {'windows': 2, 'class_token': False, 'global_blocks': (0,)},
            **{'no_bias': ('key',), 'final_norm': False},
            neck={'norm': 'frozen', 'scales': (2.0, 0.5)},
        ),
        'transformers',
    ),
    'detr table': (dataclasses.replace(detr.MODEL, norm='pre'), 'transformers'),
}
# Models of families that write none, whose files are made of arrays by their names.
READ = {'authors_dinov2': 'vit', 'inception': 'inception'}
READ |= {'transformers_radio': 'vit', 'timm_swin': 'swin', 'timm_swin_cr': 'swin_v2_cr'}
# Runs that `run_vit` trained for one step would be with these groups in its config.
ADAM = {'name': 'adamw', 'lr': 1e-3}
MUP = 'mup(mlp_dim=4)'
TRAINED = {
    'run_mup': {'optim': {**ADAM, 'parametrization': MUP, 'freeze': ('patch_embed',)}},
    'run_lora': {
        **{'optim': ADAM, 'step': {}, 'lora': {'rank': 2}},
        'init': {'from': str(GOLDEN / 'run_vit')},
    },
}
COLORS = {'mean': (0.43, 0.411, 0.296), 'std': (0.213, 0.156, 0.143)}  # nobody's default
TASKS = {
    **{'mae': 'reconstruct', 'detr': 'detect', 'detr_panoptic': 'segment_panoptic'},
    **{
        'dpt': 'depth',
        **dict.fromkeys(('eomt', 'pmt'), 'segment'),
        'rf_detr': 'detect_groups',
        **dict.fromkeys(('siglip', 'siglip_naflex', 'clip', 'tips'), 'siglip'),
    },
}
# Inputs of models that take more than images, or none.
IMAGES = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
TEXTS = jax.ShapeDtypeStruct((1, 4), np.int32)
INPUTS = dict.fromkeys(('siglip', 'siglip_naflex', 'clip', 'tips'), (IMAGES, TEXTS))
INPUTS['text_encoder'] = (TEXTS,)
# Of images whose shape is kept.
KEPT = "resize_small(64, max=107, rounding='down')"


def drawn(model: Any) -> dict[str, Any]:
    """Random parameters and other variables by collection, with factors around one."""
    name = type(model).__module__.rpartition('.')[2]
    shapes = jax.eval_shape(model.init, jax.random.key(0), *INPUTS.get(name, (IMAGES,)))
    rng = np.random.default_rng(0)

    def draw(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
        values = 0.2 * rng.normal(size=leaf.shape)
        is_factor = path[-1].key in ('scale', 'var')
        return np.asarray(1 + np.abs(values) if is_factor else values, np.float32)

    found: dict[str, Any] = jax.tree_util.tree_map_with_path(draw, shapes)
    return found


def trained(model: Any, size: tuple[int, int] | None = (32, 32)) -> TrainedModel:
    """A model as if it had been read, of images with unusual colors."""
    name = type(model).__module__.rpartition('.')[2]
    masked = name == 'rf_detr' and model.masks.stride
    task: dict[str, Any] = {'name': 'segment_groups' if masked else TASKS.get(name, 'classify')}
    task |= {} if name == 'text_encoder' else COLORS
    task |= {'value_range': None} if name == 'mae' else {}
    transforms = KEPT if name.startswith('detr') else ''
    keywords = {'name': name, **fields(model)}
    collections = drawn(model)
    made = TrainedModel.from_file(
        collections.pop('params'), keywords, size, 'a test', task=task, transforms=transforms
    )
    return dataclasses.replace(made, collections=collections)


@dataclasses.dataclass(frozen=True)
class Row:
    """A model.

    Attributes:
      name: of the run, or the family with the model or the form.
      family: that reads it; empty for runs.
      model: a key of MODELS or OTHERS; a name of a model; or empty for runs.
      form: in which it is written, see `families.writer`; empty if it is not by `interop.write`.
    """

    name: str
    family: str = ''
    model: str = ''
    form: str = ''

    @property
    def prefix(self) -> str:
        """The family in front of a path to write to, for forms that are not the default's."""
        return f'{self.family}:' if self.form in ('timm', 'authors') else ''


@functools.cache
def rows() -> tuple[Row, ...]:
    """All runs, one row for each key of WRITERS, and the families that write none."""
    found = [Row(name) for name in (*RUNS, *TRAINED)]
    for family in modules(families.__name__):
        for model, form in getattr(families.find_family(family), 'WRITERS', {}):
            key = f'{model} {form}' if f'{model} {form}' in MODELS else model
            found.append(Row(f'{family} {model} {form}', family, key, form))
    found += [Row(name, name.partition(' ')[0], name, form) for name, (_, form) in OTHERS.items()]
    return (*found, *(Row(family, family, model) for family, model in READ.items()))


RADIO = {'num_attention_heads': 2, 'patch_size': 4}


def radio_parameters() -> dict[str, np.ndarray]:
    """Random arrays of a RadioModel by the names in its files."""
    patches, block = 'radio_model.model.patch_generator', 'radio_model.model.blocks.0'
    layers = {'attn.qkv': (96, 32), 'attn.proj': (32, 32), 'mlp.fc1': (24, 32), 'mlp.fc2': (32, 24)}
    shapes: dict[str, tuple[int, ...]] = {f'{patches}.cls_token.token': (5, 32)}
    shapes |= {f'{patches}.embedder.weight': (32, 48), f'{patches}.pos_embed': (1, 64, 32)}
    for name, shape in {**layers, 'norm1': (32,), 'norm2': (32,)}.items():
        shapes |= {f'{block}.{name}.weight': shape, f'{block}.{name}.bias': shape[:1]}
    rng = np.random.default_rng(0)
    return {n: np.asarray(0.2 * rng.normal(size=s), np.float32) for n, s in shapes.items()}


def write(row: Row, folder: pathlib.Path) -> pathlib.Path:
    """Write a row's files to a new folder, and return the path to read; a run has its own."""
    if row.name in TRAINED:
        stored = json.loads((GOLDEN / 'run_vit' / 'config.json').read_text())
        train(from_dict({**stored, 'total': '1 step', **TRAINED[row.name]}), folder)
        return folder
    if not row.family:
        return GOLDEN / row.name
    path = folder / ('model.npz' if row.form == 'npz' else 'model')
    if row.name == 'inception':
        files.write_safetensors(path, inception.parameters(1 / 32), {})
        return path
    if row.name == 'authors_dinov2':
        model = vit.Model(**BARE | {'num_heads': 1}, layer_scale=0.1)
        return released.write_dinov2(drawn(model)['params'], path)
    if row.name == 'transformers_radio':
        files.write_safetensors(path, radio_parameters(), {'model_type': 'radio', **RADIO})
        return path
    if row.name == 'timm_swin':
        return released.write('swin timm', path)
    if row.name == 'timm_swin_cr':
        about = next(iter(json.loads(timm_swin_cr.GOLDEN.read_text()).values()))
        files.write_safetensors(path, timm_forms.parameters(about['shapes']), about['config'])
        return path
    interop.write(trained(model_of(row)), f'{row.prefix}{path}')
    return path


def model_of(row: Row) -> Any:
    """The model of a family's row."""
    return OTHERS[row.model][0] if row.model in OTHERS else MODELS[row.model]


def model_name(row: Row) -> str:
    """The name of a row's model in `config.model`."""
    if not row.family:
        stored = GOLDEN / ('run_vit' if row.name in TRAINED else row.name) / 'config.json'
        name: str = json.loads(stored.read_text())['model']['name']
        return name
    if row.model in OTHERS:
        return type(OTHERS[row.model][0]).__module__.rpartition('.')[2]
    return row.model.partition(' ')[0]
