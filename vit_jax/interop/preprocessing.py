"""From an image file to a model's input: transforms and normalization of a checkpoint.

They are read from the files beside the weights: timm's config.json, in `pretrained_cfg` or at the
top, or transformers' preprocessor_config.json. A run keeps them in its config, and files that are
written for timm and transformers hold them again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax import signatures
from vit_jax.data.images import MAX_PIXELS
from vit_jax.data.transforms import parse
from vit_jax.data.transforms.pillow import Fill, height_width
from vit_jax.errors import UserError
from vit_jax.interop.trained import Size, TrainedModel, pixel_scale

# By Pillow's numbers.
METHODS = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box', 'hamming')
CROP_SHARE = 0.875  # timm's default of `crop_pct`
_BICUBIC = METHODS.index('bicubic')
_EDGE = {'default_to_square': False, 'resample': _BICUBIC}  # a number is the shorter side
# Defaults of preprocessors, by the beginning of their type's name.
_DEFAULTS: dict[str, dict[str, Any]] = {
    'Siglip2': {},
    **{kind: _EDGE | {'do_center_crop': True} for kind in ('Bit', 'CLIP', 'Levit')},
    **dict.fromkeys(('ConvNext', 'Siglip'), _EDGE),
    'DeiT': {'resample': _BICUBIC, 'do_center_crop': True},
    'Beit': {'resample': _BICUBIC},
}
_SIDE = 224  # of crops, if neither the files nor the parameters have another
_DEIT = 256 / 224  # side before the crop / side of the crop
_UNCROPPED = 384  # pixels; from there on, transformers' ConvNeXts see whole images
# Keys of files that describe how images are resized.
_RESIZING = {'size', 'crop_size', 'crop_pct', 'interpolation', 'input_size', 'resample'}
# Parts of the names of transforms that change the geometry of an image.
_MOVES = re.compile('resize|crop|flip|pad_and|rotate|patches')
_FITS = {'resize': '', 'resize_cover': 'cover', 'resize_within': 'within'}
# Keys of the `extra` of `files.read_arrays`, beside those of config.json.
GIVEN_NORMALIZATION, PREPROCESSOR = 'normalization given by the user', 'preprocessor_config.json'
UNKNOWN_NORMALIZATION = (
    'the mean and standard deviation of its images are unknown '
    '(no preprocessor_config.json, no pretrained_cfg in config.json): assumed to be 0.5 and 0.5'
)
IMAGENET = {'mean': [0.485, 0.456, 0.406], 'std': [0.229, 0.224, 0.225]}
_HALF = np.full(1, 0.5)
RANGE = _HALF, _HALF  # mean and standard deviation of images in [0, 1] that make them [-1, 1]
_PIXEL = 1 / 255


class Recipe(NamedTuple):
    """Resizing, and a central crop.

    Attributes:
      size: height and width to which whole images are resized; or the shorter side, for images that
        keep their aspect ratio; None for images that are not resized.
      crop: height and width of the crop; None for none.
      method: resampling, one of METHODS; antialiased, as always in Pillow.
      fit: 'cover' or 'within' for images that keep their aspect ratio, and cover `size` or lie
        within it.
      long: rounding of the longer side if `size` is the shorter one, see `image.resize_small`.
      offset: rounding of the offset of the crop, see `image.central_crop`.
      fill: color with which smaller images are padded; None if there are none.
      drops_alpha: whether transparency is dropped, see `image.drop_alpha`.
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
    def made(self) -> Size | None:
        """Height and width of all images afterwards; None if they differ."""
        is_whole = isinstance(self.size, tuple) and not self.fit
        return self.crop or (self.size if is_whole else None)  # type: ignore[return-value]

    @property
    def text(self) -> str:
        """The transforms, as in `config.data.transforms`."""
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
    """The recipe that the files give; None if they give none.

    Args:
      extra: see `files.read_arrays`.
      size: height and width that the parameters were made for, which counts if the files have no
        image size; None if they fit any.
    """
    timm, transformers = extra.get('pretrained_cfg'), extra.get(PREPROCESSOR)
    found = _timm(timm, size) if isinstance(timm, Mapping) else None
    if found is None and isinstance(transformers, Mapping):
        found = _pillow(transformers, size)
    return found if found and _is_plausible(found) else None


