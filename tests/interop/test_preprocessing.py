"""Transforms that the files of released checkpoints give."""

import json

import jax
import numpy as np
import pytest
from helpers import released
from PIL import Image

from vit_jax import interop
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError
from vit_jax.inference import load, predict
from vit_jax.interop import normalization, preprocessing
from vit_jax.interop.normalization import PREPROCESSOR

TIMM = {'input_size': [3, 224, 224], 'interpolation': 'bicubic', 'crop_pct': 0.9}
PILLOW = {'size': {'height': 224, 'width': 224}, 'resample': 2}
EDGE = {'size': {'shortest_edge': 256}, 'resample': 3, 'do_center_crop': True, 'crop_size': 224}


@pytest.mark.parametrize(
    ('extra', 'size', 'text'),
    [
        # timm: Resize(int(224 / 0.9)), CenterCrop(224)
        (TIMM, (224, 224), "resize_small(248, 'bicubic')|central_crop((224, 224))"),
        (TIMM, None, "resize_small(248, 'bicubic')|central_crop((224, 224))"),
        (
            TIMM | {'crop_pct': 1.0},
            (384, 384),
            "resize_small(384, 'bicubic')|central_crop((384, 384))",
        ),
        (
            TIMM | {'crop_pct': 1.0, 'crop_mode': 'squash'},
            (224, 224),
            "resize((224, 224), 'bicubic')|central_crop((224, 224))",
        ),
        (TIMM | {'interpolation': 'random'}, (224, 224), ''),
        (TIMM | {'crop_pct': -1}, (224, 224), ''),
    ],
)
def test_of_timm(extra, size, text):
    assert preprocessing.transforms({'pretrained_cfg': extra}, size) == text
    parse_transforms(text)


@pytest.mark.parametrize(
    ('extra', 'size', 'text'),
    [
        (PILLOW, (224, 224), "resize((224, 224), 'bilinear')"),
        (PILLOW | {'size': 384, 'resample': 3}, None, "resize((384, 384), 'bicubic')"),
        (EDGE, (224, 224), "resize_small(256, 'bicubic')|central_crop((224, 224))"),
        (EDGE, None, "resize_small(256, 'bicubic')|central_crop((224, 224))"),
        (PILLOW | {'resample': 5}, (224, 224), ''),
        (PILLOW | {'size': 10**6}, None, ''),
        (EDGE | {'crop_size': 300}, (300, 300), ''),  # transformers pads
        ({'do_resize': False}, None, ''),
        (
            PILLOW
            | {'size': {'height': 256, 'width': 256}, 'do_center_crop': True, 'crop_size': 224},
            (224, 224),
            "resize((256, 256), 'bilinear')|central_crop((224, 224))",
        ),
        (
            {'image_processor_type': 'CLIPImageProcessor', 'size': {'shortest_edge': 256}},
            (224, 224),
            "resize_small(256, 'bicubic')|central_crop((224, 224))",
        ),
        (
            EDGE
            | {
                'image_processor_type': 'ConvNextImageProcessor',
                'crop_pct': 0.875,
                'size': {'shortest_edge': 224},
            },
            None,
            "resize_small(256, 'bicubic')|central_crop((224, 224))",
        ),
        (
            {'image_processor_type': 'ConvNextImageProcessor', 'size': {'shortest_edge': 384}},
            None,
            "resize((384, 384), 'bicubic')",
        ),
        (
            {
                'image_processor_type': 'LevitImageProcessor',
                'size': {'shortest_edge': 224},
                'crop_size': 224,
            },
            None,
            "resize_small(256, 'bicubic')|central_crop((224, 224))",
        ),
    ],
)
def test_of_transformers(extra, size, text):
    assert preprocessing.transforms({PREPROCESSOR: extra}, size) == text
    parse_transforms(text)


def test_of_nobody():
    assert preprocessing.transforms({}, (224, 224)) == ''


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
            "resize((256, 512), 'bicubic')|central_crop((128, 256))",
            (64, 64),
            "resize((128, 128), 'bicubic')|central_crop((64, 64))",
        ),
        (
            "resize_small(800, 'bicubic', max=1333)",
            (64, 64),
            preprocessing.crop((64, 64), 'bicubic'),
        ),
        ('', (64, 32), preprocessing.crop((64, 32))),
        ("random_resize((1, 2), method='box')|flip", (8, 8), preprocessing.crop((8, 8), 'box')),
    ],
)
def test_images_of_another_size(text, size, expected):
    assert preprocessing.resized(text, size) == expected
    assert preprocessing.resized(expected, size) == expected
    parse_transforms(expected)


