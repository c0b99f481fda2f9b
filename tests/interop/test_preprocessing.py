"""Transforms that the files of released checkpoints give."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import doors, released, timm_images, transformers_forms, transformers_models
from helpers.messages import mentions
from helpers.round_trips import anew
from PIL import Image

import vit_jax
from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.data.plans.base import Examples
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError
from vit_jax.inference import load
from vit_jax.inference.images import photo_reader
from vit_jax.interop import files, preprocessing
from vit_jax.interop.families import detr
from vit_jax.interop.normalization import PREPROCESSOR
from vit_jax.interop.trained import TrainedModel

TIMM = {'input_size': [3, 224, 224], 'interpolation': 'bicubic', 'crop_pct': 0.9}
PILLOW = {'size': {'height': 224, 'width': 224}, 'resample': 2}
EDGE = {'size': {'shortest_edge': 256}, 'resample': 3, 'do_center_crop': True, 'crop_size': 224}


def read_transforms(extra, size):
    recipe = preprocessing.read_recipe(extra, size)
    return recipe.text if recipe else ''


TIMM_CROP = (
    "drop_alpha|resize_small(248, 'bicubic', rounding='down')"
    "|central_crop((224, 224), rounding='even')"
)
WITH_PROCESSOR = {
    row.name: row
    for row in doors.rows()
    if row.form == 'transformers' and row.model != 'text_encoder'
}
# One of each kind of processor.
KINDS_OF_PROCESSOR = (
    *('detr detr transformers', 'rf_detr rf_detr transformers', 'transformers_depth dpt'),
    *('transformers_eomt eomt transformers', 'transformers_siglip siglip transformers'),
    *('transformers_siglip2 siglip_naflex transformers', 'transformers_tips tips transformers'),
    *('transformers_tips_dpt', 'transformers_lw_detr', 'transformers_vit vit transformers'),
)
EDGE_CROP = "drop_alpha|resize_small(256, 'bicubic', rounding='down')|central_crop((224, 224))"


@pytest.mark.parametrize(
    ('extra', 'size', 'text'),
    [
        (TIMM, (224, 224), TIMM_CROP),  # timm: Resize(int(224 / 0.9)), CenterCrop(224)
        (TIMM, None, TIMM_CROP),
        (TIMM, (384, 384), TIMM_CROP),
        (
            {'interpolation': 'bilinear', 'crop_pct': 1.0},
            (384, 384),
            TIMM_CROP.replace("248, 'bicubic'", '384').replace('224', '384'),
        ),
        (
            TIMM | {'crop_pct': 1.0, 'crop_mode': 'squash'},
            (224, 224),
            "drop_alpha|resize((224, 224), 'bicubic')|central_crop((224, 224), rounding='even')",
        ),
        (TIMM | {'interpolation': 'random'}, (224, 224), ''),
        (TIMM | {'crop_pct': -1}, (224, 224), ''),
        (TIMM | {'crop_mode': 'border', 'mean': [2, 0, 0]}, (224, 224), ''),
    ],
)
def test_of_timm(extra, size, text):
    assert read_transforms({'pretrained_cfg': extra}, size) == text
    parse_transforms(text)


@pytest.mark.parametrize(
    ('extra', 'size', 'text'),
    [
        (PILLOW, (224, 224), "drop_alpha|resize((224, 224), 'bilinear')"),
        (PILLOW, (384, 384), "drop_alpha|resize((224, 224), 'bilinear')"),
        (
            PILLOW | {'size': 384, 'resample': 3},
            None,
            "drop_alpha|resize((384, 384), 'bicubic')",
        ),
        (EDGE, (518, 518), EDGE_CROP),
        (EDGE, None, EDGE_CROP),
        (PILLOW | {'resample': 5}, (224, 224), "drop_alpha|resize((224, 224), 'hamming')"),
        (PILLOW | {'resample': 6}, (224, 224), ''),
        (PILLOW | {'size': 10**6}, None, ''),
        ({'do_resize': False}, None, ''),
        (
            {'image_processor_type': 'CLIPImageProcessor', 'size': {'shortest_edge': 256}},
            (224, 224),
            EDGE_CROP,
        ),
        (
            {'image_processor_type': 'DeiTImageProcessor'},
            (12, 12),
            "drop_alpha|resize((14, 14), 'bicubic')|central_crop((12, 12))",
        ),
    ],
)
def test_of_transformers(extra, size, text):
    assert read_transforms({PREPROCESSOR: extra}, size) == text
    parse_transforms(text)


def test_of_nobody():
    assert read_transforms({}, (224, 224)) == ''


def prepared(text):
    """The function of bytes that the transforms are."""
    steps = parse_transforms(text)
    return lambda photo: steps({'image': photo}, np.random.default_rng(0))['image']


def height_width(height, width):
    return {'height': height, 'width': width}


# By processor: the keys of preprocessor_config.json; sizes are odd and even, larger than some of
# the images, and missing.
PROCESSORS = [
    ('ViT', {'size': height_width(32, 32)}),
    ('ViT', {'size': 33, 'resample': 3}),
    ('ViT', {'size': height_width(24, 37), 'resample': 1}),
    ('ViT', {'size': 33, 'resample': 0}),
    ('DeiT', {'size': height_width(37, 37), 'crop_size': height_width(32, 32)}),
    ('DeiT', {'size': 38, 'crop_size': 33, 'resample': 2}),
    ('Beit', {'size': 33}),
    ('Beit', {'size': 40, 'crop_size': 33, 'do_center_crop': True}),
    ('CLIP', {'size': {'shortest_edge': 32}, 'crop_size': height_width(32, 32)}),
    ('CLIP', {'size': 33, 'crop_size': 33}),  # of older files
    ('Siglip', {'size': height_width(33, 33)}),
    ('Siglip', {'size': height_width(33, 33), 'resample': 2}),
    ('Bit', {'size': {'shortest_edge': 37}, 'crop_size': height_width(32, 32)}),  # DINOv2's
    ('Bit', {'size': {'shortest_edge': 38}, 'crop_size': 33, 'resample': 2}),
    ('Bit', {'size': {'shortest_edge': 30}, 'crop_size': height_width(34, 37)}),  # pads
    ('Bit', {'size': {'shortest_edge': 30}, 'crop_size': height_width(33, 34), 'do_resize': False}),
    ('ConvNext', {'size': {'shortest_edge': 33}, 'crop_pct': 0.875}),
    ('ConvNext', {'size': {'shortest_edge': 33}, 'resample': 2}),
    ('ConvNext', {'size': {'shortest_edge': 384}}),
    ('Levit', {'size': {'shortest_edge': 33}, 'crop_size': height_width(33, 33)}),
]


@pytest.mark.parametrize(('kind', 'config'), PROCESSORS)
def test_every_processor_of_transformers_makes_the_same_bytes(kind, config):
    transformers = pytest.importorskip('transformers')
    made = getattr(transformers, f'{kind}ImageProcessorPil')(**config)
    raw = {'return_tensors': 'np', 'do_rescale': False, 'do_normalize': False}
    told = {'image_processor_type': f'{kind}ImageProcessor', **config}
    ours = prepared(read_transforms({PREPROCESSOR: told}, (500, 500)))
    for photo in timm_images.photos():
        theirs = made(Image.fromarray(photo), **raw)['pixel_values'][0].transpose(1, 2, 0)
        np.testing.assert_array_equal(ours(photo), theirs, err_msg=str(photo.shape))


@pytest.mark.parametrize('limits', [(30, 50), (33, 1000)])
def test_detrs_make_the_same_bytes(limits, tmp_path):
    transformers = pytest.importorskip('transformers')
    size = dict(zip(('shortest_edge', 'longest_edge'), limits, strict=True))
    raw = {'do_rescale': False, 'do_normalize': False, 'do_pad': False}
    made = transformers.DetrImageProcessorPil(size=size, **raw)
    flat, _ = files.read_arrays(released.write('detr transformers', tmp_path / 'detr'))
    ours = prepared(detr.read(flat, {PREPROCESSOR: {'size': size}}).transforms)
    for photo in timm_images.photos():
        theirs = made(Image.fromarray(photo), return_tensors='np')['pixel_values'][0]
        np.testing.assert_array_equal(ours(photo), theirs.transpose(1, 2, 0))


@pytest.fixture(scope='module')
def golden():
    """Checksums of timm's images, if this Pillow resamples as the one that they were made with."""
    found = json.loads(timm_images.GOLDEN.read_text())
    if found[timm_images.CONTROL] != timm_images.control():
        pytest.skip('this Pillow resamples otherwise')
    return found


