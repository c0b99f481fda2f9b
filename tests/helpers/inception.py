"""Files of Inception v3 with random numbers, and what torch-fidelity computes with them.

torch-fidelity needs torchvision, so its features are stored. As a command this module asks it
again:

    python tests/helpers/inception.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.models import inception
from vit_jax.tree_paths import param_paths

GOLDEN = Path(__file__).parents[1] / 'golden' / 'inception.npz'
SIZES = ((32, 32), (61, 40))
_STEM = {'1a': '3x3', '2a': '3x3', '2b': '3x3', '3b': '1x1', '4a': '3x3'}


def shapes(width_factor: float = 1.0) -> dict[str, tuple[int, ...]]:
    """PyTorch's names of all parameters and statistics, and their shapes."""
    model = inception.Model(width_factor=width_factor)
    images = jax.ShapeDtypeStruct((1, 75, 75, 3), np.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    named: dict[str, tuple[int, ...]] = {}
    for path, leaf in param_paths(params).items():
        layer, _, part = path.rpartition('/')
        name = layer.replace('head', 'fc').replace('/norm', '/bn').replace('/', '.')
        name = name.replace('mixed', 'Mixed')
        if name.startswith('conv_'):
            place = name[5:7]
            name = f'Conv2d_{place}_{_STEM[place]}{name[7:]}'
        if part == 'kernel':
            named[f'{name}.weight'] = tuple(leaf.shape[i] for i in (-1, -2, *range(leaf.ndim - 2)))
        elif part == 'scale':
            leaves = ('weight', 'running_mean', 'running_var')
            named |= {f'{name}.{leaf_name}': leaf.shape for leaf_name in leaves}
        else:
            named[f'{name}.{part}'] = leaf.shape
    return named


def parameters(width_factor: float = 1.0) -> dict[str, np.ndarray]:
    """Random parameters that keep the size of features."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape, np.float32)
        if name.endswith('running_var'):
            return 0.5 + np.abs(values)
        if name.endswith('bn.weight'):
            return 1 + 0.2 * values
        scale = np.sqrt(2 / np.prod(shape[1:])) if len(shape) == 4 else 0.05
        return values * np.float32(scale)

    return {name: draw(name, shape) for name, shape in sorted(shapes(width_factor).items())}


def write(path: Path, width_factor: float) -> Path:
    """Write a file as torch.save does."""
    import torch

    arrays = {name: torch.from_numpy(array) for name, array in parameters(width_factor).items()}
    torch.save(arrays, path)
    return path


def photos(size: tuple[int, int]) -> np.ndarray:
    """Two random images, bytes [2 H W 3]."""
    return np.random.default_rng(1).integers(0, 256, (2, *size, 3)).astype(np.uint8)


def _main() -> None:
    import torch
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Extractor(FeatureExtractorInceptionV3):
        """Takes files without counters of batches."""

        def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
            return super().load_state_dict(state, strict=False)

    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder, 'inception.pth'), 1.0)
        extractor = Extractor('fid', ['2048', 'logits'], feature_extractor_weights_path=str(file))
    arrays = {}
    for size in SIZES:
        images = torch.from_numpy(photos(size).transpose(0, 3, 1, 2))
        features, logits = extractor(images)
        arrays |= {f'features {size}': features.numpy(), f'logits {size}': logits.numpy()}
    np.savez_compressed(GOLDEN, **arrays)
    print(f'{GOLDEN}: {len(arrays)} arrays', file=sys.stderr)


if __name__ == '__main__':
    _main()
