"""One tower of a file with two."""

import jax
import numpy as np
import pytest
from helpers.transformers_siglip import reference

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files, texts
from vit_jax.interop.adapt import adapt
from vit_jax.storage.model_ref import ModelRef

TWO = {
    'vision_model.embeddings.patch_embedding.weight': np.ones((8, 3, 4, 4), np.float32),
    'vision_model.encoder.layers.0.layer_norm1.weight': np.ones(8, np.float32),
    'visual_projection.weight': np.ones((4, 8), np.float32),
    'text_model.final_layer_norm.weight': np.ones(8, np.float32),
    'logit_scale': np.ones((), np.float32),
}


@pytest.mark.parametrize(
    ('path', 'expected'),
    [
        ('model.safetensors:vision', ('model.safetensors', 'vision')),
        ('hf://org/clip:text', ('hf://org/clip', 'text')),
        ('clip/', ('clip/', '')),
        ('b.npz:params', ('b.npz:params', '')),
        ('b.npz:ema', ('b.npz:ema', '')),
        ('model.safetensors:ema', ('model.safetensors', 'ema')),
        ('./vision', ('./vision', '')),
    ],
)
def test_the_end_of_a_path(path, expected):
    ref = ModelRef.parse(path)
    assert (ref.file, ref.part) == expected


@pytest.mark.parametrize(
    ('path', 'family'), [('clip:vision', ''), ('lab.mine:clip:vision', 'lab.mine'), ('a:b', 'a')]
)
def test_a_tower_is_no_family(path, family):
    assert ModelRef.parse(path).family == family


def test_the_arrays_and_the_config_of_a_tower():
    config = {'model_type': 'clip', 'vision_config': {'hidden_size': 8}, 'text_config': {}}
    flat, extra = texts.take_tower(TWO, config, 'vision')
    assert sorted(flat) == sorted(TWO)[2:]
    assert extra == {'model_type': 'clip_vision_model', 'hidden_size': 8}
    flat, extra = texts.take_tower(TWO, config, 'text')
    assert list(flat) == ['text_model.final_layer_norm.weight']
    assert extra == {'model_type': 'clip_text_model'}
    only = {name: array for name, array in TWO.items() if not name.startswith(('vision', 'visual'))}
    with pytest.raises(UserError, match=r"'vision' \(it has: logit_scale"):
        texts.take_tower(only, config, 'vision')


@pytest.mark.slow
def test_a_run_takes_the_tower_for_texts_of_a_siglip(tmp_path):
    """Named behind the file, or selected."""
    pytest.importorskip('transformers')
    reference().save_pretrained(tmp_path)
    theirs, alone = interop.read(tmp_path), interop.read(f'{tmp_path}:text')
    target = jax.tree.map(np.zeros_like, theirs.params)
    for params, select in ((theirs.params, 'text'), (alone.params, '->text')):
        found, _ = adapt(params, target, theirs.model, select=select)
        assert found.keys() == {'text'}
        jax.tree.map(np.testing.assert_array_equal, found['text'], theirs.params['text'])


def test_two_towers_are_not_read_as_one(tmp_path):
    files.write_safetensors(tmp_path / 'clip.safetensors', TWO)
    with pytest.raises(UserError, match='FILE:vision'):
        interop.read(tmp_path / 'clip.safetensors')
