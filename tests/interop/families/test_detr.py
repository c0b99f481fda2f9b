"""Checkpoints of DETR in all their namings give the same parameters."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import detr as helper
from helpers.round_trips import anew

from vit_jax import interop
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError
from vit_jax.interop import adapt, families
from vit_jax.interop.families import authors_detr, detr
from vit_jax.interop.normalization import PREPROCESSOR

COLORS = {'mean': (0.485, 0.456, 0.406), 'std': (0.229, 0.224, 0.225)}
write = detr.WRITERS['detr', 'transformers']
EXTRA = {'encoder_attention_heads': helper.HEADS}

# Names of transformers 5 -> those of the hub, and of the authors.
HUB = (
    ('model.backbone.model.', 'model.backbone.conv_encoder.model.'),
    ('.o_proj.', '.out_proj.'),
    ('.mlp.fc', '.fc'),
)
AUTHORS = (
    ('model.backbone.model.', 'backbone.0.body.'),
    ('model.encoder.', 'transformer.encoder.'),
    ('model.decoder.layernorm', 'transformer.decoder.norm'),
    ('model.decoder.', 'transformer.decoder.'),
    ('.o_proj.', '.out_proj.'),
    ('.encoder_attn.', '.multihead_attn.'),
    ('.mlp.fc', '.linear'),
    ('.self_attn_layer_norm.', '.norm1.'),
    ('.encoder_attn_layer_norm.', '.norm2.'),
    ('model.input_projection', 'input_proj'),
    ('model.query_position_embeddings', 'query_embed'),
    ('class_labels_classifier', 'class_embed'),
    ('bbox_predictor', 'bbox_embed'),
)
RESNET = (
    ('embedder.embedder.convolution.', 'conv1.'),
    ('embedder.embedder.normalization.', 'bn1.'),
    ('.shortcut.convolution.', '.downsample.0.'),
    ('.shortcut.normalization.', '.downsample.1.'),
    *((f'encoder.stages.{i}.layers.', f'layer{i + 1}.') for i in range(4)),
    *((f'.layer.{i}.convolution.', f'.conv{i + 1}.') for i in range(3)),
    *((f'.layer.{i}.normalization.', f'.bn{i + 1}.') for i in range(3)),
)


def renamed(flat, *pairs):
    def name_of(name):
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return {name_of(name): array for name, array in flat.items()}


def of_authors(flat):
    """Their names, and their packed projections."""
    named = renamed(flat, *RESNET, *AUTHORS)
    found = {}
    for name, array in named.items():
        last = 3 if 'decoder.layers' in name else 2
        name = name.replace('.final_layer_norm.', f'.norm{last}.')
        if '.q_proj.' in name:
            parts = [named[name.replace('q_proj', f'{letter}_proj')] for letter in 'qkv']
            found[name.replace('.q_proj.', '.in_proj_')] = np.concatenate(parts)
        elif '.k_proj.' not in name and '.v_proj.' not in name:
            found[name] = array
    return found


@pytest.fixture(scope='module')
def model():
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    return helper.reference()


@pytest.fixture(scope='module')
def flat(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope='module')
def expected(model):
    return helper.our_params(model)


def assert_same(params, expected):
    found, expected = (flatten_dict(p, sep='/') for p in (params, expected))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, err_msg=name)


FORMS = {
    'transformers 5': lambda flat: flat,
    'transformers 5, timm': lambda flat: renamed(flat, *RESNET),
    'the hub': lambda flat: renamed(flat, *RESNET, *HUB),
    'the authors': of_authors,
}


@pytest.mark.slow
@pytest.mark.parametrize('form', FORMS.values(), ids=FORMS)
def test_every_naming_is_read(form, flat, expected):
    theirs = form(flat)
    imported = families.reader(theirs).read(theirs, EXTRA)
    assert_same(imported.params, expected)
    assert imported.model == helper.MODEL.clone(dropout=0.1)
    assert imported.task_config == {'name': 'detect'}


PARTS = (('conv', 'lay'), ('norm', 'gn'))
MASKS = (
    *((f'.conv{i}.{part}.', f'.{ours}{i}.') for i in (1, 2) for part, ours in PARTS),
    *(
        (f'.fpn_stages.{i}.refine.{part}.', f'.{ours}{i + 3}.')
        for i in range(3)
        for part, ours in PARTS
    ),
    *((f'.fpn_stages.{i}.fpn_adapter.', f'.adapter{i + 1}.') for i in range(3)),
    *((f'.{letter}_proj.', f'.{letter}_linear.') for letter in 'qk'),
    ('.output_conv.', '.out_lay.'),
)


def panoptic_of_authors(flat):
    heads = ('mask_head.', 'bbox_attention.')
    own = {name: array for name, array in flat.items() if name.startswith(heads)}
    detector = {n.removeprefix('detr.'): a for n, a in flat.items() if n.startswith('detr.')}
    named = {f'detr.{name}': array for name, array in of_authors(detector).items()}
    return {**named, **renamed(own, *MASKS)}


@pytest.mark.slow
@pytest.mark.parametrize('form', [dict, panoptic_of_authors])
def test_every_naming_of_masks_is_read(form):
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    model = helper.panoptic_reference()
    flat = form({name: tensor.numpy() for name, tensor in model.state_dict().items()})
    imported = families.reader(flat).read(flat, {})
    assert_same(imported.params, helper.panoptic_params(model))
    assert imported.model == helper.PANOPTIC.clone(dropout=0.1)
    assert imported.task_config == {'name': 'segment_panoptic', 'stuff': ()}
    without = {
        name: array for name, array in flat.items() if '.k_' not in name or 'bbox' not in name
    }
    with pytest.raises(UserError, match='bbox_attention/key/kernel'):
        detr.read(without, {})


@pytest.mark.slow
def test_what_transformers_saves(model, expected, tmp_path):
    """A folder with config.json, whose classes have names."""
    model.config.id2label = {i: f'thing {i}' for i in range(helper.CLASSES)}
    model.save_pretrained(tmp_path)
    imported = interop.read(tmp_path)
    assert_same(imported.params, expected)
    assert imported.model_config['num_heads'] == helper.HEADS
    assert imported.class_names[4] == 'thing 4'
    # For other classes the head starts anew, and nothing else.
    other = helper.MODEL.clone(num_classes=3)
    images = jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32)
    target = jax.eval_shape(other.init, jax.random.key(0), images)['params']
    params, notes = adapt.adapt_checkpoint(imported, other, target, None)
    assert 'class_embed' not in params
    assert set(params) == set(expected) - {'class_embed'}
    assert any('class_embed' in note for note in notes)


def written_and_read(reference, kind, folder):
    """A model of transformers that went through our files, and ours before and after."""
    flat = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    imported = detr.read(flat, {'encoder_attention_heads': reference.config.num_attention_heads})
    imported = dataclasses.replace(imported, class_names=tuple('abcde'))
    notes = interop.write(anew(imported), folder)
    theirs, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values())
    again = interop.read(folder)
    assert again.model_config == {**imported.model_config, 'dropout': 0.1}
    assert again.task_config == {**imported.task_config, **COLORS}
    assert again.class_names == imported.class_names
    jax.tree.map(np.testing.assert_array_equal, again.params, imported.params)
    return theirs.eval(), notes


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['DetrForObjectDetection', 'DetrForSegmentation'])
def test_transformers_reads_what_is_written(model, kind, tmp_path):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    panoptic = kind == 'DetrForSegmentation'
    reference = helper.panoptic_reference() if panoptic else model
    found, notes = written_and_read(reference, getattr(transformers, kind), tmp_path / 'hf')
    assert [note.partition(' is')[0] for note in notes] == panoptic * ['the list of stuff classes']
    inputs = helper.tensors(helper.batch())
    with torch.no_grad():
        mine, expected = found(**inputs), reference(**inputs)
    for name in ('logits', 'pred_boxes', *panoptic * ['pred_masks']):
        np.testing.assert_allclose(mine[name], expected[name], atol=1e-5)
    told = json.loads((tmp_path / 'hf/preprocessor_config.json').read_text())
    assert told['image_processor_type'] == 'DetrImageProcessor'
    assert told['size'] == {'shortest_edge': 800, 'longest_edge': 1333}


@pytest.mark.slow
@pytest.mark.parametrize(
    'resize',
    [
        *("resize_small(24, max=40, rounding='down')", "resize_small(24, rounding='down')"),
        "resize_small(24, 'bicubic', max=40, rounding='down')",
    ],
)
def test_transformers_makes_the_images_that_a_run_gets(flat, resize):
    transformers = pytest.importorskip('transformers')
    imported = detr.read(flat, EXTRA).with_groups(
        data={
            'source': 'digits',
            'split': 'train',
            'transforms': f"keep('image', 'boxes')|{resize}|pad_objects(9)",
        },
        task={'name': 'detect', 'mean': (0.1, 0.2, 0.3), 'std': (0.5, 0.6, 0.7)},
    )
    imported = dataclasses.replace(imported, image_size=(1344, 1344))  # a run's images are padded
    written = write(imported)
    assert written.notes == ()
    told = written.preprocessor
    processor = transformers.DetrImageProcessor(**told)
    # The last one is so long that `max` tells its size.
    for height, width in ((30, 45), (45, 31), (48, 48), (30, 100), (37, 55)):
        image = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
        theirs = processor(image, return_tensors='np')['pixel_values'][0]
        ours = parse_transforms(resize)({'image': image}, np.random.default_rng(0))['image']
        ours = (ours / 255 - (0.1, 0.2, 0.3)) / (0.5, 0.6, 0.7)
        np.testing.assert_allclose(theirs.transpose(1, 2, 0), ours, atol=1e-5)
    again = detr.read(flat, {**EXTRA, 'preprocessor_config.json': told})
    assert again.transforms == f'drop_alpha|{resize}'


@pytest.mark.parametrize('is_panoptic', [False, True])
def test_the_names_of_the_authors_are_written(flat, is_panoptic):
    """Those of their files but for the counters of batch norms, in the same shapes."""
    if is_panoptic:
        reference = helper.panoptic_reference()
        flat = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    theirs = (panoptic_of_authors if is_panoptic else of_authors)(flat)
    imported = authors_detr.read(theirs, {} if is_panoptic else EXTRA)
    made = authors_detr.write(imported)
    shapes = {n: a.shape for n, a in theirs.items() if not n.endswith('num_batches_tracked')}
    assert {name: array.shape for name, array in made.arrays.items()} == shapes
    again = authors_detr.read(made.arrays, made.config)
    assert_same(again.params, imported.params)
    assert again.model_config == {**imported.model_config, 'dropout': 0.1}
    dilated = imported.with_groups(model={**imported.model_config, 'dilate': True})
    with pytest.raises(UserError, match='dilate True'):
        authors_detr.write(dilated)


def test_images_that_a_run_does_not_resize_are_kept(flat):
    imported = detr.read(flat, EXTRA).with_groups(
        data={'source': 'digits', 'split': 'train', 'transforms': 'pad_objects(9)'}
    )
    written = write(imported)
    assert not written.preprocessor['do_resize']
    extra = {**written.config, PREPROCESSOR: written.preprocessor}
    assert detr.read(written.arrays, extra).transforms == 'drop_alpha'


def test_sizes_of_images_in_older_files(flat):
    for told, expected in (
        ({'size': 600}, (600, 1333)),
        ({'size': 600, 'max_size': 900}, (600, 900)),
        ({'size': {'shortest_edge': 60, 'longest_edge': 90}, 'resample': 2}, (60, 90)),
    ):
        read = detr.read(flat, {**EXTRA, 'preprocessor_config.json': told})
        assert read.image_size == expected
        short, long = expected
        text = f"drop_alpha|resize_small({short}, max={long}, rounding='down')"
        assert read.transforms == text
    squashed = {'size': {'height': 60, 'width': 90}, 'resample': 3}
    read = detr.read(flat, {**EXTRA, 'preprocessor_config.json': squashed})
    assert (read.image_size, read.transforms) == (
        (60, 90),
        "drop_alpha|resize((60, 90), 'bicubic')",
    )


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'backbone_norm': 'group'}, r'no DETR .* ResNet'),
        ({'name': 'detr_panoptic', 'norm': 'pre'}, 'no DETR with pre-norm blocks and masks'),
        ({'dilate': True}, r'no DETR .* \(DC5\)'),
        ({'norm_eps': 1e-6}, 'no DETR with norm_eps 1e-06'),
        ({'name': 'detr_panoptic', 'mask_stride': 2}, 'masks at a stride of 2 pixels'),
        ({'name': 'detr_panoptic', 'box_maps': True}, 'no DETR with masks that use the boxes'),
        ({'name': 'detr_panoptic', 'layers': (1, 2)}, 'masks on a ResNet of 2 stages'),
    ],
)
def test_a_model_that_transformers_has_not_is_not_written(flat, change, message, tmp_path):
    imported = detr.read(flat, EXTRA)
    imported = imported.with_groups(model={**imported.model_config, **change})
    with pytest.raises(UserError, match=message):
        interop.write(imported, tmp_path / 'hf')
    assert not (tmp_path / 'hf').exists()


def test_without_a_config_dilation_is_told_to_be_unknown(flat):
    told = {'preprocessor_config.json': {'image_mean': [0.1, 0.2, 0.3], 'image_std': [1, 1, 2]}}
    for extra in ({}, told):
        assert any('DC5' in note for note in detr.read(flat, extra).notes)
    assert not detr.read(flat, {**EXTRA, **told}).notes


def test_a_resnet_alone_starts_the_backbone(flat, expected):
    resnet = {
        name.removeprefix('model.backbone.model.'): array
        for name, array in renamed(flat, *RESNET).items()
        if name.startswith('model.backbone.model.')
    }
    resnet |= {'fc.weight': np.zeros((1000, 128), np.float32), 'fc.bias': np.zeros(1000)}
    assert detr.matches(resnet)
    imported = detr.read(resnet, {})
    assert_same(imported.params, {'backbone': expected['backbone']})
    images = jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32)
    target = jax.eval_shape(helper.MODEL.init, jax.random.key(0), images)['params']
    params, _ = adapt.adapt_checkpoint(imported, helper.MODEL, target, None, select='backbone')
    assert_same(params, {'backbone': expected['backbone']})


def test_colors_are_those_that_the_files_tell(flat):
    told = {'preprocessor_config.json': {'image_mean': [0.1, 0.2, 0.3], 'image_std': [1, 1, 2]}}
    imported = detr.read(flat, {**EXTRA, **told})
    assert imported.task_config == {'name': 'detect', 'mean': (0.1, 0.2, 0.3), 'std': (1, 1, 2)}


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('model.encoder.layers.0.self_attn.k_proj.weight', 'attention/key/kernel'),
        (
            'model.backbone.model.embedder.embedder.normalization.running_var',
            'root/norm.running_var',
        ),
        ('class_labels_classifier.bias', 'class_embed/bias'),
    ],
)
def test_what_is_absent_is_named(flat, name, message):
    with pytest.raises(UserError, match=message):
        detr.read({n: a for n, a in flat.items() if n != name}, EXTRA)


def test_what_is_unknown_is_named(flat):
    with pytest.raises(UserError, match=r'no part called model\.extra'):
        detr.read({**flat, 'model.extra.weight': np.zeros(1)}, EXTRA)


@pytest.mark.parametrize(
    ('config', 'dilated'),
    [
        ({'dilation': True}, True),
        ({'dilation': False}, False),
        ({'dilation': True, 'backbone': 'resnet101', 'use_timm_backbone': True}, True),
        ({'dilation': True, 'backbone_config': {'model_type': 'timm_backbone'}}, False),
        ({'dilation': True, 'backbone_config': {'output_stride': 16}}, True),
        ({'backbone_config': {'output_stride': 8}}, 'output_stride 8'),
        ({'backbone': 'resnetblur50'}, "'resnetblur50' is not known to be a plain ResNet"),
    ],
)
def test_dilation_of_a_resnet_of_timm(flat, config, dilated):
    flat = renamed(flat, *RESNET)
    if isinstance(dilated, str):
        with pytest.raises(UserError, match=dilated):
            detr.read(flat, EXTRA | config)
    else:
        assert detr.read(flat, EXTRA | config).model_config['dilate'] == dilated