def transform_notes(extra: Mapping[str, Any], text: str) -> tuple[str, ...]:
    """A note if the transforms differ from what the files describe.

    Args:
      extra: see `files.read_arrays`.
      text: the transforms that were read from it; empty if it gives none.
    """
    groups = (extra.get('pretrained_cfg'), extra.get(PREPROCESSOR))
    timm, told = (group if isinstance(group, Mapping) else {} for group in groups)
    if not text and (_RESIZING & (timm.keys() | told.keys())):
        return ('its files prepare images in a way that is not supported: they get a central crop',)
    config = _with_defaults(told, None)
    keeps_shape = _edge(config) is not None and not _kind(config).startswith('ConvNext')
    if told and not timm and keeps_shape and not config.get('do_center_crop'):
        return (f'{PREPROCESSOR} keeps the shape of images; here they get a central crop',)
    return ()


def resampling(text: str) -> str:
    """The resampling method that transforms name; 'bilinear' if they name none."""
    found = re.search(rf"'({'|'.join(METHODS)})'", text)
    return found[1] if found else 'bilinear'


def crop(size: Size, method: str = 'bilinear', side: int = 0) -> str:
    """Transforms: resize the shorter side to `side`, or more to cover `size`, and crop to it."""
    return Recipe(max(side, *size), size, method).text


def resized(text: str, size: Size) -> str:
    """The same transforms for images of another size.

    Whole images stay whole, and a crop shows the same share of an image. Other transforms become a
    central crop.
    """
    recipe = parse_recipe(text)
    if recipe is None or recipe.made is None or recipe.size is None:
        drops = parse.arguments_of(text, 'drop_alpha') is not None
        return Recipe(max(size), size, resampling(text), drops_alpha=drops).text
    if recipe.crop is None:
        return recipe._replace(size=size).text
    before = recipe.size if isinstance(recipe.size, tuple) else (recipe.size,) * 2
    if recipe.offset == 'even' and (share := _crop_share(recipe.crop, before)):
        return _timm_crop(recipe, size, share).text
    if isinstance(recipe.size, int):
        side = _side(recipe.size, max(size), max(recipe.crop))
        return recipe._replace(size=side, crop=size).text
    height, width = map(_side, recipe.size, size, recipe.crop)
    return recipe._replace(size=(height, width), crop=size).text


def _side(old: int, new: int, cut: int) -> int:
    """The side before a crop to `new` pixels, in the proportion of `old` to `cut`."""
    side = max(1, round(old * new / cut))
    return max(side, new) if old >= cut else side


def parse_recipe(text: str) -> Recipe | None:
    """The recipe that describes the geometry of transforms; None if there is none."""
    words = [signatures.function_name(node) for node in signatures.parse_transforms(text)]
    moving = [word for word in words if _MOVES.search(word)]
    if not moving or moving not in (moving[:1], [moving[0], 'central_crop']):
        return None
    if moving[0] not in (*_FITS, 'resize_small', 'central_crop'):
        return None
    cut = parse.arguments_of(text, 'central_crop') or {}
    resize = {} if moving[0] == 'central_crop' else parse.arguments_of(text, moving[0]) or {}
    if resize.get('max') is not None or resize.get('method', METHODS[0]) not in METHODS:
        return None
    size = resize.get('size')
    return Recipe(
        size if moving[0] == 'resize_small' or size is None else height_width(size),
        height_width(cut['size']) if cut else None,
        resize.get('method', 'bilinear'),
        _FITS.get(moving[0], ''),
        resize.get('rounding', 'nearest'),
        cut.get('rounding', 'down'),
        cut.get('fill'),
        'drop_alpha' in words,
    )


