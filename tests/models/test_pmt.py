"""PMT: outputs, loss and gradients of the authors' code, files, and what the encoder is spared.

`golden/pmt.npz` has random weights of a tiny model by the names of github.com/tue-mps/pmt (54d73c9)
and what its code computes with them: outputs, those with masked attention in training, running
statistics after it, the loss at the points that ours draws, and gradients.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import eomt as helper
from helpers.pictures import drawn, images_like
from safetensors.numpy import load_file

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files, names
from vit_jax.interop.families import authors_pmt
from vit_jax.models import vit
from vit_jax.models.eomt import ENCODER
from vit_jax.models.pmt import Model
from vit_jax.ops import terms

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'pmt.npz'
VIT = {'patch_size': 4, 'width': 16, 'depth': 3, 'mlp_dim': 24, 'num_heads': 2, 'registers': 1}
MODEL = Model(num_classes=3, **VIT, posemb='sincos2d', num_queries=4, query_blocks=2, upscale=1)
CONFIG = {
    'encoder_config': {'num_attention_heads': 2, 'pos_embed_rescale': 2.0},
    **{'interaction_indices': [0, 1], 'image_size': [16, 12]},
}
RNGS = {'mask': jax.random.key(0), 'dropout': jax.random.key(0)}


@pytest.fixture(scope='module')
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


def state_of(golden, key='state'):
    """The arrays of a vector by the authors' names; gradients are those of the decoder."""
    state, vector = {}, golden[key]
    for name, text in zip(golden['names'], golden['shapes'], strict=True):
        shape = tuple(map(int, filter(None, text.split(','))))
        if key == 'grads' and ('encoder' in name or 'running' in name or 'probs' in name):
            continue
        state[str(name)], vector = np.split(vector, [np.prod(shape, dtype=int)])
        state[str(name)] = state[str(name)].reshape(shape)
    assert not vector.size
    return state


@pytest.fixture(scope='module')
def folder(golden, tmp_path_factory):
    path = tmp_path_factory.mktemp('pmt') / 'theirs'
    files.write_safetensors(path, state_of(golden), CONFIG)
    return path


@pytest.mark.slow
def test_outputs_loss_and_gradients_are_those_of_the_authors(golden, folder):
    trained = interop.read(folder)
    task = dataclasses.replace(trained.task, points=helper.POINTS)
    data = {key: jnp.asarray(golden[key]) for key in ('image', 'labels', 'object_mask', 'segments')}
    (images,) = task.inputs(data)

    def call(params, train, **options):
        variables = {**trained.variables, 'params': params}
        options |= {'mutable': ['batch_stats']} if train else {}
        return trained.model.apply(variables, images, train, rngs=RNGS, **options)

    def loss(params):
        outputs, state = call(params, True, mask_probs=jnp.ones(2))
        found = task.loss({**outputs, 'keys': jnp.asarray(golden['keys'])}, data)
        return terms.total(found, terms.means(found)), (outputs, state['batch_stats'])

    @jax.jit
    def run(params):
        trains = jax.value_and_grad(loss, has_aux=True)(params)
        return trains, call(params, False)

    with jax.default_matmul_precision('highest'):
        ((value, (train, stats)), grads), plain = jax.device_get(run(trained.params))
    for kind, found in (('plain', plain), ('train', train)):
        for key, atol in (('logits', 1e-5), ('masks', 2e-5)):
            outputs = found[key][:, None]
            if kind != 'plain':
                outputs = np.concatenate([found[f'aux_{key}'], outputs], axis=1)
            np.testing.assert_allclose(outputs, golden[f'{kind}/{key}'], atol=atol)
    assert value == pytest.approx(golden['loss'], rel=1e-5)
    for name, divisor in (('mean', 1), ('var', 27 / 28)):  # torch's running variance is unbiased
        old = np.stack(
            [trained.collections['batch_stats'][f'lateral_{i}']['norm'][name] for i in (0, 1)]
        )
        new = np.stack([stats[f'lateral_{i}']['norm'][name] for i in (0, 1)])
        np.testing.assert_allclose(
            (new - 0.9 * old) / divisor, golden[f'train/{name}'] - 0.9 * old, atol=1e-6
        )
    theirs = {name.removeprefix('network.'): x for name, x in state_of(golden, 'grads').items()}
    expected = authors_pmt.read_decoder(theirs, 2)
    decoder = {name: tree for name, tree in grads.items() if name not in ENCODER}
    found = names.flatten(decoder, 'key')
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        scale = np.abs(array).max()
        np.testing.assert_allclose(found[name], array, atol=2e-5 * max(scale, 1), err_msg=name)
    assert not any(
        np.any(x)
        for name, x in flatten_dict(grads, sep='/').items()
        if name.split('/')[0] in ENCODER
    )


def test_files_are_read_and_written_bit_for_bit(golden, folder, tmp_path):
    trained = interop.read(folder)
    assert (trained.image_size, trained.notes) == ((16, 12), ())
    assert trained.task.normalization == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert trained.model.map_layers == (1, 2) and trained.task.kind == 'instance'
    changed = dataclasses.replace(trained, origin='')  # not copied
    assert interop.write(changed, tmp_path / 'ours') == ()
    before, after = state_of(golden), load_file(tmp_path / 'ours' / 'model.safetensors')
    assert before.keys() == after.keys()
    for name, array in before.items():
        if 'attn_mask_probs' not in name:  # of training
            np.testing.assert_array_equal(after[name], array, err_msg=name)
    again = interop.read(tmp_path / 'ours')
    assert again.model_config == trained.model_config
    assert again.task_config == trained.task_config and again.transforms == trained.transforms
    shifted = jax.tree.map(lambda x: x + 1, trained.collections)  # the original is no copy of it
    interop.write(dataclasses.replace(trained, collections=shifted), tmp_path / 'shifted')
    again = interop.read(tmp_path / 'shifted')
    assert shifted and jax.tree.all(jax.tree.map(np.array_equal, again.collections, shifted))