@pytest.mark.parametrize('case', timm_images.CASES, ids=timm_images.name)
def test_timm_makes_the_same_bytes(golden, case):
    ours = prepared(read_transforms({'pretrained_cfg': case}, None))
    made = map(ours, timm_images.photos())
    assert timm_images.checksum(made) == golden[timm_images.name(case)]


@pytest.mark.parametrize('case', timm_images.CASES[::7], ids=timm_images.name)
def test_timm_itself_makes_the_same_bytes(case):
    pytest.importorskip('timm')
    ours = prepared(read_transforms({'pretrained_cfg': case}, None))
    theirs = timm_images.prepare(case)
    for photo in timm_images.photos():
        np.testing.assert_array_equal(ours(photo), theirs(photo))


@pytest.mark.parametrize('case', timm_images.CASES, ids=timm_images.name)
def test_what_timm_reads_again(case):
    is_square = case['input_size'][1] == case['input_size'][2]
    size = (224, 224) if is_square else (192, 256)
    case = case | {'input_size': [3, *size]}
    text = read_transforms({'pretrained_cfg': case}, None)
    told = preprocessing.timm_keys(text, size)
    assert told == {key: case[key] for key in told}
    assert read_transforms({'pretrained_cfg': case | told}, None) == text
    larger = case | {'input_size': [3, 2 * size[0], 2 * size[1]]}
    expected = read_transforms({'pretrained_cfg': larger}, None)
    assert preprocessing.change_size(text, (2 * size[0], 2 * size[1])) == expected


