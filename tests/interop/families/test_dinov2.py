"""DINOv2 in its authors' layout: their names on top of transformers' computation."""

import itertools
import re

import numpy as np
import pytest
from helpers.transformers_models import perturbed
from helpers.transformers_vit import ours

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')

WIDTH, DEPTH, SIZE = 128, 4, 12
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
# transformers' names, and those of facebookresearch/dinov2.
NAMES = {
    r'embeddings\.(cls_token|mask_token|register_tokens)': r'\1',
    r'embeddings\.position_embeddings': 'pos_embed',
    r'embeddings\.patch_embeddings\.projection': 'patch_embed.proj',
    r'encoder\.layer\.(\d+)\.attention\.o_proj': r'blocks.\1.attn.proj',
    r'encoder\.layer\.(\d+)\.attention': r'blocks.\1.attn',
    r'encoder\.layer\.(\d+)\.layer_scale(\d)\.lambda1': r'blocks.\1.ls\2.gamma',
    r'encoder\.layer\.(\d+)\.mlp\.down_proj': r'blocks.\1.mlp.w3',
    r'encoder\.layer\.(\d+)\.(norm\d|mlp)': r'blocks.\1.\2',
    r'layernorm': 'norm',
}
# Of layers that are one there.
JOINED = {
    'attn.qkv': ('attn.q_proj', 'attn.k_proj', 'attn.v_proj'),
    'mlp.w12': ('mlp.gate_proj', 'mlp.up_proj'),
}


def reference(registers=0, **fields):
    name = 'Dinov2WithRegisters' if registers else 'Dinov2'
    fields |= {'num_register_tokens': registers} if registers else {}
    config = getattr(transformers, f'{name}Config')(
        **{'hidden_size': WIDTH, 'num_hidden_layers': DEPTH, 'num_attention_heads': WIDTH // 64},
        **{'mlp_ratio': 2, 'image_size': SIZE, 'patch_size': 4, **fields},
    )
    return perturbed(getattr(transformers, f'{name}Model')(config))


def authors(model):
    """The arrays by the authors' names, with joined layers."""
    flat = {}
    for name, tensor in model.state_dict().items():
        for old, new in NAMES.items():
            name = re.sub(f'^{old}', new, name)
        flat[name] = tensor.numpy()
    for i, leaf in itertools.product(range(DEPTH), ('weight', 'bias')):
        for name, each in JOINED.items():
            parts = [flat.pop(f'blocks.{i}.{part}.{leaf}', None) for part in each]
            if parts[0] is not None:
                flat[f'blocks.{i}.{name}.{leaf}'] = np.concatenate(parts)
    return flat


def chunked(flat, size):
    """As with `block_chunks`: blocks.CHUNK.NUMBER, with numbers of the whole model."""
    return {
        re.sub(r'^blocks\.(\d+)', lambda m: f'blocks.{int(m[1]) // size}.{m[1]}', name): array
        for name, array in flat.items()
    }


def written(folder, flat):
    files.write_safetensors(folder / 'dinov2.safetensors', flat)
    return folder / 'dinov2.safetensors'


def read(folder, flat):
    return interop.read(written(folder, flat))


@pytest.mark.parity
@pytest.mark.parametrize('chunk', [0, 2])
@pytest.mark.parametrize(
    ('registers', 'swiglu'), [(0, False), (4, False), (4, True)], ids=['plain', 'reg', 'swiglu']
)
def test_tokens(chunk, registers, swiglu, tmp_path, images):
    model, batch = reference(registers, use_swiglu_ffn=swiglu), images(2, SIZE, SIZE, 3)
    flat = authors(model)
    imported = read(tmp_path, chunked(flat, chunk) if chunk else flat)
    assert imported.notes == () and imported.image_size == (SIZE, SIZE)
    pixels = ((np.asarray(batch) + 1) / 2 - MEAN) / STD
    with torch.no_grad():
        outputs = model(torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32)))
    found = ours(imported, batch)
    expected = outputs.last_hidden_state.numpy()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found['tokens'], expected, atol=1e-5 * scale, rtol=0)
    pooled = outputs.pooler_output.numpy()
    np.testing.assert_allclose(found['pre_logits'], pooled, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize(('registers', 'options'), [(0, 'offset'), (4, 'antialias')])
def test_positions_of_another_size(registers, options, tmp_path):
    """As in `interpolate_pos_encoding` of the authors, with the arguments of their hub."""
    flat, rows, columns = authors(reference(registers)), 5, 8
    _, variables = vit_jax.load(written(tmp_path, flat), image_size=(4 * rows, 4 * columns))
    side = SIZE // 4
    table = torch.from_numpy(flat['pos_embed'])
    grid = table[:, 1:].reshape(1, side, side, WIDTH).permute(0, 3, 1, 2)
    words = {'scale_factor': ((rows + 0.1) / side, (columns + 0.1) / side)}
    words = words if options == 'offset' else {'size': (rows, columns), 'antialias': True}
    resized = torch.nn.functional.interpolate(grid, mode='bicubic', **words)
    expected = resized.permute(0, 2, 3, 1).reshape(1, rows * columns, WIDTH).numpy()
    found = variables['params']['pos_embed']
    np.testing.assert_array_equal(found[:, :1], flat['pos_embed'][:, :1])
    np.testing.assert_allclose(found[:, 1:], expected, atol=1e-5)


def test_what_is_refused_is_named(tmp_path):
    flat = authors(reference())
    with pytest.raises(UserError, match='two chunks'):
        read(tmp_path, chunked(flat, 2) | {'blocks.1.0.norm1.weight': np.ones(WIDTH)})
    with pytest.raises(UserError, match=r'DINOv2: .* dino_head.mlp.0'):
        read(tmp_path, flat | {'dino_head.mlp.0.weight': np.ones((2, 2), np.float32)})
    del flat['blocks.2.mlp.fc1.bias']
    with pytest.raises(UserError, match=r'blocks\.2\.mlp\.fc1\.bias'):
        read(tmp_path, flat)


def test_a_teacher_of_pretraining_is_read(tmp_path):
    flat = authors(reference(4))
    state = {f'teacher.backbone.{name}': array for name, array in chunked(flat, 1).items()}
    state['teacher.dino_head.mlp.0.weight'] = np.ones((2, 2), np.float32)
    imported = read(tmp_path, state)
    assert imported.model_config['registers'] == 4 and imported.model_config['depth'] == DEPTH
    assert 'ignored: teacher.dino_head' in imported.notes[0]
