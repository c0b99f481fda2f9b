"""Resizing and crops of a checkpoint's images; see `normalization` for their colors.

They are read from the files next to the weights: timm's config.json, in `pretrained_cfg` or at the
top, or transformers' preprocessor_config.json. Runs store them in their config, and files written
for timm and transformers contain them again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax import signatures
from vit_jax.data.images import MAX_PIXELS
from vit_jax.data.transforms import parse
from vit_jax.data.transforms.pillow import Fill, height_width
from vit_jax.errors import UserError
from vit_jax.interop import normalization
from vit_jax.interop.normalization import PIXEL, PREPROCESSOR, processor_type
from vit_jax.interop.trained import Size, TrainedModel

# In the order of Pillow's numbers.
METHODS = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box', 'hamming')
CROP_SHARE = 0.875  # timm's default of `crop_pct`
_BICUBIC = METHODS.index('bicubic')
_EDGE = {'default_to_square': False, 'resample': _BICUBIC}  # a number is the shorter side
# Defaults of preprocessors, by the prefix of their type's name.
_DEFAULTS: dict[str, dict[str, Any]] = {
    'Siglip2': {},
    **{kind: _EDGE | {'do_center_crop': True} for kind in ('Bit', 'CLIP', 'Levit')},
    **dict.fromkeys(('ConvNext', 'Siglip'), _EDGE),
    'DeiT': {'resample': _BICUBIC, 'do_center_crop': True},
    'Beit': {'resample': _BICUBIC},
}
_SIDE = 224  # default side of crops
_DEIT = 256 / 224  # side before the crop / side of the crop
_UNCROPPED = 384  # pixels; transformers' ConvNeXts do not crop from this size on
# Keys of files that describe how images are resized.
_RESIZING = {'size', 'crop_size', 'crop_pct', 'interpolation', 'input_size', 'resample'}
# Substrings of names of transforms that change the geometry of an image.
_MOVES = re.compile('resize|crop|flip|pad_and|rotate|patches|windows')
_FITS = {'resize': '', 'resize_cover': 'cover', 'resize_within': 'within'}


class Recipe(NamedTuple):
    """Resizing and a central crop.

    Attributes:
      size: Height and width to resize whole images to; or the shorter side, for images that keep
        their aspect ratio; None for no resizing.
      crop: Height and width of the crop; None for no crop.
      method: Resampling method, one of METHODS; antialiased, as always in Pillow.
      fit: 'cover' or 'within' for images that keep their aspect ratio and cover `size` or fit into
        it.
      long: Rounding of the longer side if `size` is the shorter one, see `image.resize_small`.
      offset: Rounding of the crop's offset, see `image.central_crop`.
      fill: Color for padding images smaller than the crop; None to not pad.
      drops_alpha: Whether transparency is dropped, see `image.drop_alpha`.
    """

    size: Size | int | None
    crop: Size | None
    method: str
    fit: str = ''
    long: str = 'nearest'
    offset: str = 'down'
    fill: Fill | None = None
    drops_alpha: bool = False

    @property
    def output_size(self) -> Size | None:
        """Height and width of all preprocessed images; None if they differ."""
        is_whole = isinstance(self.size, tuple) and not self.fit
        return self.crop or (self.size if is_whole else None)  # type: ignore[return-value]

    @property
    def text(self) -> str:
        """Transforms in the syntax of `config.data.transforms`."""
        steps = ['drop_alpha'] if self.drops_alpha else []
        if isinstance(self.size, tuple):
            name = f'resize_{self.fit}' if self.fit else 'resize'
            steps.append(f'{name}({self.size}, {self.method!r})')
        elif self.size is not None:
            method = '' if self.method == 'bilinear' else f', {self.method!r}'
            rounding = '' if self.long == 'nearest' else f', rounding={self.long!r}'
            steps.append(f'resize_small({self.size}{method}{rounding})')
        if self.crop is not None:
            rounding = '' if self.offset == 'down' else f', rounding={self.offset!r}'
            fill = '' if self.fill is None else f', fill={self.fill}'
            steps.append(f'central_crop({self.crop}{rounding}{fill})')
        return '|'.join(steps)


def read_recipe(extra: Mapping[str, Any], size: Size | None) -> Recipe | None:
    """Read the recipe from the files; None if they have none.

    Args:
      extra: See `files.read_arrays`.
      size: Height and width that the parameters were made for, used if the files have no image
        size; None if they fit any size.
    """
    timm, transformers = extra.get('pretrained_cfg'), extra.get(PREPROCESSOR)
    recipe = _read_timm(timm, size) if isinstance(timm, Mapping) else None
    if recipe is None and isinstance(transformers, Mapping):
        recipe = _read_transformers(transformers, size)
    return recipe if recipe and _is_plausible(recipe) else None


def transform_notes(extra: Mapping[str, Any], text: str) -> tuple[str, ...]:
    """Note if the transforms differ from what the files describe.

    Args:
      extra: See `files.read_arrays`.
      text: Transforms read from the files; empty if they have none.
    """
    groups = (extra.get('pretrained_cfg'), extra.get(PREPROCESSOR))
    timm, processor = (group if isinstance(group, Mapping) else {} for group in groups)
    if not text and (_RESIZING & (timm.keys() | processor.keys())):
        return ('its files describe an unsupported preprocessing: images get a central crop',)
    config = _with_defaults(processor, None)
    keeps_shape = _edge(config) is not None and not processor_type(config).startswith('ConvNext')
    if processor and not timm and keeps_shape and not config.get('do_center_crop'):
        return (f'{PREPROCESSOR} keeps the shape of images; this model gets a central crop',)
    return ()


def resampling(text: str) -> str:
    """Return the resampling method of transforms, 'bilinear' by default."""
    match = re.search(rf"'({'|'.join(METHODS)})'", text)
    return match[1] if match else 'bilinear'


def crop(size: Size, method: str = 'bilinear', side: int = 0) -> str:
    """Return transforms that resize the shorter side to at least `side`, and crop to `size`."""
    return Recipe(max(side, *size), size, method).text


def change_size(text: str, size: Size) -> str:
    """Adapt transforms to a different image size.

    Whole images stay whole, and a crop keeps its share of the image. Other transforms become a
    central crop.
    """
    recipe = parse_recipe(text)
    if recipe is None or recipe.output_size is None or recipe.size is None:
        drops = parse.arguments_of(text, 'drop_alpha') is not None
        return Recipe(max(size), size, resampling(text), drops_alpha=drops).text
    if recipe.crop is None:
        return recipe._replace(size=size).text
    resized_size = recipe.size if isinstance(recipe.size, tuple) else (recipe.size,) * 2
    if recipe.offset == 'even' and (share := _crop_share(recipe.crop, resized_size)):
        return _timm_crop(recipe, size, share).text
    if isinstance(recipe.size, int):
        side = _side(recipe.size, max(size), max(recipe.crop))
        return recipe._replace(size=side, crop=size).text
    height, width = map(_side, recipe.size, size, recipe.crop)
    return recipe._replace(size=(height, width), crop=size).text


def _side(old: int, new: int, cut: int) -> int:
    """Scale the side before a crop to `new` pixels, in the ratio of `old` to `cut`."""
    side = max(1, round(old * new / cut))
    return max(side, new) if old >= cut else side


def parse_recipe(text: str) -> Recipe | None:
    """Parse the geometry of transforms as a recipe; None if it is not one."""
    names = [signatures.function_name(node) for node in signatures.parse_transforms(text)]
    geometric = [word for word in names if _MOVES.search(word)]
    if not geometric or geometric not in (geometric[:1], [geometric[0], 'central_crop']):
        return None
    if geometric[0] not in (*_FITS, 'resize_small', 'central_crop'):
        return None
    crop_args = parse.arguments_of(text, 'central_crop') or {}
    resize = {} if geometric[0] == 'central_crop' else parse.arguments_of(text, geometric[0]) or {}
    if resize.get('max') is not None or resize.get('method', METHODS[0]) not in METHODS:
        return None
    size = resize.get('size')
    return Recipe(
        size if geometric[0] == 'resize_small' or size is None else height_width(size),
        height_width(crop_args['size']) if crop_args else None,
        resize.get('method', 'bilinear'),
        _FITS.get(geometric[0], ''),
        resize.get('rounding', 'nearest'),
        crop_args.get('rounding', 'down'),
        crop_args.get('fill'),
        'drop_alpha' in names,
    )


def transformers_keys(text: str) -> dict[str, Any]:
    """Convert transforms to keys of a preprocessor_config.json; empty if unsupported there."""
    recipe = parse_recipe(text)
    if recipe is None or recipe.fit or recipe.fill not in (None, 0):
        return {}
    if isinstance(recipe.size, tuple):
        kind = 'DeiTImageProcessor' if recipe.crop else 'ViTImageProcessor'
        size = dict(zip(('height', 'width'), recipe.size, strict=True))
    else:
        kind = 'BitImageProcessor'
        size = {'shortest_edge': recipe.size or max(recipe.crop or (1,))}
    keys: dict[str, Any] = {
        'image_processor_type': kind,
        'do_resize': recipe.size is not None,
        'size': size,
        'resample': METHODS.index(recipe.method),
    }
    if kind != 'ViTImageProcessor':
        keys['do_center_crop'] = recipe.crop is not None
    if recipe.crop:
        keys['crop_size'] = dict(zip(('height', 'width'), recipe.crop, strict=True))
    return keys


def timm_keys(text: str, size: Size) -> dict[str, Any]:
    """Convert transforms to keys of timm's `pretrained_cfg` for images of `size`; else empty."""
    recipe = parse_recipe(text)
    if recipe is None or recipe.size is None or recipe.output_size != size:
        return {}
    if isinstance(recipe.size, int):
        resized_size, mode = (recipe.size, recipe.size), 'center'
        if size[0] != size[1]:  # timm resizes to cover a rectangle
            return {}
    else:
        mode = {'': 'squash', 'cover': 'center', 'within': 'border'}[recipe.fit]
        resized_size = recipe.size
        if recipe.fit == 'cover' and size[0] == size[1]:
            return {}
    share = _crop_share(size, resized_size)
    if share is None:
        return {}
    return {'interpolation': recipe.method, 'crop_pct': share, 'crop_mode': mode}


