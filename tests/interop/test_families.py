"""Families are found by name: those of the folder, and a user's own."""

import importlib
import json
import sys

import numpy as np
import pytest
from helpers import doors

import vit_jax
from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.errors import UserError, modules
from vit_jax.inference import load
from vit_jax.interop import families, files
from vit_jax.interop.families import bit, transformers_vit, vision_transformer
from vit_jax.interop.trained import Written
from vit_jax.models import vit
from vit_jax.storage.model_ref import ModelRef

# The parameters by which timm's names are told.
TIMM = {'patch_embed.proj.weight': np.ones(1), 'blocks.0.norm1.weight': np.ones(1)}

OWN = """
from vit_jax.interop.trained import TrainedModel, Written

def matches(flat):
    return 'patches' in flat

def read(flat, extra):
    fields = dict(num_classes=None, patch_size=4, width=8, depth=1, mlp_dim=8, num_heads=1)
    return TrainedModel.from_file(made(flat['patches']), {'name': 'vit', **fields}, (8, 8), 'mine')

def made(kernel):
    import jax, numpy as np
    from vit_jax.models import vit
    fields = dict(num_classes=None, patch_size=4, width=8, depth=1, mlp_dim=8, num_heads=1)
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), np.float32)
    shapes = jax.eval_shape(vit.Model(**fields).init, jax.random.key(0), images)['params']
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    params['patch_embed']['kernel'] = kernel
    return params

def write(imported):
    return Written({'patches': imported.params['patch_embed']['kernel']}, None, ('the rest',))

WRITERS = {('vit', 'npz'): write}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own, `my_lab.interop.patches`."""
    folder = tmp_path / 'code' / 'my_lab' / 'interop'
    folder.mkdir(parents=True)
    (folder / 'patches.py').write_text(OWN)
    (folder / 'nothing.py').write_text('')
    monkeypatch.syspath_prepend(tmp_path / 'code')
    yield 'my_lab.interop.patches'
    for name in [name for name in sys.modules if name.startswith('my_lab')]:
        del sys.modules[name]


def imported(name):
    """A random model, as if it had been read."""
    return doors.trained(doors.MODELS[name])


def test_every_module_of_the_folder_is_a_family():
    known = {
        'bit',
        'mae',
        'transformers_swin',
        'timm_vit',
        'transformers_vit',
        'vision_transformer',
    }
    assert known <= set(modules(families.__name__))
    for name in modules(families.__name__):
        family = families.find_family(name)
        assert callable(family.matches) and callable(family.read)


def written_forms():
    """The model, the form and the family of each function of WRITERS."""
    return [
        (*key, name)
        for name in modules(families.__name__)
        for key in getattr(families.find_family(name), 'WRITERS', {})
    ]


def test_each_model_and_form_is_written_by_one_family():
    forms = [key for *key, _ in written_forms()]
    assert len(forms) == len({*map(tuple, forms)})
    assert {model for model, _ in forms} == {name.partition(' ')[0] for name in doors.MODELS}
    assert {form for _, form in forms} == set(families.FORMS)


EMBEDDING = 'embeddings.patch_embeddings.projection.weight'
PATCHES = 'embeddings.patch_embedding.weight'
BLOCK = 'encoder.layer.0'
DINOV2 = [EMBEDDING, f'{BLOCK}.norm1.weight', f'{BLOCK}.layer_scale1.lambda1']


@pytest.mark.parametrize(
    ('flat', 'family'),
    [
        (['embedding/kernel', 'Transformer/encoder_norm/scale'], 'vision_transformer'),
        (['embedding/kernel', 'Transformer/encoderblock/LayerNorm_0/bias'], 'vision_transformer'),
        (['embedding/kernel', 'conv_root/kernel', 'Transformer/x'], 'vision_transformer'),
        (['resnet/group_norm/gamma'], 'bit'),
        (['norm-pre-head/scale'], 'bit'),
        (['bit.norm.weight', 'bit.embedder.convolution.weight'], 'bit'),
        (['norm.weight', 'embedder.convolution.weight'], 'bit'),
        ([EMBEDDING, 'layers.0.layernorm_before.weight'], 'transformers_vit'),
        ([f'vit.{EMBEDDING}', 'vit.encoder.layer.0.layernorm_before.weight'], 'transformers_vit'),
        ([f'ijepa.{EMBEDDING}', 'ijepa.layers.0.layernorm_before.weight'], 'transformers_vit'),
        (DINOV2, 'transformers_dinov2'),
        (
            [f'vision_model.{name}' for name in (PATCHES, 'encoder.layers.0.layer_norm1.weight')],
            'transformers_vision_tower',
        ),
        (list(TIMM), 'timm_vit'),
    ],
)
def test_exactly_one_family_knows_each_form(flat, family):
    arrays = dict.fromkeys(flat, np.ones(1))
    found = [n for n in modules(families.__name__) if families.find_family(n).matches(arrays)]
    assert found == [family]
    assert families.reader(arrays).__name__.endswith(f'.{family}')