def transformers_keys(text: str) -> dict[str, Any]:
    """Transforms as keys of a preprocessor_config.json; empty if transformers cannot do it."""
    recipe = parse_recipe(text)
    if recipe is None or recipe.fit or recipe.fill not in (None, 0):
        return {}
    if isinstance(recipe.size, tuple):
        kind = 'DeiTImageProcessor' if recipe.crop else 'ViTImageProcessor'
        size = dict(zip(('height', 'width'), recipe.size, strict=True))
    else:
        kind = 'BitImageProcessor'
        size = {'shortest_edge': recipe.size or max(recipe.crop or (1,))}
    found: dict[str, Any] = {
        'image_processor_type': kind,
        'do_resize': recipe.size is not None,
        'size': size,
        'resample': METHODS.index(recipe.method),
    }
    if kind != 'ViTImageProcessor':
        found['do_center_crop'] = recipe.crop is not None
    if recipe.crop:
        found['crop_size'] = dict(zip(('height', 'width'), recipe.crop, strict=True))
    return found


def timm_keys(text: str, size: Size) -> dict[str, Any]:
    """Transforms as keys of timm's `pretrained_cfg`, for images of `size`; else empty."""
    recipe = parse_recipe(text)
    if recipe is None or recipe.size is None or recipe.made != size:
        return {}
    if isinstance(recipe.size, int):
        whole, mode = (recipe.size, recipe.size), 'center'
        if size[0] != size[1]:  # timm resizes to cover a rectangle
            return {}
    else:
        mode = {'': 'squash', 'cover': 'center', 'within': 'border'}[recipe.fit]
        whole = recipe.size
        if recipe.fit == 'cover' and size[0] == size[1]:
            return {}
    share = _crop_share(size, whole)
    if share is None:
        return {}
    return {'interpolation': recipe.method, 'crop_pct': share, 'crop_mode': mode}


def _crop_share(size: Size, whole: Size) -> float | None:
    """The shortest `crop_pct` with which timm resizes images to `whole`; None if there is none."""
    exact = min((new / (old + 0.5) for new, old in zip(size, whole, strict=True)), default=1.0)
    digits = (round(share, n) for n in range(1, 9) for share in (size[0] / whole[0], exact))
    shares = (share for share in digits if 0 < share <= 1)
    return next((share for share in shares if _whole(size, share) == whole), None)


def _whole(size: Size, share: float) -> Size:
    """The size of images before timm's crop."""
    return math.floor(size[0] / share), math.floor(size[1] / share)


def differences(text: str, files: Mapping[str, Any]) -> tuple[str, ...]:
    """A note if written files make other images than the transforms do, apart from transparency.

    Args:
      text: the transforms.
      files: their contents, as the `extra` of `files.read_arrays`.
    """
    recipe, found = parse_recipe(text), read_recipe(files, None)
    back = parse_recipe(found.text) if found else None
    if recipe is None or back is None or back._replace(drops_alpha=recipe.drops_alpha) == recipe:
        return ()
    theirs = back._replace(drops_alpha=False).text
    return (f'its images are made by {theirs} there, by {text} here: up to a pixel apart',)


def config_resampling(config: Mapping[str, Any]) -> str:
    """The resampling method of a preprocessor_config.json.

    Raises:
      UserError: if it is not in METHODS.
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


def _timm(config: Mapping[str, Any], size: Size | None) -> Recipe | None:
    """The recipe of `timm.data.create_transform` for evaluation."""
    size = _size(list(config.get('input_size') or ())[1:]) or size
    method, share = config.get('interpolation', 'bicubic'), config.get('crop_pct') or CROP_SHARE
    is_share = isinstance(share, int | float) and 0 < share <= 1
    if size is None or method not in METHODS or not is_share:
        return None
    fits = {'squash': '', 'border': 'within'}
    recipe = Recipe(size, size, method, fits.get(str(config.get('crop_mode')), 'cover'))
    filled = _border(config) if recipe.fit == 'within' else None
    return _timm_crop(recipe._replace(fill=filled, drops_alpha=True), size, share)


def _timm_crop(recipe: Recipe, size: Size, share: float) -> Recipe:
    """The recipe of the same kind for images of `size`, a share of the resized ones."""
    whole, fit = _whole(size, share), 'cover' if isinstance(recipe.size, int) else recipe.fit
    found = recipe._replace(size=whole, crop=size, fit=fit, long='nearest', offset='even')
    if fit == 'cover' and whole[0] == whole[1]:  # by torchvision
        return found._replace(size=whole[0], fit='', long='down')
    return found


def _border(config: Mapping[str, Any]) -> Fill:
    """timm's color of borders: the mean."""
    mean = config.get('mean') or [0.5]
    found = tuple(round(255 * value) for value in mean)
    return found[0] if len(set(found)) == 1 else found


