"""Transforms of images, and the text they are read from."""

import hashlib
import importlib
import pickle
import pkgutil
import sys
import types

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.records import example_rng
from vit_jax.data.transforms import (
    parse_transforms,
    registry,
    transform,
    without_annotations,
)
from vit_jax.errors import UserError


def picture(height=12, width=16, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def apply(spec, image, example=0):
    record = {'image': image, 'label': 3}
    before = image.copy()
    out = parse_transforms(spec)(record, example_rng(0, example))
    np.testing.assert_array_equal(image, before, err_msg='changed in place')
    assert out['label'] == 3
    return out['image']


# -- what each does ------------------------------------------------------------------------------


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('method', ['nearest', 'box', 'bilinear', 'bicubic', 'lanczos', 'hamming'])
def test_resize_is_pillows(channels, method):
    image = picture(channels=channels)
    resized = apply(f'resize((5, 7), {method!r})', image)
    assert resized.shape == (5, 7, channels)
    expected = Image.fromarray(image.squeeze()).resize((7, 5), Image.Resampling[method.upper()])
    np.testing.assert_array_equal(resized.squeeze(), np.asarray(expected))


def test_resize_to_a_square():
    assert apply('resize(9)', picture()).shape == (9, 9, 3)


@pytest.mark.parametrize(
    ('shape', 'expected'), [((12, 16), (6, 8)), ((16, 12), (8, 6)), ((10, 10), (6, 6))]
)
def test_resize_small_keeps_the_aspect_ratio(shape, expected):
    assert apply('resize_small(6)', picture(*shape)).shape == (*expected, 3)


@pytest.mark.parametrize(
    ('shape', 'nearest', 'down'),
    [
        ((30, 50), (11, 18), (11, 18)),
        ((31, 50), (11, 18), (11, 17)),
        ((50, 31), (18, 11), (17, 11)),
    ],
)
def test_resize_small_rounds_the_longer_side(shape, nearest, down):
    assert apply('resize_small(11)', picture(*shape)).shape[:2] == nearest
    assert apply("resize_small(11, rounding='down')", picture(*shape)).shape[:2] == down


def test_resize_small_down_keeps_the_longest_side():
    spec = "resize_small(20, max=30, rounding='down')"
    assert apply(spec, picture(12, 40)).shape == (9, 30, 3)
    assert apply(spec, picture(20, 30)).shape == (20, 30, 3)


@pytest.mark.parametrize(
    ('shape', 'cover', 'within'),
    [((30, 50), (10, 17), (10, 16)), ((50, 30), (27, 16), (12, 7)), ((9, 9), (16, 16), (12, 12))],
)
def test_rectangles_keep_the_aspect_ratio(shape, cover, within):
    size = {'cover': (10, 16), 'within': (12, 16)}
    for name, expected in (('cover', cover), ('within', within)):
        found = apply(f"resize_{name}({size[name]}, 'bicubic')", picture(*shape))
        assert found.shape[:2] == expected


def test_central_crop_rounds_half_a_pixel():
    """torchvision rounds the offsets 1.5 and 2.5 to 2."""
    for spare, even in ((1, 0), (2, 1), (3, 2), (5, 2)):
        image = picture(8 + spare, 8)
        found = apply("central_crop(8, rounding='even')", image)
        np.testing.assert_array_equal(found, image[even : even + 8])
        np.testing.assert_array_equal(
            apply('central_crop(8)', image), image[spare // 2 : spare // 2 + 8]
        )


@pytest.mark.parametrize(('rounding', 'top'), [('down', 2), ('even', 1)])
def test_central_crop_pads(rounding, top):
    """transformers has the odd row above the image, torchvision below."""
    image = picture(9, 16)
    found = apply(f'central_crop(12, {rounding!r}, fill=(1, 2, 3))', image)
    np.testing.assert_array_equal(found[top : top + 9], image[:, 2:14])
    outside = np.delete(found, slice(top, top + 9), axis=0)
    np.testing.assert_array_equal(outside, np.broadcast_to([1, 2, 3], outside.shape))
    with pytest.raises(UserError, match='3 values, the image 1 channels'):
        apply('central_crop(20, fill=(1, 2, 3))', picture(channels=1))


def test_boxes_follow_a_crop_that_pads():
    record = {'image': picture(9, 16), 'boxes': np.array([[3, 1, 20, 5]], np.float32)}
    made = parse_transforms('central_crop(12, fill=7)')(record, example_rng(0, 0))
    np.testing.assert_array_equal(made['boxes'], [[1, 3, 12, 7]])


def test_drop_alpha_concerns_decoding_alone():
    image = picture()
    np.testing.assert_array_equal(apply('drop_alpha', image), image)
    assert parse_transforms('flip|drop_alpha').drops_alpha
    assert not parse_transforms('flip').drops_alpha


def test_central_crop():
    image = picture(12, 17)
    np.testing.assert_array_equal(apply('central_crop(8)', image), image[2:10, 4:12])
    np.testing.assert_array_equal(apply('central_crop((12, 3))', image), image[:, 7:10])
    with pytest.raises(UserError, match=r'has 17 x 12 pixels.*resize_small\(13\)'):
        apply('central_crop(13)', image)


def test_flip_is_a_mirror_half_of_the_time():
    image = picture()
    flipped = 0
    for i in range(400):
        out = apply('flip', image, i)
        if not np.array_equal(out, image):
            np.testing.assert_array_equal(out, image[:, ::-1])
            flipped += 1
    assert 160 < flipped < 240


def test_pad_and_crop_visits_every_offset():
    image = picture(5, 6)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    windows = {padded[y : y + 5, x : x + 6].tobytes(): (y, x) for y in range(5) for x in range(5)}
    seen = [windows[apply('pad_and_crop(2)', image, i).tobytes()] for i in range(500)]
    assert set(seen) == set(windows.values())


def test_random_crop_visits_every_window():
    image = picture(5, 6)
    windows = {image[y : y + 3, x : x + 5].tobytes(): (y, x) for y in range(3) for x in range(2)}
    seen = [windows[apply('random_crop((3, 5))', image, i).tobytes()] for i in range(200)]
    assert set(seen) == set(windows.values())
    np.testing.assert_array_equal(apply('random_crop((5, 6))', image), image)
    with pytest.raises(UserError, match=r'random_crop\(6\): .* 6 x 5 pixels'):
        apply('random_crop(6)', image)


def coordinates(height, width):
    """An image that shows where each pixel came from."""
    ys, xs = np.mgrid[:height, :width]
    return np.stack([ys, xs, 0 * xs], -1).astype(np.uint8)


def test_inception_crop_takes_boxes_of_the_stated_area_and_ratio():
    height, width = 100, 150
    shares, ratios = [], []
    for i in range(400):
        out = apply('inception_crop(60, 8, 100)', coordinates(height, width), i)
        assert out.shape == (60, 60, 3)
        # Interpolated coordinates give the box to about a pixel.
        h = (int(out[-1, 0, 0]) - int(out[0, 0, 0])) * 60 / 59 + 1
        w = (int(out[0, -1, 1]) - int(out[0, 0, 1])) * 60 / 59 + 1
        shares.append(h * w / (height * width))
        ratios.append(w / h)
    assert 0.05 < min(shares) < 0.15
    assert 0.85 < max(shares) < 1.1
    assert 0.65 < min(ratios) < 0.8
    assert 1.2 < max(ratios) < 1.6


@pytest.mark.parametrize('shape', [(4, 400), (400, 4)])
def test_inception_crop_of_extreme_shapes_takes_the_middle(shape):
    """No box of 90 percent of the area has a ratio of at most 4/3."""
    image = np.zeros((*shape, 3), np.uint8)
    middle = tuple(slice(max(0, side // 2 - 4), side // 2 + 4) for side in shape)
    image[middle] = 255
    np.testing.assert_array_equal(apply('inception_crop(8, 90)', image), 255)


def test_inception_crop_of_one_pixel():
    np.testing.assert_array_equal(apply('inception_crop(8)', np.full((1, 1, 3), 9, np.uint8)), 9)


def test_random_erasing():
    image = np.full((40, 50, 3), 7, np.uint8)
    erased, shares = 0, []
    for i in range(300):
        changed = (apply('random_erasing(0.5)', image, i) != image).any(-1)
        if changed.any():
            erased += 1
            ys, xs = np.nonzero(changed)
            box = changed[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
            assert box.mean() > 0.95  # a byte is 7 by chance once in 256
            shares.append(box.size / changed.size)
    assert 115 < erased < 185
    assert 0.01 < min(shares) < 0.06
    assert 0.25 < max(shares) < 0.36
    assert len(set(shares)) > 30


def test_random_erasing_probabilities():
    image = picture()
    assert all(np.array_equal(apply('random_erasing(0)', image, i), image) for i in range(50))
    changed = [not np.array_equal(apply('random_erasing(p=1)', image, i), image) for i in range(50)]
    assert all(changed)


def test_value_range():
    image = np.array([[[0, 255, 51]]], np.uint8)
    out = apply('value_range(-1, 1)', image)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, [[[-1, 1, -0.6]]], atol=1e-6)


def test_bytes_are_needed_before_value_range():
    with pytest.raises(UserError, match='put value_range last'):
        apply('value_range(0, 1)|resize(4)', picture())


def test_keep():
    record = {'image': picture(), 'label': 1, 'id': 7}
    kept = parse_transforms("keep('image', 'label')")(record, example_rng(0, 0))
    assert set(kept) == {'image', 'label'}


# -- runs can be reproduced -----------------------------------------------------------------------

# Of the pixels that each gave before it acted on records, when it was a function of the image.
DIGESTS = {
    'resize((9, 14))': 'ed029f7c6ad28605',
    "resize(20, 'bicubic')": '414b68cd0a9b4aa4',
    'resize_small(7)': '0c16a3e1eaff1010',
    'resize_small(25)': '00520cc1e5500090',
    'central_crop(8)': '4b59791aa320e294',
    'random_crop((8, 11))': '86d1b23e159c99f3',
    'inception_crop(10)': '8c673ac1baa264bb',
    "inception_crop((6, 9), 30, 80, 'lanczos')": '86e6e6295d8f6a6a',
    'pad_and_crop(3)': '64bb5446d016d002',
    'flip': '15e99ecb08a34b74',
    'random_erasing(0.7)': '145f85f2e862990e',
    'randaugment(2, 0)': 'fc778f081ec08c2a',
    'randaugment(2, 10)': '95b773c26fa7db7f',
    'randaugment(3, 20, translate=9, cutout=4)': '53fcfb7df1dd8727',
    'randaugment(4, 30)': '3c9fa96554ea107c',
    'value_range(-1, 1)': 'fc543b26d35838e9',
    'resize(16)|pad_and_crop(2)|flip|randaugment(2, 9, 5, 3)|inception_crop(9)': 'c8ddef75907d3b5c',
}


@pytest.mark.parametrize('spec', DIGESTS)
def test_pixels_are_those_of_earlier_runs(spec):
    transforms, digest = parse_transforms(spec), hashlib.sha256()
    for shape in ((12, 17, 3), (19, 13, 1)):
        image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        for example in range(40):
            out = transforms({'image': image, 'label': 3}, example_rng(7, example))['image']
            digest.update(f'{out.shape} {out.dtype}'.encode() + out.tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[spec]


# -- the text ------------------------------------------------------------------------------------


def test_order_is_that_of_the_text():
    assert apply('resize(8)|central_crop(4)', picture()).shape == (4, 4, 3)
    assert apply(' resize( size = 8 ) | resize_small(4)\n', picture()).shape == (4, 4, 3)


def test_nothing_is_the_identity():
    image = picture()
    assert apply('', image) is image
    assert apply('  ', image) is image


@pytest.mark.parametrize(
    ('spec', 'random'),
    [('', False), ('resize(8)|central_crop(4)', False), ('resize(8)|flip', True)],
)
def test_random_says_whether_anything_is_drawn(spec, random):
    assert parse_transforms(spec).random is random


EXAMPLES = {
    'central_crop': '(4)',
    'flip': '',
    'inception_crop': '(8)',
    'inception_crop_tf': '(8)',
    'keep': "('image', 'label')",
    'pad_and_crop': '(2)',
    'random_crop': '(8)',
    'random_erasing': '()',
    'random_resize': '((5, 6, 7, 8))',
    'randaugment': '(2, 10)',
    'resize': '(8)',
    'resize_small': '(8)',
    'resize_small_tf': '(8)',
    'resize_tf': '(8)',
    'value_range': '(-1, 1)',
}


@pytest.mark.parametrize('name', EXAMPLES)
@pytest.mark.parametrize('channels', [1, 3])
def test_each_is_a_function_of_image_and_key(name, channels):
    image = picture(channels=channels)
    spec = name + EXAMPLES[name]
    first = apply(spec, image, 5)
    assert first.ndim == 3
    assert first.shape[2] == channels
    np.testing.assert_array_equal(apply(spec, image, 5), first)
    if parse_transforms(spec).random:
        assert any(not np.array_equal(apply(spec, image, i), first) for i in range(6, 40))


def test_travels_to_other_processes():
    transforms = pickle.loads(pickle.dumps(parse_transforms('pad_and_crop(2)|flip')))
    record = {'image': picture(), 'label': 0}
    np.testing.assert_array_equal(
        transforms(record, example_rng(0, 1))['image'],
        apply('pad_and_crop(2)|flip', record['image'], 1),
    )


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        ('flop', r"'flop': unknown transform 'flop'; .* 'flip'"),
        ('flip|', 'write for example'),
        ('resize(8', 'write for example'),
        ('resize', "'resize'.*'size'"),
        ('resize(8, 9, 10)', 'too many positional arguments'),
        ('resize(8, metod="box")', "unexpected keyword argument 'metod'"),
        ('resize(8, method="cubic")', "method='cubic'"),
        ('resize(0)', 'height=0'),
        ("resize_small(8, rounding='up')", "rounding 'up'"),
        ("central_crop(8, rounding='nearest')", "rounding 'nearest'"),
        ('central_crop(8, fill=256)', 'fill=256'),
        ('central_crop(8, fill=(1, -1, 2))', 'byte.*tuple'),
        ('resize(8.5)', 'height=8.5'),
        ('resize((8, 8, 3))', 'integer.*height'),
        ('resize("8")', 'positive.*integer'),
        ('resize(True)', 'positive.*integer'),
        ('resize(open)', 'numbers.*strings'),
        ('resize(__import__("os").getpid())', 'plain.*numbers'),
        ('resize(*(8, 8))', 'plain.*numbers'),
        ('resize(**{"size": 8})', 'plain.*numbers'),
        ('pad_and_crop(-4)', 'pad=-4'),
        ('inception_crop(8, 50, 20)', 'must be percentages'),
        ('inception_crop(8, 0.5, 200)', 'must be percentages'),
        ('random_erasing(1.5)', r'must be in \[0, 1\]'),
        ('randaugment(0, 10)', 'num_layers=0'),
        ('randaugment(2, -1)', r'magnitude=-1 .* 0'),
        ('value_range(1, 0)', r'low=1 .* high=0'),
        ('keep()', 'fields'),
        ('3|flip', "unknown transform '3'"),
        ('no_such_lab.crop(3)', "cannot import 'no_such_lab.crop'"),
        ('math.no_such(3)', "cannot import 'math.no_such'"),
        ('math.pi', "'math.pi'.*transform"),
        ('random_resize(8)', 'sizes=8'),
        ('random_resize((8, 0))', 'size=0'),
        ('resize_small(8, max=0)', 'max=0'),
        ('pad_objects(0)', 'count=0'),
    ],
)
def test_mistakes_are_one_line(spec, message):
    with pytest.raises(UserError, match=message) as error:
        parse_transforms(spec)
    assert '\n' not in str(error.value)
    assert repr(spec) in str(error.value)


# -- which functions a config may name -----------------------------------------------------------


def test_plain_names_are_the_marked_functions_of_the_package():
    modules = registry.modules()
    assert set(modules) >= {*EXAMPLES, 'lower', 'pad_objects', 'swap', 'tokenize'}
    assert not {'transform', 'find', 'parse_transforms', 'to_pillow'} & set(modules)
    for name, module in modules.items():
        factory = registry.find_function(name)
        assert registry.find_function(f'{module}.{name}') is factory
        assert factory.__doc__
    for info in pkgutil.iter_modules(importlib.import_module(registry.PACKAGE).__path__):
        module = importlib.import_module(f'{registry.PACKAGE}.{info.name}')
        for name, value in vars(module).items():
            if registry.is_marked(value, registry.TRANSFORM):
                assert modules[name] == value.__module__


def test_a_new_module_needs_no_table(tmp_path, monkeypatch):
    import vit_jax.data.transforms as package

    (tmp_path / 'halves.py').write_text(
        'from vit_jax.data.transforms import transform\n\n'
        '@transform\ndef halve():\n    return lambda image: image // 2\n'
    )
    monkeypatch.setattr(package, '__path__', [*package.__path__, str(tmp_path)])
    registry.modules.cache_clear()
    try:
        np.testing.assert_array_equal(apply('halve', picture()), picture() // 2)
    finally:
        registry.modules.cache_clear()
        sys.modules.pop('vit_jax.data.transforms.halves')


def test_former_names_of_marks_are_kept_for_outside_modules():
    from vit_jax.data.transforms import of_annotations, of_texts

    factory = of_texts(lambda: None)
    assert registry.is_marked(factory, registry.TEXTS)
    assert registry.is_marked(factory, registry.ANNOTATIONS)
    factory = of_annotations(lambda: None)
    assert registry.is_marked(factory, registry.ANNOTATIONS)
    assert not registry.is_marked(factory, registry.TEXTS)


@pytest.mark.parametrize('spec', ["os.system('touch {}')", "pathlib.Path('{}').touch()"])
def test_nothing_unmarked_is_called(tmp_path, spec):
    with pytest.raises(UserError) as error:
        parse_transforms(spec.format(tmp_path / 'called'))
    assert not list(tmp_path.iterdir())
    assert '\n' not in str(error.value)


def test_refusal_says_how_to_mark():
    with pytest.raises(UserError, match=r"'os\.system'.*transform"):
        parse_transforms("os.system('true')")


@pytest.fixture
def my_lab(monkeypatch):
    module = types.ModuleType('my_lab')

    @transform
    def brighten(by):
        return lambda image: np.minimum(image.astype(int) + by, 255).astype(np.uint8)

    @transform
    def noise(scale, name='noise'):
        return lambda record, rng: {**record, name: rng.normal(0, scale)}

    @transform
    def halve():
        return lambda image, rng: image[::2, ::2]

    @transform
    def nothing():
        return lambda pixels: pixels

    for function in (brighten, noise, halve, nothing):
        setattr(module, function.__name__, function)
    module.unmarked = lambda: lambda image: image
    monkeypatch.setitem(sys.modules, 'my_lab', module)


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        ('my_lab.unmarked', r"'my_lab\.unmarked'.*transform"),
        ('my_lab.nothing', 'return.*function'),
    ],
)
def test_dotted_names_that_are_refused(my_lab, spec, message):
    with pytest.raises(UserError, match=message):
        parse_transforms(spec)


@pytest.mark.parametrize('name', ['boxes', 'masks', 'points', 'depth'])
def test_a_function_of_the_image_leaves_pixels_in_place(my_lab, name):
    """What lies in the image would not follow it to another size."""
    record = {'image': picture(), 'label': 1, name: np.zeros((0, 4))}
    assert parse_transforms('my_lab.brighten(9)')(record, example_rng(0, 0))[name] is record[name]
    message = f"my_lab.halve: .*size.*'{name}'; .* keep"
    with pytest.raises(UserError, match=message):
        parse_transforms('my_lab.halve')(record, example_rng(0, 0))
    assert apply('my_lab.halve', picture()).shape == (6, 8, 3)


def test_dotted_names_are_the_users_own(my_lab):
    image = picture()
    expected = np.minimum(image.astype(int) + 9, 255)
    np.testing.assert_array_equal(apply('my_lab.brighten(9)', image), expected)
    transforms = parse_transforms("my_lab.noise(0.5, name='z')")
    assert transforms.random
    record = transforms({'image': image}, example_rng(0, 0))
    assert record['z'] == example_rng(0, 0).normal(0, 0.5)


def test_an_image_without_annotations_does_without_their_transforms():
    spec = "resize(8)|keep('image', 'boxes')|flip|pad_objects(count=5)"
    assert without_annotations(spec) == 'resize(8)|flip'
    assert without_annotations('keep("image")') == without_annotations(' ') == ''
    with pytest.raises(UserError, match="unknown transform 'flop'"):
        without_annotations('flop')
