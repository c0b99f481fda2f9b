"""Ten steps of AdamW and SGD with small models of timm, as stored results.

timm needs torchvision, so the losses are stored, and of the updates their norms and their products
with random signs. As a command this module asks timm again:

    python -m helpers.timm_training > tests/golden/timm_training.json
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from helpers import timm_forms, timm_mixer, timm_sam, training
from helpers.training import Result
from vit_jax import interop
from vit_jax.interop import files, names
from vit_jax.interop.trained import TrainedModel

GOLDEN = timm_forms.GOLDEN.with_name('timm_training.json')
HYBRID, MIXER = 'vit_small_r26_s32_224', timm_mixer.CONFIG['architecture']
SAM = 'samvit_base_patch16'
FORMS = (
    *(HYBRID, 'beit_base_patch16_224', 'deit3_small_patch16_224', 'eva02_base_patch14_224'),
    *('eva02_base_patch16_clip_224', 'beit3_base_patch16_224', 'vit_pe_core_base_patch16_224'),
    *(SAM, MIXER),
)
_PRODUCTS, _SIDE = 8, 64  # of the hybrid's images
# Without a gradient but for rounding: queries and layer norms subtract what these add.
_WITHOUT = '/key/bias$|/token_mixing/fc2/bias$'
Updates = dict[str, list[float]]  # the norm of an update and its products, by our names


def compare(name: str) -> dict[str, tuple[Result, Result]]:
    """The differences from timm after ten steps, and what float32 changes there, by optimizer."""
    row, found = json.loads(GOLDEN.read_text())[name], {}
    with tempfile.TemporaryDirectory() as folder:
        files.write_safetensors(folder, timm_forms.parameters(row['shapes']), row['config'])
        trained = interop.read(folder)
    start, unravel = ravel_pytree(jax.tree.map(jnp.asarray, trained.params))
    images = training.batch(2, *row['config']['pretrained_cfg']['input_size'][1:], 3)

    def loss(vector: Any) -> Any:
        logits = trained.model.apply({'params': unravel(vector)}, jnp.asarray(images))['logits']
        return jnp.square(logits - training.target(logits.shape)).mean()

    with jax.default_matmul_precision('highest'):
        gradient = jax.jit(jax.value_and_grad(loss))
        for optimizer, (_, ours) in training.optimizers().items():
            theirs = row[optimizer]
            losses, vector = training.train(gradient, start, ours, jnp.ones_like(start))
            updates = products(trained, unravel(vector))
            relative = np.abs(np.array(losses) / np.array(theirs['losses']) - 1).max()
            differences = [
                np.linalg.norm(np.subtract(updates[name][1:], known[1:])) / known[0]
                for name, known in theirs['updates'].items()
            ]
            result = Result(float(relative), float(max(differences)) / _PRODUCTS**0.5)
            found[optimizer] = result, Result(*theirs['rounding'])
    return found


def products(before: TrainedModel, after: Any) -> Updates:
    """The norm of the update of each array, and its products with random signs."""
    no_bias, found = before.model_config.get('no_bias', ''), {}
    old, new = (names.flatten(params, no_bias) for params in (before.params, after))
    for name in old:
        if re.search(_WITHOUT, name):
            continue
        update = (new[name] - old[name]).reshape(-1).astype(np.float64)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        signs = rng.choice([-1.0, 1.0], (_PRODUCTS, update.size))
        found[name] = [float(np.linalg.norm(update)), *(signs @ update).tolist()]
    return found


def asked(name: str) -> dict[str, Any]:
    """The row of an architecture: its files, and the results of each optimizer."""
    made, config = _made(name)
    images = training.batch(2, *config['pretrained_cfg']['input_size'][1:], 3)
    row: dict[str, Any] = {'config': config, 'shapes': timm_forms.shapes(made)}
    before = _read(made, config)
    for optimizer, (make, _) in training.optimizers().items():
        (losses, after), (exact, expected) = (
            _trained(model, make, images, config)
            for model in (_made(name)[0], _made(name)[0].double())
        )
        relative = float(np.abs(np.array(losses) / np.array(exact) - 1).max())
        case = training.Case(
            lambda: None, lambda _: None, lambda _: lambda _: None, without=_WITHOUT
        )
        own = training.difference(before, after.params, expected, case)
        row[optimizer] = {
            'losses': losses,
            'updates': products(before, after.params),
            'rounding': [relative, own],
        }
    return row


def _trained(model: Any, make: Any, images: Any, config: Mapping[str, Any]) -> Any:
    made = make([p for p in model.parameters() if p.requires_grad])
    pixels, losses = training.pixels(images).to(next(model.parameters()).dtype), []
    for _ in range(training.STEPS):
        made.zero_grad()
        logits = model(pixels)
        loss = (logits - training.tensor(training.target(tuple(logits.shape)))).square().mean()
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses, _read(model, config)


def _read(model: Any, config: Mapping[str, Any]) -> TrainedModel:
    arrays = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        files.write_safetensors(folder, arrays, config)
        return interop.read(folder)


def _made(name: str) -> tuple[Any, dict[str, Any]]:
    """A small model and its config.json; the hybrid has two stages of one block."""
    if name == MIXER:
        return timm_mixer.made(), timm_mixer.CONFIG
    if name == SAM:
        return timm_sam.made(name), timm_sam.config(name)
    if name != HYBRID:
        row = json.loads(timm_forms.GOLDEN.read_text())[name]
        return timm_forms.made(name, {})[0], row['config']
    from timm.models import vision_transformer_hybrid as hybrids

    sizes = {'embed_dim': 24, 'depth': 1, 'num_heads': 6, 'img_size': _SIDE, 'num_classes': 3}
    backbone = hybrids._resnetv2((1, 1), channels=(256, 512))
    made = hybrids._create_vision_transformer_hybrid(name, backbone=backbone, **sizes)
    config = {
        'architecture': name,
        'model_args': {'embed_dim': 24},
        'pretrained_cfg': {'mean': [0.5] * 3, 'std': [0.5] * 3, 'input_size': [3, _SIDE, _SIDE]},
    }
    return timm_forms.drawn(made), config


if __name__ == '__main__':
    rows = (f'  {json.dumps(name)}: {json.dumps(asked(name))}' for name in FORMS)
    sys.stdout.write('{\n' + ',\n'.join(rows) + '\n}\n')
