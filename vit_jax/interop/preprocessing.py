"""From an image file to a model's input: the transforms that go with a model wherever it goes.

The files beside its weights give them: config.json of timm, as `pretrained_cfg` or at its top, or
preprocessor_config.json of transformers. A run has them in its config. What is written for
transformers gives them again. `interop.normalization` reads mean and deviation there too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax import calls
from vit_jax.data.images import MAX_PIXELS
from vit_jax.data.transforms import parse
from vit_jax.data.transforms.arguments import height_width
from vit_jax.errors import UserError
from vit_jax.interop.normalization import PREPROCESSOR
from vit_jax.interop.trained import Size

METHODS = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box')  # by Pillow's numbers
CROP_SHARE = 0.875  # of timm, where `crop_pct` is not given
# By the beginning of the type of a preprocessor: what it does unless the file says otherwise.
_CROPPED = {'resample': METHODS.index('bicubic'), 'do_center_crop': True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(('Bit', 'CLIP', 'DeiT', 'Levit'), _CROPPED),
    **{kind: {'resample': METHODS.index('bicubic')} for kind in ('ConvNext', 'Siglip')},
}


class Recipe(NamedTuple):
    """Resizing, and a crop of the middle.

    Attributes:
      size: height and width that whole images are resized to, or the shorter side, for images that
        keep their aspect ratio.
      crop: height and width of the crop; None for none.
      method: of resampling, one of METHODS; antialiased, as all of Pillow.
    """

    size: Size | int
    crop: Size | None
    method: str

    @property
    def text(self) -> str:
        """The transforms, as in `config.data.transforms`."""
        if isinstance(self.size, int):
            named = '' if self.method == 'bilinear' else f', {self.method!r}'
            resize = f'resize_small({self.size}{named})'
        else:
            resize = f'resize({self.size}, {self.method!r})'
        return resize if self.crop is None else f'{resize}|central_crop({self.crop})'


def transforms(extra: Mapping[str, Any], size: Size | None) -> str:
    """The transforms that the files give for images of this size; empty if they give none.

    Args:
      extra: see `files.read_arrays`.
      size: height and width that the parameters were made for; None if they fit any.
    """
    for read, source in ((_timm, extra.get('pretrained_cfg')), (_pillow, extra.get(PREPROCESSOR))):
        if isinstance(source, Mapping) and (found := read(source, size)):
            return found.text if _is_plausible(found) else ''
    return ''


def method_of(text: str) -> str:
    """The resampling that transforms name; 'bilinear' if they name none."""
    found = re.search(rf"'({'|'.join(METHODS)})'", text)
    return found[1] if found else 'bilinear'


def crop(size: Size, method: str = 'bilinear', side: int = 0) -> str:
    """The middle of an image whose shorter side was resized to `side`, at least that of `size`."""
    return Recipe(max(side, *size), size, method).text


def resized(text: str, size: Size) -> str:
    """The same transforms for images of another size.

    Whole images stay whole, and a crop shows the same share of an image. A crop of the middle, if
    the transforms are none of these.
    """
    recipe = recipe_of(text)
    if recipe is None or (recipe.crop is None and isinstance(recipe.size, int)):
        return crop(size, method_of(text))
    if recipe.crop is None:
        return recipe._replace(size=size).text
    if isinstance(recipe.size, int):
        return crop(size, recipe.method, round(recipe.size * max(size) / max(recipe.crop)))
    sides = zip(recipe.size, size, recipe.crop, strict=True)
    height, width = (max(round(old * new / cut), new) for old, new, cut in sides)
    return Recipe((height, width), size, recipe.method).text


def recipe_of(text: str) -> Recipe | None:
    """The geometry of transforms as a recipe; None if they do more than one can say."""
    words = [calls.function_name(node) for node in calls.parse_transforms(text)]
    if [word for word in words if _moves(word)] not in (
        *(['resize'], ['resize', 'central_crop']),
        *(['resize_small'], ['resize_small', 'central_crop']),
    ):
        return None
    whole, small, cut = (
        parse.arguments_of(text, name) for name in ('resize', 'resize_small', 'central_crop')
    )
    resize = whole or small or {}
    if resize.get('max') is not None or resize['method'] not in METHODS:
        return None
    size: Size | int = height_width(resize['size']) if whole else resize['size']
    return Recipe(size, height_width(cut['size']) if cut else None, resize['method'])


def written(text: str) -> dict[str, Any]:
    """The same in the keys of a preprocessor_config.json; empty if transformers cannot do it."""
    recipe = recipe_of(text)
    if recipe is None:
        return {}
    if isinstance(recipe.size, int):
        kind, size = 'BitImageProcessor', {'shortest_edge': recipe.size}
    else:
        kind = 'DeiTImageProcessor' if recipe.crop else 'ViTImageProcessor'
        size = dict(zip(('height', 'width'), recipe.size, strict=True))
    found: dict[str, Any] = {
        'image_processor_type': kind,
        'size': size,
        'resample': METHODS.index(recipe.method),
    }
    if kind != 'ViTImageProcessor':
        found['do_center_crop'] = recipe.crop is not None
    if recipe.crop:
        found['crop_size'] = dict(zip(('height', 'width'), recipe.crop, strict=True))
    return found


def written_for_timm(text: str) -> dict[str, Any]:
    """The same in the keys of timm's `pretrained_cfg`; empty if timm cannot do it."""
    recipe = recipe_of(text)
    if recipe is None:
        return {}
    told: dict[str, Any] = {'interpolation': recipe.method}
    if isinstance(recipe.size, int):
        if recipe.crop is None:  # images of any shape
            return {}
        return told | {'crop_pct': max(recipe.crop) / recipe.size, 'crop_mode': 'center'}
    share = recipe.crop[0] / recipe.size[0] if recipe.crop else 1.0
    return told | {'crop_pct': share, 'crop_mode': 'squash'}