def _crop_share(size: Size, resized_size: Size) -> float | None:
    """Return the shortest `crop_pct` that makes timm resize images to a size; None if there is
    none.
    """
    exact = min(
        (new / (old + 0.5) for new, old in zip(size, resized_size, strict=True)), default=1.0
    )
    digits = (round(share, n) for n in range(1, 9) for share in (size[0] / resized_size[0], exact))
    shares = (share for share in digits if 0 < share <= 1)
    return next((share for share in shares if _size_before_crop(size, share) == resized_size), None)


def _size_before_crop(size: Size, share: float) -> Size:
    """Return the size of images before timm's crop."""
    return math.floor(size[0] / share), math.floor(size[1] / share)


def differences(text: str, file_text: str) -> tuple[str, ...]:
    """Note if written files prepare images in a different way, apart from transparency.

    Args:
      text: Transforms of the model.
      file_text: Transforms of the same model read from its files.
    """
    steps, file_steps = _geometry(text), _geometry(file_text)
    if not steps or steps == file_steps:
        return ()
    is_rounding = [*map(_without_rounding, steps)] == [*map(_without_rounding, file_steps)]
    effect = 'up to one pixel off' if is_rounding else 'predictions differ'
    return (
        f'the files prepare images with {file_text or "nothing"}, this model with {text}: {effect}',
    )