def _pillow(config: Mapping[str, Any], size: Size | None) -> Recipe | None:
    """The recipe of a processor of transformers with its Pillow backend."""
    config = _with_defaults(config, size)
    try:
        resampling = config_resampling(config)
    except UserError:
        return None
    cropped = _size(config.get('crop_size')) if config.get('do_center_crop') else None
    recipe = Recipe(None, cropped, resampling, long='down', drops_alpha=True)
    if not config.get('do_resize', True):
        return recipe._replace(fill=0, long='nearest') if cropped else None
    edge = _edge(config)
    if edge is not None:
        return _edge_recipe(config, recipe._replace(size=edge), size)
    if whole := _size(config.get('size')):
        return _padding(recipe._replace(size=whole, long='nearest'))
    return None


def _edge(config: Mapping[str, Any]) -> int | None:
    """The shorter side that images are resized to; None for other ways of resizing."""
    given = config.get('size')
    edge = given.get('shortest_edge') if isinstance(given, Mapping) else given
    is_edge = isinstance(given, Mapping) or not config.get('default_to_square', True)
    return edge if is_edge and type(edge) is int else None


def _edge_recipe(config: Mapping[str, Any], recipe: Recipe, size: Size | None) -> Recipe:
    """The recipe of a preprocessor that is given the shorter side."""
    kind, edge = _kind(config), recipe.size
    assert isinstance(edge, int)
    if kind.startswith('ConvNext'):
        if edge >= _UNCROPPED:
            return recipe._replace(size=(edge, edge), crop=None, long='nearest')
        share = config.get('crop_pct') or CROP_SHARE
        return _padding(recipe._replace(size=int(edge / share), crop=(edge, edge)))
    if kind.startswith('Levit'):
        recipe = recipe._replace(size=int(256 / 224 * edge))
    if recipe.crop is None:  # images of any shape there
        final = size or (edge, edge)
        return recipe._replace(size=max(edge, *final), crop=final)
    return _padding(recipe)


def _padding(recipe: Recipe) -> Recipe:
    """The recipe, with black around images that are smaller than the crop."""
    sides = recipe.size if isinstance(recipe.size, tuple) else (recipe.size or 0,) * 2
    cut = recipe.crop or sides
    return recipe._replace(fill=0) if cut[0] > sides[0] or cut[1] > sides[1] else recipe


def _kind(config: Mapping[str, Any]) -> str:
    return str(config.get('image_processor_type') or config.get('feature_extractor_type') or '')


def _with_defaults(config: Mapping[str, Any], size: Size | None) -> dict[str, Any]:
    """The keys of a preprocessor, with defaults; `size` stands in for absent sizes."""
    kind = _kind(config)
    found = next((keys for start, keys in _DEFAULTS.items() if kind.startswith(start)), None)
    if found is None:
        return {'size': size, **config}
    crop = size or (_SIDE, _SIDE)
    whole: Any = max(size or (_UNCROPPED if kind.startswith('ConvNext') else _SIDE,))
    if kind.startswith('DeiT'):
        whole = [round(side * _DEIT) for side in crop]
    elif kind.startswith(('Siglip', 'Beit')):
        whole = crop
    return {'size': whole, 'crop_size': crop, **found, **config}


def _size(value: Any) -> Size | None:
    """Height and width, which files give as a number, a pair, or two keys."""
    if isinstance(value, Mapping):
        value = [value.get('height'), value.get('width')]
    pair = [value, value] if isinstance(value, int) else value
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(x, int) for x in pair):
        return pair[0], pair[1]
    return None


def with_normalization(
    imported: TrainedModel, extra: Mapping[str, Any], unknown: str = ''
) -> TrainedModel:
    """The model with the mean and standard deviation of its images, in its task.

    Args:
      imported: as it is in the file, for a task with the fields `mean` and `std`.
      extra: see `files.read_arrays`; under GIVEN_NORMALIZATION, the user's `mean` and `std`.
      unknown: a note for people, added if the normalization is unknown.

    Raises:
      UserError: if the mean or the standard deviation is invalid.
    """
    found = mean_and_std(extra)
    if found is None:
        return imported.with_notes(unknown) if unknown else imported
    if all(np.all(values == _HALF) for values in found):
        return imported
    numbers = of_channels(found, imported.channels)
    return imported.with_groups(task={**imported.task_config, **numbers})