@pytest.mark.parametrize(
    ('text', 'size', 'expected'),
    [
        ("resize((224, 224), 'lanczos')", (96, 48), "resize((96, 48), 'lanczos')"),
        (
            "resize_small(256, 'bicubic')|central_crop((224, 224))|keep('image')",
            (448, 448),
            "resize_small(512, 'bicubic')|central_crop((448, 448))",
        ),
        (
            EDGE_CROP,
            (448, 448),
            "drop_alpha|resize_small(512, 'bicubic', rounding='down')|central_crop((448, 448))",
        ),
        (
            "resize((256, 512), 'bicubic')|central_crop((128, 256))",
            (64, 64),
            "resize((128, 128), 'bicubic')|central_crop((64, 64))",
        ),
        (
            "resize_small(800, 'bicubic', max=1333)",
            (64, 64),
            preprocessing.crop((64, 64), 'bicubic'),
        ),
        (
            'drop_alpha|resize_small(32)|central_crop(64, fill=0)',
            (128, 128),
            'drop_alpha|resize_small(64)|central_crop((128, 128), fill=0)',
        ),
        ('', (64, 32), preprocessing.crop((64, 32))),
        ('drop_alpha|flip', (8, 8), f'drop_alpha|{preprocessing.crop((8, 8))}'),
        ("random_resize((1, 2), method='box')|flip", (8, 8), preprocessing.crop((8, 8), 'box')),
    ],
)
def test_images_of_another_size(text, size, expected):
    assert preprocessing.change_size(text, size) == expected
    assert preprocessing.change_size(expected, size) == expected
    parse_transforms(expected)