def _geometry(text: str) -> list[dict[str, Any]]:
    """Return names and arguments of the transforms that change the geometry of images."""
    steps: list[dict[str, Any]] = []
    for node in signatures.parse_transforms(text):
        if not _MOVES.search(name := signatures.function_name(node)):
            continue
        args = parse.arguments_of(text, name) or {}
        size = height_width(args['size']) if 'size' in args else None
        is_resized = steps and (steps[-1]['name'], steps[-1]['size']) == ('resize', size)
        if not (name == 'central_crop' and is_resized):
            steps.append({**args, 'name': name, 'size': size})
    return steps


def _without_rounding(step: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.items() if key != 'rounding'}


def config_resampling(config: Mapping[str, Any]) -> str:
    """Return the resampling method of a preprocessor_config.json.

    Raises:
      UserError: if the method is not in METHODS.
    """
    number = _with_defaults(config, None).get('resample', METHODS.index('bilinear'))
    if not (type(number) is int and 0 <= number < len(METHODS)):
        raise UserError(f'{PREPROCESSOR}: resample {number!r} is not supported')
    return METHODS[number]


def _is_plausible(recipe: Recipe) -> bool:
    fill = recipe.fill if isinstance(recipe.fill, tuple) else (recipe.fill or 0,)
    if not all(0 <= value <= 255 for value in fill):
        return False
    sides = (recipe.size or 1,) * 2 if not isinstance(recipe.size, tuple) else recipe.size
    return all(
        min(pair) > 0 and math.prod(pair) <= MAX_PIXELS for pair in (sides, recipe.crop or sides)
    )


def _read_timm(config: Mapping[str, Any], size: Size | None) -> Recipe | None:
    """Read the recipe of `timm.data.create_transform` for evaluation."""
    size = _size(list(config.get('input_size') or ())[1:]) or size
    method, share = config.get('interpolation', 'bicubic'), config.get('crop_pct') or CROP_SHARE
    is_share = isinstance(share, int | float) and 0 < share <= 1
    if size is None or method not in METHODS or not is_share:
        return None
    fits = {'squash': '', 'border': 'within'}
    recipe = Recipe(size, size, method, fits.get(str(config.get('crop_mode')), 'cover'))
    fill = _border(config) if recipe.fit == 'within' else None
    return _timm_crop(recipe._replace(fill=fill, drops_alpha=True), size, share)