def test_where_several_know_a_form_one_has_to_be_named():
    both = TIMM | dict.fromkeys(['resnet/group_norm/gamma'], np.ones(1))
    with pytest.raises(UserError, match=r'timm_vit.*match.*bit:FILE'):
        families.reader(both)
    assert families.reader(both, 'bit') is bit


@pytest.mark.parametrize(
    ('text', 'parts'),
    [
        ('a.npz', ('', 'a.npz')),
        ('a.npz:img', ('', 'a.npz:img')),
        ('gs://bucket/a.npz', ('', 'gs://bucket/a.npz')),
        ('./a:b', ('', './a:b')),
        ('/runs/a:b', ('', '/runs/a:b')),
        ('timm_vit:a.safetensors', ('timm_vit', 'a.safetensors')),
        ('my_lab.swin:gs://bucket/a.npz:img', ('my_lab.swin', 'gs://bucket/a.npz:img')),
    ],
)
def test_a_family_is_named_in_front_of_the_path(text, parts):
    ref = ModelRef.parse(text)
    assert (ref.family, ref.place) == parts


def test_a_family_of_ones_own_reads_and_writes(own, tmp_path, capsys):
    kernel = np.random.default_rng(0).normal(size=(4, 4, 3, 8)).astype(np.float32)
    files.write_npz(tmp_path / 'a.npz', {'patches': kernel})
    with pytest.raises(UserError, match=r'checkpoint.*matches'):
        load.read(tmp_path / 'a.npz')
    model, variables = vit_jax.load(f'{own}:{tmp_path}/a.npz', image_size=16)
    assert isinstance(model, vit.Model)
    assert variables['params']['pos_embed'].shape == (1, 17, 8)
    np.testing.assert_array_equal(variables['params']['patch_embed']['kernel'], kernel)
    words = ['convert', f'{own}:{tmp_path}/a.npz', f'{own}:{tmp_path}/b.npz']
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert f'{tmp_path}/b.npz: written\nnote: the rest\n' in printed
    np.testing.assert_array_equal(files.read_arrays(tmp_path / 'b.npz')[0]['patches'], kernel)
    assert cli.main(words) == 2
    assert f'{tmp_path}/b.npz already exists' in capsys.readouterr().err


def test_a_family_of_ones_own_may_only_write(own, tmp_path):
    """Then nothing reads its files again, to compare how they prepare images."""
    module = importlib.import_module(own)
    files.write_npz(tmp_path / 'a.npz', {'patches': np.zeros((4, 4, 3, 8), np.float32)})
    model = interop.read(f'{own}:{tmp_path}/a.npz')
    arrays, processor = {'mine': np.ones(3, np.float32)}, {'image_processor_type': 'Mine'}
    written = Written(arrays, {'model_type': 'mine'}, ('the rest',), processor)
    module.WRITERS = {('vit', 'transformers'): lambda _: written}
    changed = model.with_groups(data={**model.config.data, 'transforms': 'resize(8)'})
    assert interop.write(changed, f'{own}:{tmp_path}/b') == ('the rest',)
    assert json.loads((tmp_path / 'b' / 'preprocessor_config.json').read_text()) == processor


def test_mistakes_are_one_line(own, tmp_path):
    path = tmp_path / 'a.npz'
    files.write_npz(path, TIMM)
    for name, message in [
        ('tim_vit', r"unknown family .* 'tim_vit'; .* 'timm_vit'"),
        ('my_lab.interop.patch', "'my_lab.interop.patch'.*imported"),
        ('my_lab.interop.nothing', 'matches.*WRITERS'),
        (own, f'matches these parameters .found .*; tried {own}'),
    ]:
        with pytest.raises(UserError, match=message) as error:
            interop.read(f'{name}:{path}')
        assert '\n' not in str(error.value)
    with pytest.raises(UserError, match=r"'swin'.*npz.*transformers"):
        interop.write(imported('swin'), tmp_path / 'a.npz')
    with pytest.raises(UserError, match=r"a 'swin' .* timm_swin only"):
        interop.write(imported('swin'), f'timm_swin:{tmp_path}/b')
    with pytest.raises(UserError, match=f'npz .*{own}'):
        interop.write(imported('bit_resnet'), f'{own}:{tmp_path}/b.npz')


def test_what_a_file_cannot_say_is_told(tmp_path):
    original = imported('vit').with_groups(task={'name': 'classify'})
    exact = original.with_groups(model=original.model_config | {'gelu': 'erf'})
    assert interop.write(original, tmp_path / 'a.npz') == ()
    losses = tuple(vision_transformer.losses(exact.model_config))
    assert interop.write(exact, tmp_path / 'b.npz') == losses
    assert interop.write(exact, tmp_path / 'folder') == ()
    assert transformers_vit.matches(files.read_arrays(tmp_path / 'folder')[0])


@pytest.mark.parametrize('kind', families.BY_TYPE)
def test_the_family_of_a_type_of_transformers_reads_it_without_the_others(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = families.find_family(families.BY_TYPE[kind])
    monkeypatch.setattr(family, 'matches', lambda flat: 'weight' in flat)
    assert families.reader({'weight': np.ones(1)}, kind=kind) is family
    with pytest.raises(UserError, match=r'checkpoint.*matches'):
        families.reader({'another': np.ones(1)}, kind=kind)