TEXTS = [
    "resize((30, 40), 'bicubic')",
    "resize_small(40, 'bicubic', rounding='down')|central_crop((36, 36))",
    "resize((40, 50), 'lanczos')|central_crop((36, 30))",
    "resize_small(36, rounding='down')|central_crop((36, 36))",
    'central_crop((36, 36), fill=0)',
]


@pytest.mark.parametrize('text', TEXTS)
def test_transformers_makes_the_same_images(text):
    transformers = pytest.importorskip('transformers')
    told = preprocessing.preprocessor(released.trained('vit'), 3, (9, 9))
    told |= preprocessing.transformers_keys(text)
    assert read_transforms({PREPROCESSOR: told}, None) == f'drop_alpha|{text}'
    processor = getattr(transformers, told['image_processor_type'])(**told)
    for image in timm_images.photos(8):
        theirs = processor(image, return_tensors='np')['pixel_values'][0]
        ours = prepared(text)(image) / 127.5 - 1
        np.testing.assert_allclose(theirs.transpose(1, 2, 0), ours, atol=1e-5)


@pytest.mark.parametrize(
    'text',
    [
        *('', 'flip', 'random_resize((8, 9))', 'resize_small(8, max=9)', 'resize_cover((8, 9))'),
        'resize_within(9)|central_crop(9, fill=128)',
    ],
)
def test_what_transformers_cannot_do(text):
    assert preprocessing.transformers_keys(text) == {}


def test_what_is_prepared_otherwise_is_said(tmp_path):
    """Of a run, of a file whose resampling is unknown here, and of one that keeps the shape."""
    model = released.trained('vit').with_groups(
        data={
            'source': 'digits',
            'split': 'train',
            'transforms': 'resize_small(20)|central_crop(16)',
        }
    )
    (note,) = interop.write(model, tmp_path / 'a')
    assert "resize_small(20, rounding='down')" in note
    notes = interop.write(model, f'timm_vit:{tmp_path / "b"}')
    assert any("rounding='even'" in note for note in notes)
    unknown = saved(tmp_path / 'c', '', preprocessor_config=PILLOW | {'resample': 6})
    assert any('central crop' in note for note in interop.read(unknown).notes)
    hamming = interop.read(saved(tmp_path / 'e', '', preprocessor_config=PILLOW | {'resample': 5}))
    assert "'hamming'" in hamming.transforms
    whole = {'size': {'shortest_edge': 16, 'longest_edge': 30}, 'do_normalize': False}
    shaped = interop.read(saved(tmp_path / 'd', '', preprocessor_config=whole))
    assert any(mentions(note, 'keeps', 'images') for note in shaped.notes)


def saved(folder, text, **files_beside):
    """A small ViT whose images are made by these transforms."""
    model = released.trained('vit')
    data = {**model.config.data, 'transforms': text}
    interop.write(model.with_groups(data=data), folder)
    for name, content in files_beside.items():
        (folder / f'{name}.json').write_text(json.dumps(content))
    return folder


def test_a_file_and_what_is_made_of_it_have_the_same_transforms(tmp_path):
    text = "drop_alpha|resize_small(20, 'bicubic', rounding='down')|central_crop((16, 16))"
    place = saved(tmp_path / 'a', text)
    assert interop.read(place).transforms == text
    assert interop.write(anew(interop.read(place)), tmp_path / 'b') == ()
    assert interop.read(tmp_path / 'b').transforms == text
    assert load.open_model(place).transforms == text
    larger = "drop_alpha|resize_small(40, 'bicubic', rounding='down')|central_crop((32, 32))"
    assert load.open_model(place, (32, 32)).transforms == larger
    notes = interop.write(
        released.trained('vit').with_groups(
            data={'source': 'digits', 'split': 'train', 'transforms': 'random_crop(9)'}
        ),
        tmp_path / 'c',
    )
    assert 'this model with random_crop(9): predictions differ' in notes[0]


