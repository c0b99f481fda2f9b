"""How many architectures of timm are read right, refused, or wrong.

    PYTHONPATH=.:tests python -m helpers.checkpoint_totals vision_transformer

asks for those of modules of timm.models. Each is made small, with random weights, and its outputs
are compared with ours. Architectures that are alike when they are small are measured once. This
needs timm with torchvision.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from helpers import timm_forms
from helpers.transformers_vit import apply
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import _timm_arguments

LIMIT = 1e-5  # of the largest output
_SIZE = ('embed_dim', 'num_heads')


def outcomes(module: str) -> Iterator[tuple[str, str]]:
    """Each architecture, and 'read', 'wrong by ...' or the reason why it is refused."""
    import timm

    known: dict[str, str] = {}
    for name in timm.list_models(module=module):
        case = timm_forms.asked(name, {})
        row = dict(_timm_arguments.architectures().get(name, {}))
        alike = {key: value for key, value in row.items() if key not in _SIZE}
        key = json.dumps([alike, case['config']['global_pool'], case['shapes']], sort_keys=True)
        known[key] = known.get(key) or _outcome(case)
        yield name, known[key]


def _outcome(case: dict[str, Any]) -> str:
    config, expected = case['config'], np.array([case['logits']])
    with tempfile.TemporaryDirectory() as folder:
        files.write_safetensors(folder, timm_forms.parameters(case['shapes']), config)
        try:
            imported = interop.read(folder)
        except UserError as error:
            return str(error).removeprefix(f'{folder}: ')
    batch = timm_forms.images(config['pretrained_cfg']['input_size'][1])
    found = apply(imported.model, imported.params, batch)['logits']
    worst = np.abs(found - expected).max() / np.abs(expected).max()
    return 'read' if worst <= LIMIT else f'wrong by {worst:.0e}'


if __name__ == '__main__':
    counts: collections.Counter[str] = collections.Counter()
    for module in sys.argv[1:]:
        for name, outcome in outcomes(module):
            print(f'{name}: {outcome}')
            first = outcome.split()[0]
            counts[first if first in ('read', 'wrong') else 'refused'] += 1
    print(dict(counts))
