"""Towers for texts of transformers, there and back: embeddings of both sides agree."""

import jax
import numpy as np
import pytest
from helpers.round_trips import anew
from helpers.transformers_models import perturbed
from helpers.transformers_texts import (
    END,
    FORMS,
    LENGTH,
    SHAPE,
    VOCAB,
    ids,
    ours,
    reference,
    theirs,
)

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')


@pytest.mark.parity
@pytest.mark.parametrize(('family', 'name', 'fields'), FORMS)
def test_embeddings_are_those_of_transformers_there_and_back(family, name, fields, tmp_path):
    model = reference(name, fields)
    model.save_pretrained(tmp_path / 'theirs')
    trained, texts = interop.read(tmp_path / 'theirs'), ids(model)
    for mine, other in zip(ours(trained, texts), theirs(model, texts), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
        assert np.std(other) > 1e-3  # the parameters matter
    assert interop.write(anew(trained), tmp_path / 'ours') == ()
    (written,) = files.read_arrays(tmp_path / 'ours')[1]['architectures']
    again, info = getattr(transformers, written).from_pretrained(
        tmp_path / 'ours', output_loading_info=True
    )
    assert not info['missing_keys'] and not info['unexpected_keys']
    np.testing.assert_allclose(theirs(again.eval(), texts)[0], theirs(model, texts)[0], atol=1e-5)


@pytest.mark.parametrize('name', ['CLIP', 'Siglip', 'MetaClip2', 'Siglip2'])
def test_the_tower_of_a_file_with_two(name, tmp_path):
    small = {key: SHAPE[key] for key in list(SHAPE)[:4]}
    vision = small | {'image_size': 8, 'patch_size': 4, 'num_patches': 4}
    config = getattr(transformers, f'{name}Config')(
        text_config=SHAPE | {'projection_size': 16}, vision_config=vision, projection_dim=5
    )
    whole = perturbed(getattr(transformers, f'{name}Model')(config))
    whole.save_pretrained(tmp_path)
    trained = interop.read(f'{tmp_path}:text')
    assert trained.model_config['name'] == 'text_encoder'
    with torch.no_grad():
        found = whole.get_text_features(torch.tensor(ids(), dtype=torch.long))
    expected = getattr(found, 'pooler_output', found)
    np.testing.assert_allclose(ours(trained, ids())[0], expected, atol=1e-5)
    assert np.std(np.asarray(expected)) > 1e-3


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp('clip')
    reference('CLIPTextModelWithProjection', {'projection_dim': 5}).save_pretrained(folder)
    return folder


def test_the_model_that_is_read(saved):
    trained = interop.read(saved)
    model = trained.model_config
    assert (model['length'], model['vocab_size'], model['eos']) == (LENGTH, VOCAB, END)
    assert (model['num_classes'], model['num_heads'], model['causal']) == (5, 4, True)
    assert trained.task_config['name'] == 'classify_text'
    assert trained.value_range() is None and trained.transforms == ''
    module, variables = vit_jax.load(saved)
    assert jax.eval_shape(module.apply, variables, ids())['logits'].shape == (5, 5)


@pytest.mark.parametrize(
    ('arrays', 'config', 'words'),
    [
        ({'text_model.final_layer_norm.bias': None}, {}, 'text_model.final_layer_norm.bias'),
        ({'text_model.more': np.zeros(1)}, {}, 'part.*more'),
        ({'text_projection.weight': np.zeros((5, 7))}, {}, ': text_projection.weight has'),
        ({}, {'model_type': 'altclip_text_model'}, "config.json .*'altclip_text_model'.*CLIP"),
        ({}, {'hidden_act': 'relu'}, 'hidden_act'),
        ({}, {'model_type': None}, 'number.*attention'),
    ],
)
def test_files_that_are_not_whole(saved, tmp_path, arrays, config, words):
    flat, extra = files.read_arrays(saved)
    flat = {name: a for name, a in (flat | arrays).items() if a is not None}
    extra = {key: value for key, value in (extra | config).items() if value is not None}
    files.write_safetensors(tmp_path, flat, extra)
    with pytest.raises(UserError, match=words) as error:
        interop.read(tmp_path)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        ({'eos': None}, 'CLIPTextModelWithProjection.*None'),
        ({'causal': False}, r'SiglipTextModel .* head_bias .* 17'),
    ],
)
def test_towers_that_transformers_lacks(saved, tmp_path, fields, words):
    trained = interop.read(saved)
    other = trained.with_groups(model=trained.model_config | fields)
    with pytest.raises(UserError, match=words):
        interop.write(other, tmp_path)