TEXTS = [
    "resize((30, 40), 'bicubic')",
    "resize_small(40, 'bicubic')|central_crop((36, 36))",
    "resize((40, 50), 'lanczos')|central_crop((36, 30))",
    'resize_small(36)|central_crop((36, 36))',
]


@pytest.mark.parametrize('text', TEXTS)
def test_transformers_makes_the_same_images(text):
    transformers = pytest.importorskip('transformers')
    told = normalization.preprocessor(3, (9, 9)) | preprocessing.written(text)
    assert (
        preprocessing.transforms({PREPROCESSOR: told}, None) == preprocessing.recipe_of(text).text
    )
    processor = getattr(transformers, told['image_processor_type'])(**told)
    image = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    theirs = processor(image, return_tensors='np')['pixel_values'][0]
    ours = parse_transforms(text)({'image': image}, np.random.default_rng(0))['image']
    np.testing.assert_allclose(theirs.transpose(1, 2, 0), ours / 127.5 - 1, atol=1e-5)


@pytest.mark.parametrize('text', ['', 'flip', 'random_resize((8, 9))', 'resize_small(8, max=9)'])
def test_what_transformers_cannot_do(text):
    assert preprocessing.written(text) == {}


def saved(folder, text, **files_beside):
    """A small ViT whose images are made by these transforms."""
    model = released.trained('vit')
    data = {**model.config.data, 'transforms': text}
    interop.write(model.with_groups(data=data), folder)
    for name, content in files_beside.items():
        (folder / f'{name}.json').write_text(json.dumps(content))
    return folder


def test_a_file_and_what_is_made_of_it_have_the_same_transforms(tmp_path):
    text = "resize_small(20, 'bicubic')|central_crop((16, 16))"
    place = saved(tmp_path / 'a', text)
    assert interop.read(place).transforms == text
    assert interop.write(interop.read(place), tmp_path / 'b') == ()
    assert interop.read(tmp_path / 'b').transforms == text
    assert load.open_model(place).transforms == text
    larger = "resize_small(40, 'bicubic')|central_crop((32, 32))"
    assert load.open_model(place, (32, 32)).transforms == larger
    notes = interop.write(
        released.trained('vit').with_groups(data={'transforms': 'random_crop(9)'}), tmp_path / 'c'
    )
    assert 'instead of what a run does: random_crop(9)' in notes[0]


def test_predict_reads_images_as_the_file_says(tmp_path):
    place = saved(tmp_path / 'a', "resize_small(20, 'bicubic')|central_crop((16, 16))")
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    for size in (16, 32):
        trained = load.open_model(place, (size, size))
        (photo,) = predict.read_photos(trained, [tmp_path / 'a.png'], (size, size))
        whole = Image.fromarray(pixels).resize(
            (28 * size // 16, 20 * size // 16), Image.Resampling.BICUBIC
        )
        top, left = (20 - 16) * size // 32, (28 - 16) * size // 32
        expected = np.asarray(whole)[top : top + size, left : left + size]
        np.testing.assert_array_equal(photo.image, expected)


def test_processors_in_one_file(tmp_path):
    """processor_config.json of transformers 5 comes first."""
    told = PILLOW | {'size': 20, 'resample': 3, 'image_mean': [0.1] * 3, 'image_std': [1] * 3}
    place = saved(tmp_path / 'a', '', processor_config={'image_processor': told})
    expected = saved(tmp_path / 'b', '', preprocessor_config=told)
    one, other = interop.read(place), interop.read(expected)
    assert one.transforms == other.transforms == "resize((16, 16), 'bicubic')"
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    (place / 'processor_config.json').write_text('{"image_processor": 3}')
    with pytest.raises(UserError, match='image_processor is no JSON object'):
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
def test_what_no_model_here_folds_is_refused(key, tmp_path):
    place = saved(tmp_path / 'a', '', preprocessor_config=PILLOW | {key: True})
    with pytest.raises(UserError, match=f'{key}, which is not supported: give mean and std'):
        interop.read(place)
    assert interop.read(place, mean=0.5, std=0.5).image_size == (16, 16)