def test_the_encoder_may_be_another_file(golden, folder, tmp_path):
    """As with the authors' own files, which hold the decoder alone."""
    whole = interop.read(folder)
    alone = {name: x for name, x in state_of(golden).items() if 'encoder' not in name}
    files.write_safetensors(tmp_path / 'decoder', alone, {})
    with pytest.raises(UserError, match=r'config\.json.*encoder'):
        interop.read(tmp_path / 'decoder')
    encoder = {name: x for name, x in whole.params.items() if name in ENCODER}
    part = dataclasses.replace(whole, params=encoder, collections={}, origin='').with_groups(
        model=whole.model.transferable()[0],
        task={'name': 'classify', 'mean': (0.1, 0.2, 0.3), 'std': (0.4, 0.5, 0.6)},
    )
    interop.write(part, tmp_path / 'vit')
    config = {key: x for key, x in CONFIG.items() if key != 'encoder_config'}
    for name, told in (
        ('decoder', {'encoder': str(tmp_path / 'vit')}),
        ('fewer', {'encoder': str(tmp_path / 'vit'), 'interaction_indices': [1]}),
    ):
        files.write_safetensors(tmp_path / name, alone, config | told)
    found = interop.read(tmp_path / 'decoder')
    assert found.model_config == whole.model_config
    assert found.task.normalization == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    equal = jax.tree.map(np.array_equal, found.variables, whole.variables)
    assert all(jax.tree.leaves(equal))
    with pytest.raises(UserError, match='interaction_indices'):
        interop.read(tmp_path / 'fewer')


# Of the authors' decoder with 200 queries and 133 classes.
TOTALS = {'S': 7_692_038, 'B': 30_424_454, 'L': 53_935_238}


@pytest.mark.parametrize(
    'size', [name if name == 'S' else pytest.param(name, marks=pytest.mark.long) for name in TOTALS]
)
def test_exact_parameter_counts(size):
    model = Model(num_classes=133, **vit.variant(f'{size}/16'), posemb='none')
    images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)['params']
    decoder = {name: tree for name, tree in params.items() if name not in ENCODER}
    assert sum(x.size for x in jax.tree.leaves(decoder)) == TOTALS[size]


@pytest.mark.long
@pytest.mark.slow
def test_positions_of_the_decoder_are_rescaled_in_training():
    """Those of a ViT without rotary positions; the ViT's own never change."""
    images = images_like(2, 12, 16, 3)
    plain = dataclasses.replace(MODEL, map_norm='none')
    rotary = dataclasses.replace(plain, posemb='none', positions='rope_dinov3(rescale=2.0)')
    for model, changes in ((plain, True), (rotary, False)):
        params = drawn(model, images)
        apply = jax.jit(model.apply, static_argnums=2)
        first, second = (
            apply({'params': params}, images, True, rngs={'dropout': jax.random.key(i)})['masks']
            for i in (0, 1)
        )
        assert (np.abs(first - second).max() > 1e-4) == changes, model.positions


@pytest.mark.long
@pytest.mark.slow
def test_attention_of_the_encoder_and_of_queries():
    images = images_like(1, 12, 16, 3)
    variables = jax.jit(MODEL.init)(jax.random.key(0), images)
    _, kept = jax.jit(lambda v: MODEL.apply(v, images, mutable=['intermediates']))(variables)
    maps = MODEL.attention_maps(kept['intermediates'], images)
    assert [m.name for m in maps] == [
        *(f'encoder/block_{i}' for i in range(3)),
        *(f'{kind}/block_{i}' for kind in ('joint',) for i in (0, 1)),
        *(f'{kind}/block_{i}/cross' for kind in ('masked', 'queries') for i in (0, 1)),
    ]
    assert maps[0].weights.shape[-1] == 2 + 12 and maps[3].weights.shape[-1] == 2 + 4 + 12
    states = MODEL.hidden_states(variables, images)[1]
    assert [state.prefix for state in states] == [2] * 4


def test_part_of_it_is_a_vit():
    fields, parts = MODEL.transferable()
    assert fields['name'] == 'vit' and fields.keys().isdisjoint({'maps', 'query_blocks'})
    assert set(parts) <= set(ENCODER)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'maps': (2, 1, 3)}, r'maps.*depth=3'),
        ({'maps': (1, 2)}, r'maps.*depth=3'),
        ({'map_norm': 'layer'}, 'map_norm'),
        ({'decoder_mlp_dim': 0}, 'decoder_mlp_dim'),
        ({'query_blocks': 0}, 'query_blocks'),
        ({'scan': True}, 'a PMT.*scan'),
    ],
)
def test_it_refuses_fields_without_effect(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(MODEL, **change)


def test_the_decoder_may_be_deeper_than_the_encoder():
    assert dataclasses.replace(MODEL, query_blocks=6).query_blocks > MODEL.depth
