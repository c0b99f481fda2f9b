"""Functions that a config may name, marked by `@transform`."""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from vit_jax.errors import UserError, nearest

Factory = TypeVar('Factory', bound=Callable[..., Callable[..., Any]])

PACKAGE = __name__.rpartition('.')[0]
TRANSFORM = '_is_vit_jax_transform'
ANNOTATIONS = '_is_of_annotations'
TEXTS = '_is_of_texts'
CROPS_AT_ONCE = '_crops_at_once'
RESIZES_ON_DEMAND = '_resizes_on_demand'
_PIXELS = '_arguments_in_pixels'
_DEFINITION = re.compile(r'^@transform\n(?:@.+\n)*def (\w+)', re.MULTILINE)


def is_marked(factory: Any, mark: str) -> bool:
    """Return whether a function has a mark: TRANSFORM, ANNOTATIONS, TEXTS, ..."""
    return callable(factory) and getattr(factory, mark, False) is True


def transform(factory: Factory) -> Factory:
    """Mark a function that transforms in a config may name.

    A stored config is untrusted text, so other functions are never called.
    """
    setattr(factory, TRANSFORM, True)
    return factory


def annotation_transform(factory: Factory) -> Factory:
    """Mark a transform of annotations, such as labels; images without them skip it."""
    setattr(factory, ANNOTATIONS, True)
    return factory


def text_transform(factory: Factory) -> Factory:
    """Mark a transform of only texts, which also applies to texts given by flags."""
    setattr(factory, TEXTS, True)
    return annotation_transform(factory)


def crops_at_once(factory: Factory) -> Factory:
    """Mark a transform that reads only the image's shape and one window.

    If it is first, only that window of a file is decoded.
    """
    setattr(factory, CROPS_AT_ONCE, True)
    return factory


def resizes_on_demand(factory: Factory) -> Factory:
    """Mark a transform that maps an image on demand to another; see `images.OnDemand`.

    If it is first and a crop second, only what the crop needs is decoded and resized.
    """
    setattr(factory, RESIZES_ON_DEMAND, True)
    return factory


def in_pixels(**shares: float) -> Callable[[Factory], Factory]:
    """Mark arguments in pixels, with the intended share of an image's side."""

    def mark(factory: Factory) -> Factory:
        setattr(factory, _PIXELS, shares)
        return factory

    return mark


def arguments_in_pixels(factory: Callable[..., Any]) -> Mapping[str, float]:
    """Return the arguments in pixels, with the intended share of an image's side."""
    return getattr(factory, _PIXELS, {})


def find_function(name: str) -> Callable[..., Any]:
    """Find a marked function by name.

    Args:
      name: Plain name in this package (`flip`), or dotted name elsewhere
        (`my_lab.augment.solarize`).

    Raises:
      UserError: if the function does not exist, or is not marked.
    """
    module, _, attribute = name.rpartition('.')
    if not module:
        if name not in modules():
            raise UserError(nearest('transform', name, modules()))
        return getattr(importlib.import_module(modules()[name]), name)
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f'cannot import {name!r}: {error}') from error
    if not is_marked(function, TRANSFORM):
        raise UserError(
            f'{name!r} is not a transform; decorate its definition with {PACKAGE}.transform'
        )
    return function


@functools.cache
def modules() -> Mapping[str, str]:
    """Return the module of every marked function in this package, by the function's name.

    The sources are searched, and nothing is imported: a run needs few of these modules.

    Raises:
      ValueError: if two modules have functions with the same name.
    """
    module_names: dict[str, str] = {}
    folders = map(pathlib.Path, importlib.import_module(PACKAGE).__path__)
    for file in (file for folder in folders for file in sorted(folder.glob('*.py'))):
        module = f'{PACKAGE}.{file.stem}'
        for name in _DEFINITION.findall(file.read_text(encoding='utf-8')):
            if name in module_names:
                raise ValueError(f'{module_names[name]} and {module}: two {name}')
            module_names[name] = module
    return module_names
