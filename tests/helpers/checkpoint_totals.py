"""How many architectures of timm are read right, refused, or wrong.

    PYTHONPATH=.:tests python -m helpers.checkpoint_totals

asks for all that are like a ViT, or for those of modules of timm.models that are named behind it.
Each is made small, with random weights, and its outputs are compared with ours. Architectures that
are alike when they are small are measured once. This needs timm with torchvision.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from helpers import timm_architectures, timm_forms
from helpers.transformers_vit import normalized
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import _timm

LIMIT = 1e-5  # of the largest output; more if timm itself is that far from its own float64
MODULES = (
    *(*timm_architectures.MODULES, 'swin_transformer', 'swin_transformer_v2'),
    *('swin_transformer_v2_cr', 'resnetv2'),
)
_SIZE = ('embed_dim', 'num_heads')
_CLASSES = {'num_classes': 3}
# Arguments that make an architecture small, by its module; those of others are of `timm_forms`.
_SWIN = {'embed_dim': 8, 'depths': (2, 2, 1, 1), 'num_heads': (1, 2, 2, 2), **_CLASSES}
_SMALL: dict[str, dict[str, Any]] = {
    'vision_transformer_hybrid': {'patch_size': 1, 'img_size': 64},
    'swin_transformer': _SWIN,
    'swin_transformer_v2': _SWIN,
    'swin_transformer_v2_cr': _SWIN,
    'resnetv2': _CLASSES,
}


def outcomes(module: str) -> Iterator[tuple[str, str]]:
    """Each architecture, and 'read', 'wrong by ...' or the reason why it is refused."""
    import timm

    known: dict[str, str] = {}
    for name in timm.list_models('*_bit' if module == 'resnetv2' else '', module=module):
        row = _timm.architectures().get(name, {})
        try:
            _timm.arguments({'architecture': name}, 'timm ViT')
        except UserError as error:
            yield name, str(error)
            continue
        arguments = _arguments(module, name, row)
        with _small_bits():
            case = timm_forms.asked(name, arguments)
        if module == 'resnetv2':  # whose arguments follow from its shapes
            case['config'].pop('model_args')
        alike = {key: value for key, value in row.items() if key not in _SIZE}
        key = json.dumps([alike, case['config']['global_pool'], case['shapes']], sort_keys=True)
        known[key] = known.get(key) or _outcome(case, name, arguments)
        yield name, known[key]


def _arguments(module: str, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Those that make it small."""
    found = dict(_SMALL.get(module, {}))
    if '_p8_' in name:
        found['patch_size'] = 8
    if 'proj=False' in row.get('embed_layer', ''):  # whose width is that of its stem
        found['embed_dim'] = row['embed_dim']
    if row.get('class') == 'NaFlexVit':
        found['pos_embed_grid_size'] = [3, 3]
    if row.get('class') == 'Eva' and row.get('global_pool') == 'map':
        found['attn_pool_num_heads'] = row['num_heads']
    return found


@contextlib.contextmanager
def _small_bits() -> Iterator[None]:
    """BiTs of timm with one block a stage, as float32 is too coarse for 50 random ones."""
    from timm.models import resnetv2

    create = resnetv2._create_resnetv2_bit  # the one place where all of its BiTs get their sizes

    def smaller(*args: Any, **keywords: Any) -> Any:
        return create(*args, **{**keywords, 'layers': [1, 1, 1, 1], 'width_factor': 1})

    with mock.patch.object(resnetv2, '_create_resnetv2_bit', smaller):
        yield


def _outcome(case: dict[str, Any], name: str, arguments: dict[str, Any]) -> str:
    config, theirs = case['config'], np.array(case['logits'])
    with tempfile.TemporaryDirectory() as folder:
        files.write_safetensors(folder, timm_forms.parameters(case['shapes']), config)
        try:
            imported = interop.read(folder)
        except UserError as error:
            return str(error).removeprefix(f'{folder}: ')
    batch = timm_forms.images(config['pretrained_cfg']['input_size'][1])
    ours = np.asarray(
        imported.model.apply(imported.variables, normalized(imported, batch), train=False)[
            'logits'
        ][0]
    )
    scale = np.abs(theirs).max()
    if (worst := np.abs(ours - theirs).max() / scale) <= LIMIT:
        return 'read'
    exact = np.array(timm_forms.exact_logits(name, arguments))  # ResNets round more than that
    if np.abs(ours - exact).max() <= 2 * np.abs(theirs - exact).max() < 1e-4 * scale:
        return 'read'
    return f'wrong by {worst:.0e}'


if __name__ == '__main__':
    counts: collections.Counter[str] = collections.Counter()
    for module in sys.argv[1:] or MODULES:
        for name, outcome in outcomes(module):
            print(f'{name}: {outcome}', flush=True)
            first = outcome.split()[0]
            counts[first if first in ('read', 'wrong') else 'refused'] += 1
    print(dict(counts))
