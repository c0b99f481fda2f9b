"""Transforms that the files of released checkpoints give."""

import pytest

from vit_jax.data.transforms import parse_transforms
from vit_jax.interop import preprocessing
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
        ({'do_resize': False}, None, ''),
    ],
)
def test_of_transformers(extra, size, text):
    assert preprocessing.transforms({PREPROCESSOR: extra}, size) == text
    parse_transforms(text)


def test_of_nobody():
    assert preprocessing.transforms({}, (224, 224)) == ''