def _timm_crop(recipe: Recipe, size: Size, share: float) -> Recipe:
    """Return the same kind of recipe for images of `size`, a share of the resized ones."""
    resized_size, fit = (
        _size_before_crop(size, share),
        'cover' if isinstance(recipe.size, int) else recipe.fit,
    )
    result = recipe._replace(size=resized_size, crop=size, fit=fit, long='nearest', offset='even')
    if fit == 'cover' and resized_size[0] == resized_size[1]:  # done by torchvision
        return result._replace(size=resized_size[0], fit='', long='down')
    return result


def _border(config: Mapping[str, Any]) -> Fill:
    """Return timm's border color: the mean."""
    mean = config.get('mean') or [0.5]
    color = tuple(round(255 * value) for value in mean)
    return color[0] if len(set(color)) == 1 else color


def _read_transformers(config: Mapping[str, Any], size: Size | None) -> Recipe | None:
    """Read the recipe of a transformers processor with its Pillow backend."""
    config = _with_defaults(config, size)
    try:
        resampling = config_resampling(config)
    except UserError:
        return None
    crop = _size(config.get('crop_size')) if config.get('do_center_crop') else None
    recipe = Recipe(None, crop, resampling, long='down', drops_alpha=True)
    if not config.get('do_resize', True):
        return recipe._replace(fill=0, long='nearest') if crop else None
    edge = _edge(config)
    if edge is not None:
        return _edge_recipe(config, recipe._replace(size=edge), size)
    if resized := _size(config.get('size')):
        return _fill_padding(recipe._replace(size=resized, long='nearest'))
    return None


def _edge(config: Mapping[str, Any]) -> int | None:
    """Return the shorter side to resize images to; None for other kinds of resizing."""
    size = config.get('size')
    edge = size.get('shortest_edge') if isinstance(size, Mapping) else size
    is_edge = isinstance(size, Mapping) or not config.get('default_to_square', True)
    return edge if is_edge and type(edge) is int else None


def _edge_recipe(config: Mapping[str, Any], recipe: Recipe, size: Size | None) -> Recipe:
    """Read the recipe of a preprocessor configured by the shorter side."""
    kind, edge = processor_type(config), recipe.size
    assert isinstance(edge, int)
    if kind.startswith('ConvNext'):
        if edge >= _UNCROPPED:
            return recipe._replace(size=(edge, edge), crop=None, long='nearest')
        share = config.get('crop_pct') or CROP_SHARE
        return _fill_padding(recipe._replace(size=int(edge / share), crop=(edge, edge)))
    if kind.startswith('Levit'):
        recipe = recipe._replace(size=int(256 / 224 * edge))
    if recipe.crop is None:  # the processor keeps the aspect ratio
        final = size or (edge, edge)
        return recipe._replace(size=max(edge, *final), crop=final)
    return _fill_padding(recipe)


def _fill_padding(recipe: Recipe) -> Recipe:
    """Add black padding if images are smaller than the crop."""
    sides = recipe.size if isinstance(recipe.size, tuple) else (recipe.size or 0,) * 2
    crop = recipe.crop or sides
    return recipe._replace(fill=0) if crop[0] > sides[0] or crop[1] > sides[1] else recipe


def _with_defaults(config: Mapping[str, Any], size: Size | None) -> dict[str, Any]:
    """Complete a preprocessor's keys with defaults; `size` is the default size."""
    kind = processor_type(config)
    defaults = next((keys for start, keys in _DEFAULTS.items() if kind.startswith(start)), None)
    if defaults is None:
        return {'size': size, **config}
    crop = size or (_SIDE, _SIDE)
    default_size: Any = max(size or (_UNCROPPED if kind.startswith('ConvNext') else _SIDE,))
    if kind.startswith('DeiT'):
        default_size = [round(side * _DEIT) for side in crop]
    elif kind.startswith(('Siglip', 'Beit')):
        default_size = crop
    return {'size': default_size, 'crop_size': crop, **defaults, **config}


def _size(value: Any) -> Size | None:
    """Parse height and width from a number, a pair or two keys."""
    if isinstance(value, Mapping):
        value = [value.get('height'), value.get('width')]
    pair = [value, value] if isinstance(value, int) else value
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(x, int) for x in pair):
        return pair[0], pair[1]
    return None


def preprocessor(trained: TrainedModel, channels: int, size: tuple[int, int]) -> dict[str, Any]:
    """Build a preprocessor_config.json of transformers with the normalization of a model's task.

    Raises:
      UserError: if the task's normalization has a different number of channels.
    """
    numbers = normalization.keys(trained, channels)
    return {
        'image_processor_type': 'ViTImageProcessor',
        'do_resize': True,
        'size': {'height': size[0], 'width': size[1]},
        'resample': 2,  # bilinear
        'do_rescale': True,
        'rescale_factor': PIXEL,
        'do_normalize': True,
        'image_mean': numbers['mean'],
        'image_std': numbers['std'],
    }
