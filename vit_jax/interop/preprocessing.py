"""Transforms from an image file to a model's input, by the files beside its weights.

config.json of timm has them as `pretrained_cfg`, transformers in preprocessor_config.json.
`interop.normalization` reads the mean and deviation from the same places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError
from vit_jax.interop.normalization import PREPROCESSOR
from vit_jax.interop.trained import Size

METHODS = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box')  # by Pillow's numbers
CROP_SHARE = 0.875  # of timm, where `crop_pct` is not given


def transforms(extra: Mapping[str, Any], size: Size | None) -> str:
    """The transforms that the files give for images of this size; empty if they give none.

    Args:
      extra: see `files.read_arrays`.
      size: height and width that the parameters were made for; None if they fit any.
    """
    for read, source in ((_timm, extra.get('pretrained_cfg')), (_pillow, extra.get(PREPROCESSOR))):
        if isinstance(source, Mapping) and (found := read(source, size)):
            return found
    return ''


def method_of(text: str) -> str:
    """The resampling that transforms name; 'bilinear' if they name none."""
    found = re.search(rf"'({'|'.join(METHODS)})'", text)
    return found[1] if found else 'bilinear'


def crop(size: Size, method: str = 'bilinear', side: int = 0) -> str:
    """The middle of an image whose shorter side was resized to `side`, at least that of `size`."""
    height, width = size
    named = '' if method == 'bilinear' else f', {method!r}'
    return f'resize_small({max(side, *size)}{named})|central_crop(({height}, {width}))'


def method(config: Mapping[str, Any]) -> str:
    """The resampling of a preprocessor_config.json, bilinear by default.

    Raises:
      UserError: if it has none of METHODS.
    """
    number = config.get('resample', METHODS.index('bilinear'))
    if not (type(number) is int and 0 <= number < len(METHODS)):
        raise UserError(f'{PREPROCESSOR}: resample {number!r} is not supported')
    return METHODS[number]


def _timm(config: Mapping[str, Any], size: Size | None) -> str:
    size = size or _size(list(config.get('input_size', ()))[1:])
    method, share = config.get('interpolation', 'bicubic'), config.get('crop_pct') or CROP_SHARE
    is_share = isinstance(share, int | float) and 0 < share <= 1
    if size is None or method not in METHODS or not is_share:
        return ''
    if config.get('crop_mode') == 'squash':
        whole = int(size[0] / share), int(size[1] / share)
        return f'resize({whole}, {method!r})|central_crop({size})'
    return crop(size, method, int(max(size) / share))


def _pillow(config: Mapping[str, Any], size: Size | None) -> str:
    number = config.get('resample', METHODS.index('bilinear'))
    if not (isinstance(number, int) and 0 <= number < len(METHODS)):
        return ''
    method, given = METHODS[number], config.get('size')
    edge = given.get('shortest_edge') if isinstance(given, Mapping) else None
    cropped = _size(config.get('crop_size')) if config.get('do_center_crop') else None
    if isinstance(edge, int) and (size := size or cropped or (edge, edge)):
        return crop(size, method, edge)
    size = size or _size(given)
    return f'resize({size}, {method!r})' if size else ''


def _size(value: Any) -> Size | None:
    """Height and width as files give them: a number, a pair, or a group of two keys."""
    if isinstance(value, Mapping):
        value = [value.get('height'), value.get('width')]
    pair = [value, value] if isinstance(value, int) else value
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(x, int) for x in pair):
        return pair[0], pair[1]
    return None