@pytest.mark.parametrize(
    'name',
    [
        *(name for name in WITH_PROCESSOR if name in KINDS_OF_PROCESSOR),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in WITH_PROCESSOR
            if name not in KINDS_OF_PROCESSOR
        ),
    ],
)
def test_files_that_prepare_images_otherwise_say_so(name, tmp_path):
    """Each kind of file, for images that are squashed, cropped or keep their shape."""
    texts = 'resize(32)', 'resize_small(32)|central_crop(32)', 'resize_small(64, max=107)'
    photo = np.random.default_rng(0).integers(0, 256, (46, 63, 3), np.uint8)
    trained = doors.trained(doors.model_of(WITH_PROCESSOR[name]))
    for n, text in enumerate(texts):
        data = {**trained.config.data, 'transforms': text}
        notes = interop.write(trained.with_groups(data=data), tmp_path / str(n))
        wanted, restored = (
            parse_transforms(each)({'image': photo}, np.random.default_rng(0))['image']
            for each in (text, interop.read(tmp_path / str(n)).transforms)
        )
        assert np.array_equal(wanted, restored) or any('prepare images' in x for x in notes), text


def test_predict_reads_images_as_the_file_says(tmp_path):
    crop = "resize_small(20, 'bicubic', rounding='down')|central_crop((16, 16))"
    place = saved(tmp_path / 'a', crop)
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    for size in (16, 32):
        trained = load.open_model(place, (size, size))
        photo = photo_reader(trained).read(tmp_path / 'a.png', (size, size))
        whole = Image.fromarray(pixels).resize(
            (28 * size // 16, 20 * size // 16), Image.Resampling.BICUBIC
        )
        top, left = (20 - 16) * size // 32, (28 - 16) * size // 32
        expected = np.asarray(whole)[top : top + size, left : left + size]
        np.testing.assert_array_equal(photo.image, expected)


@pytest.fixture(scope='module')
def dinov2(tmp_path_factory):
    """A DINOv2 for 20 x 20 pixels whose files prepare 12 x 12, and a picture with transparency."""
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('torch')
    folder = tmp_path_factory.mktemp('dinov2')
    made = transformers_forms.model(transformers_forms.Form(*_DINOV2, {'image_size': 20}))
    made.save_pretrained(folder / 'model')
    told = {'crop_size': height_width(12, 12), 'size': {'shortest_edge': 15}, 'resample': 3}
    processor = transformers.BitImageProcessorPil(**told, image_mean=[0.5] * 3, image_std=[0.4] * 3)
    processor.save_pretrained(folder / 'model')
    rng = np.random.default_rng(0)
    (folder / 'data/train/kind').mkdir(parents=True)
    photo = Image.fromarray(rng.integers(0, 256, (31, 48, 4), np.uint8))
    photo.save(folder / 'data/train/kind/photo.png')
    pixels = processor(photo.convert('RGB'), return_tensors='pt')['pixel_values']
    logits = transformers_models.theirs(made, pixels.numpy().transpose(0, 2, 3, 1)).logits
    return folder, np.asarray(logits[0])


_DINOV2 = ('DINOv2', 'Dinov2ForImageClassification', 'Dinov2Config')


@pytest.mark.slow
@pytest.mark.usefixtures('one_device')
def test_the_crop_of_the_file_is_the_size_of_the_images(dinov2, tmp_path, capsys):
    def said(*words):
        assert cli.main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    folder, logits = dinov2
    place, photo = folder / 'model', folder / 'data/train/kind/photo.png'
    expected = np.asarray(jax.nn.softmax(logits))
    (found,) = vit_jax.predict(place, [photo])
    np.testing.assert_allclose(found['probs'], expected, atol=1e-5)
    assert 'read as 12 x 12 RGB' in said('predict', '--checkpoint', place, photo, '--json')
    larger = ('--image-size', '20')
    out = said('predict', '--checkpoint', place, photo, '--json', *larger)
    assert 'read as 20 x 20 RGB' in out
    model, variables = vit_jax.load(place)
    trained = load.open_model(place)
    image = photo_reader(trained).read(photo)
    inputs = jnp.asarray(image.image[None] / 127.5 - 1, jnp.float32)
    found = jax.jit(model.apply)(variables, inputs)['logits'][0]
    np.testing.assert_allclose(found, logits, atol=1e-4)
    examples = Examples(
        open_source(f'folder:{folder}/data', 'train'), parse_transforms(trained.transforms)
    )
    np.testing.assert_array_equal(examples.read(0)['image'], image.image)
    for words, size in (((), '[12, 12, 3]'), (larger, '[20, 20, 3]')):
        assert size in said('inspect', '--checkpoint', place, *words)
    said('attention', '--checkpoint', place, photo, '--out', tmp_path / 'a.png')
    interop.write(anew(interop.read(place)), tmp_path / 'again')
    config, told = (
        json.loads((tmp_path / f'again/{name}.json').read_text())
        for name in ('config', 'preprocessor_config')
    )
    assert config['image_size'] == 20
    assert (told['size'], told['crop_size']) == ({'shortest_edge': 15}, height_width(12, 12))


def test_timm_gets_images_of_the_size_of_the_positions(tmp_path):
    place = saved(tmp_path / 'a', "resize_small(15, rounding='down')|central_crop((12, 12))")
    assert load.open_model(place).image_size == (12, 12)
    notes = interop.write(anew(interop.read(place)), f'timm_vit:{tmp_path / "timm"}')
    assert any('16 x 16 pixels' in note and '12 x 12' in note for note in notes)
    assert load.open_model(tmp_path / 'timm').image_size == (16, 16)


def test_processors_in_one_file(tmp_path):
    """processor_config.json of transformers 5 comes first."""
    told = PILLOW | {'size': 20, 'resample': 3, 'image_mean': [0.1] * 3, 'image_std': [1] * 3}
    place = saved(tmp_path / 'a', '', processor_config={'image_processor': told})
    expected = saved(tmp_path / 'b', '', preprocessor_config=told)
    one, other = interop.read(place), interop.read(expected)
    assert one.transforms == other.transforms == "drop_alpha|resize((20, 20), 'bicubic')"
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    (place / 'processor_config.json').write_text('{"image_processor": 3}')
    with pytest.raises(UserError, match=r'image_processor .* JSON object'):
        interop.read(place)


def test_timm_with_all_at_the_top_of_its_config(tmp_path):
    place = released.write('vit timm', tmp_path / 'timm')
    expected = interop.read(place)
    config = json.loads((place / 'config.json').read_text())
    (place / 'config.json').write_text(json.dumps(config | config.pop('pretrained_cfg')))
    found = interop.read(place)
    assert (found.transforms, found.notes) == (expected.transforms, expected.notes)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize('key', ['do_flip_channel_order', 'rescale_offset'])
def test_preparation_that_no_model_here_has_is_refused(key, tmp_path):
    place = saved(tmp_path / 'a', '', preprocessor_config=PILLOW | {key: True})
    with pytest.raises(UserError, match=f'{key}.*not supported'):
        interop.read(place)
    assert interop.read(place, mean=0.5, std=0.5).image_size == (16, 16)


def test_images_are_prepared_as_for_the_tasks_own_evaluation():
    """Evaluators such as a probe of patches may come first by name, and read other fields."""
    trained = TrainedModel.from_file({}, {'name': 'vit', 'num_classes': 2}, None, 'a test')
    section = {'source': 'digits', 'split': 'test'}
    probe = {**section, 'transforms': 'resize(4)', 'evaluator': 'patch_probe'}
    evals = {'patches': probe, 'test': {**section, 'transforms': 'resize(8)'}}
    assert trained.with_groups(evals=evals).transforms == 'resize(8)'
    assert trained.with_groups(evals={'patches': probe}).transforms == 'resize(4)'