def method(config: Mapping[str, Any]) -> str:
    """The resampling of a preprocessor_config.json.

    Raises:
      UserError: if it has none of METHODS.
    """
    number = _with_defaults(config).get('resample', METHODS.index('bilinear'))
    if not (type(number) is int and 0 <= number < len(METHODS)):
        raise UserError(f'{PREPROCESSOR}: resample {number!r} is not supported')
    return METHODS[number]


def _moves(word: str) -> bool:
    """Whether a transform of this name changes the geometry of an image."""
    return any(part in word for part in ('resize', 'crop', 'flip', 'pad_and', 'rotate', 'patches'))


def _is_plausible(recipe: Recipe) -> bool:
    sides = (recipe.size,) * 2 if isinstance(recipe.size, int) else recipe.size
    cut = recipe.crop or sides
    fits = all(0 < short <= side for short, side in zip(cut, sides, strict=True))
    return fits and sides[0] * sides[1] <= MAX_PIXELS


def _timm(config: Mapping[str, Any], size: Size | None) -> Recipe | None:
    size = size or _size(list(config.get('input_size', ()))[1:])
    method, share = config.get('interpolation', 'bicubic'), config.get('crop_pct') or CROP_SHARE
    is_share = isinstance(share, int | float) and 0 < share <= 1
    if size is None or method not in METHODS or not is_share:
        return None
    if config.get('crop_mode') == 'squash':
        return Recipe((int(size[0] / share), int(size[1] / share)), size, method)
    return Recipe(max(int(max(size) / share), *size), size, method)


def _pillow(config: Mapping[str, Any], size: Size | None) -> Recipe | None:
    config = _with_defaults(config)
    try:
        resampling = method(config)
    except UserError:
        return None
    given = config.get('size')
    edge = given.get('shortest_edge') if isinstance(given, Mapping) else None
    cropped = _size(config.get('crop_size')) if config.get('do_center_crop') else None
    if isinstance(edge, int):
        return _of_edge(config, edge, size, cropped, resampling)
    whole = _size(given)
    if whole and cropped:  # of DeiT
        return Recipe(whole, size or cropped, resampling)
    final = size or whole
    return Recipe(final, None, resampling) if final else None


def _of_edge(
    config: Mapping[str, Any], edge: int, size: Size | None, cropped: Size | None, method: str
) -> Recipe:
    """The recipe of a preprocessor that is given the shorter side."""
    kind = _kind(config)
    if kind.startswith('ConvNext'):
        final = size or (edge, edge)
        if edge >= 384:
            return Recipe(final, None, method)
        share = config.get('crop_pct') or CROP_SHARE
        return Recipe(max(int(edge / share), *final), final, method)
    if kind.startswith('Levit'):
        edge = int(256 / 224 * edge)
    final = size or cropped or (edge, edge)
    return Recipe(edge if cropped == final else max(edge, *final), final, method)


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get('image_processor_type') or config.get('feature_extractor_type') or '')


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = _kind(config)
    found = next((keys for start, keys in _DEFAULTS.items() if kind.startswith(start)), {})
    return {**found, **config}


def _size(value: Any) -> Size | None:
    """Height and width as files give them: a number, a pair, or a group of two keys."""
    if isinstance(value, Mapping):
        value = [value.get('height'), value.get('width')]
    pair = [value, value] if isinstance(value, int) else value
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(x, int) for x in pair):
        return pair[0], pair[1]
    return None