def of_channels(
    normalization: tuple[np.ndarray, np.ndarray], channels: int
) -> dict[str, tuple[float, ...]]:
    """The fields `mean` and `std` of a task, a number for each channel.

    Raises:
      UserError: if they have another number of channels.
    """
    numbers = {}
    for name, values in zip(('mean', 'std'), normalization, strict=True):
        if values.size not in (1, channels) and np.ptp(values):
            raise UserError(f'{name} has {values.size} colors, the model takes {channels}')
        values = values if values.size == channels else values[:1]
        numbers[name] = tuple(np.broadcast_to(values, channels).tolist())
    return numbers


def normalization(trained: TrainedModel, channels: int) -> dict[str, list[float]]:
    """`mean` and `std` of each channel of a model's images in [0, 1], for files.

    Raises:
      UserError: if the task has them for another number of channels.
    """
    numbers = of_channels(pixel_scale(trained.task) or RANGE, channels)
    return {name: list(values) for name, values in numbers.items()}


def preprocessor(trained: TrainedModel, channels: int, size: tuple[int, int]) -> dict[str, Any]:
    """A preprocessor_config.json of transformers with the normalization of a model's task.

    Raises:
      UserError: if the task has it for another number of channels.
    """
    numbers = normalization(trained, channels)
    return {
        'image_processor_type': 'ViTImageProcessor',
        'do_resize': True,
        'size': {'height': size[0], 'width': size[1]},
        'resample': 2,  # bilinear
        'do_rescale': True,
        'rescale_factor': _PIXEL,
        'do_normalize': True,
        'image_mean': numbers['mean'],
        'image_std': numbers['std'],
    }


def mean_and_std(extra: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and standard deviation of images in [0, 1], given or in the files; None if unknown.

    Raises:
      UserError: if they are invalid, or the preprocessor does more than to rescale and normalize.
    """
    for source in (extra.get(GIVEN_NORMALIZATION), extra.get('pretrained_cfg')):
        if isinstance(source, Mapping) and {'mean', 'std'} <= source.keys():
            return _numbers('mean', source['mean']), _numbers('std', source['std'])
    config = extra.get(PREPROCESSOR)
    if config is None:
        return None
    for key in ('do_flip_channel_order', 'rescale_offset'):
        if config.get(key):
            raise UserError(f'{PREPROCESSOR} has {key}, which is not supported: give mean and std')
    scale = 1.0
    if not config.get('do_rescale', True):
        scale = 255.0
    elif (factor := config.get('rescale_factor', _PIXEL)) != _PIXEL:
        scale = 255.0 * float(_numbers('rescale_factor', factor)[0])
    if not config.get('do_normalize', True):
        mean, std = np.zeros(1), np.ones(1)
    elif {'image_mean', 'image_std'} <= config.keys():
        mean = _numbers('image_mean', config['image_mean'])
        std = _numbers('image_std', config['image_std'])
    elif _kind(config).startswith('ViT'):
        mean, std = RANGE  # its defaults
    else:
        return None
    return mean / scale, std / scale


def or_imagenet(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra` with the mean and standard deviation of ImageNet if it has none."""
    given = {} if mean_and_std(extra) is not None else {GIVEN_NORMALIZATION: IMAGENET}
    return {**extra, **given}


def _numbers(name: str, value: Any) -> np.ndarray:
    """Finite numbers [C], a single one as [1].

    Raises:
      UserError: if they are not finite numbers, or a standard deviation is not positive.
    """
    values = value if isinstance(value, list | tuple | np.ndarray) else [value]
    is_real = all(
        isinstance(v, int | float | np.number) and not isinstance(v, bool) and math.isfinite(v)
        for v in values
    )
    if not len(values) or not is_real:
        raise UserError(f'{name}={value!r} is not one finite number for each color')
    if name != 'mean' and name != 'image_mean' and min(values) <= 0:
        raise UserError(f'{name}={value!r} must be positive')
    return np.asarray(values, np.float64)
