"""Parsing of transforms in a config into functions of a record."""

from __future__ import annotations

import ast
import collections
import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax import signatures
from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry, registry
from vit_jax.data.transforms.geometry import check_image_is_alone, image_size
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.errors import UserError

Step = Callable[[Record, np.random.Generator], Record]
TRIALS = 50  # trials of `remarks`
OFTEN = 0.05  # share of trials above which `remarks` warns
_DROP_ALPHA = 'drop_alpha'


@dataclasses.dataclass(frozen=True)
class Transforms:
    """Transforms applied one after the other.

    Attributes:
      spec: Text of the transforms.
      steps: Functions of (record, rng).
      random: Whether any transform draws random numbers.
      vocab: Vocabulary for transforms that encode texts.
      crop_first: Whether they begin with a crop, or with resizing and a crop, see
        `registry.crops_at_once` and `registry.resizes_on_demand`.
      drops_alpha: Whether files are decoded without transparency, see `image.drop_alpha`.
    """

    spec: str
    steps: tuple[Step, ...]
    random: bool
    vocab: Tokenizer | None = None
    crop_first: bool = False
    drops_alpha: bool = False

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        for step in self.steps:
            record = step(record, rng)
        return record

    def remarks(self, record: Record) -> list[str]:
        """Describe, one line each, transforms whose pixel arguments often make images plain.

        Args:
          record: Record for `TRIALS` trials.
        """
        nodes = signatures.parse_transforms(self.spec)
        factories = [_find_factory(node) for node in nodes]
        if not any(
            registry.arguments_in_pixels(f) or f.__name__ in signatures.NESTING for f in factories
        ):
            return []
        plain = collections.Counter[int]()
        sizes: dict[int, tuple[int, int]] = {}
        lines: dict[str, None] = {}
        for trial in range(TRIALS):
            changed, rng = record, np.random.default_rng(trial)
            for position, (factory, step) in enumerate(zip(factories, self.steps, strict=True)):
                before, changed = changed, step(changed, rng)
                if registry.arguments_in_pixels(factory):
                    sizes[position] = image_size(before)
                    plain[position] += _is_plain(changed) and not _is_plain(before)
                elif not trial:
                    for inner in signatures.nested_transforms(nodes[position]):
                        lines |= dict.fromkeys(parse_transforms(inner).remarks(before))
            if all(_suits(nodes[i], factories[i], size) for i, size in sizes.items()):
                return list(lines)  # no further trials needed
        for position, count in plain.items():
            if count >= TRIALS * OFTEN:
                lines[
                    _describe_plain(nodes[position], factories[position], sizes[position], count)
                ] = None
        return list(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # The steps are closures, so worker processes get the text.
        return parse_transforms, (self.spec, self.vocab)


def _is_plain(record: Record) -> bool:
    """Return whether the image, or a frame or view of it, has a single color."""
    image = np.asarray(record['image'])
    return bool((image == image[..., :1, :1, :]).all((-3, -2, -1)).any())


def _suits(node: ast.expr, factory: Callable[..., Any], size: tuple[int, int]) -> bool:
    """Return whether no pixel argument exceeds its share of an image of this size."""
    args, kwargs = signatures.arguments(node)
    bound = inspect.signature(factory).bind(*args, **kwargs)
    bound.apply_defaults()
    shares = registry.arguments_in_pixels(factory)
    return all(bound.arguments[k] <= math.ceil(x * min(size)) for k, x in shares.items())


def _describe_plain(
    node: ast.expr, factory: Callable[..., Any], size: tuple[int, int], count: int
) -> str:
    shares = registry.arguments_in_pixels(factory)
    better = ', '.join(f'{k}={max(1, round(x * min(size)))}' for k, x in shares.items())
    return (
        f'{ast.unparse(node)} turns {100 * count / TRIALS:.0f}% of images of {size[1]} x {size[0]} '
        f'pixels into one color ({count} of {TRIALS} trials): {" and ".join(shares)} '
        f'{"are" if len(shares) > 1 else "is"} in pixels; for this size use {better}'
    )


def parse_transforms(spec: str, vocab: Tokenizer | None = None) -> Transforms:
    """Parse `a(1, x=2)|b`; only the functions named in the text are executed.

    Args:
      spec: Text of the transforms.
      vocab: Vocabulary for functions with a parameter `vocab`.

    Raises:
      UserError: if the text is malformed, or a name or an argument is wrong.
    """
    steps_and_kinds = []
    nodes = signatures.parse_transforms(spec)
    for node in nodes:
        try:
            steps_and_kinds.append(_make_step(node, vocab))
        except UserError as error:
            raise UserError(f'transforms {spec!r}: {ast.unparse(node)!r}: {error}') from error
    steps = tuple(step for step, _ in steps_and_kinds)
    random = any(random for _, random in steps_and_kinds)
    moving = [node for node in nodes if signatures.function_name(node) != _DROP_ALPHA]
    crops = _crops_first(list(map(_find_factory, moving)))
    return Transforms(spec, steps, random, vocab, crops, drops_alpha=len(moving) < len(nodes))


def without_annotations(spec: str) -> str:
    """Remove the transforms of annotations from `spec`, for images without annotations.

    Raises:
      UserError: if the text is malformed, or a name is wrong.
    """
    nodes = signatures.parse_transforms(spec)
    remaining = [
        node for node in nodes if not registry.is_marked(_find_factory(node), registry.ANNOTATIONS)
    ]
    return '|'.join(map(ast.unparse, remaining))


def only_text_transforms(spec: str) -> str:
    """Select the transforms of texts in `spec`, for texts without an image.

    Raises:
      UserError: if the text is malformed, or a name is wrong.
    """
    nodes = signatures.parse_transforms(spec)
    return '|'.join(
        ast.unparse(node)
        for node in nodes
        if registry.is_marked(_find_factory(node), registry.TEXTS)
    )


def arguments_of(spec: str, name: str) -> dict[str, Any] | None:
    """Return the arguments and defaults of the last transform `name` in a text; None without it.

    The other transforms of the text need not exist.

    Raises:
      UserError: if the text is malformed, or the arguments are not plain values.
    """
    for node in reversed(signatures.parse_transforms(spec)):
        if signatures.function_name(node) == name:
            args, kwargs = signatures.arguments(node)
            bound = inspect.signature(registry.find_function(name)).bind(*args, **kwargs)
            bound.apply_defaults()
            return bound.arguments
    return None


def _crops_first(factories: Sequence[Callable[..., Any]]) -> bool:
    resizes = any(registry.is_marked(f, registry.RESIZES_ON_DEMAND) for f in factories[:1])
    first = factories[resizes : resizes + 1]
    return any(registry.is_marked(f, registry.CROPS_AT_ONCE) for f in first)


def _find_factory(node: ast.expr) -> Callable[..., Any]:
    return registry.find_function(signatures.function_name(node))


def _make_step(node: ast.expr, vocab: Tokenizer | None) -> tuple[Step, bool]:
    """Make the step of a node; return it, and whether it draws random numbers."""
    args, kwargs = signatures.arguments(node)
    factory = _find_factory(node)
    signature = inspect.signature(factory)
    if 'vocab' in signature.parameters:
        kwargs['vocab'] = vocab
    try:
        signature.bind(*args, **kwargs)
        apply = factory(*args, **kwargs)
    except (TypeError, ValueError) as error:
        valid = str(signature).partition(' -> ')[0]
        raise UserError(f'{error}; its parameters are {valid}') from error
    return _wrap_step(apply, ast.unparse(node))


def _wrap_step(apply: Any, name: str) -> tuple[Step, bool]:
    """Wrap `apply` as a function of (record, rng), and return whether it takes `rng`."""
    takes = tuple(inspect.signature(apply).parameters) if callable(apply) else ()
    if takes not in {('record',), ('record', 'rng'), ('image',), ('image', 'rng')}:
        raise UserError(
            'must return a function of (record), (record, rng), (image) or (image, rng)'
        )
    random = 'rng' in takes
    change = apply if takes[0] == 'record' else _lift_to_record(apply)

    def step(record: Record, rng: np.random.Generator) -> Record:
        try:
            return change(record, rng) if random else change(record)
        except UserError as error:
            raise UserError(f'{name}: {error}') from error

    return step, random


def _lift_to_record(apply: Callable[..., np.ndarray]) -> Callable[..., Record]:
    """Turn a function of a frame into one of records; it keeps the size if other fields need it."""

    def change(record: Record, *rng: np.random.Generator) -> Record:
        before = image_size(record)
        changed = {**record, 'image': geometry.map_frames(apply, record['image'], *rng)}
        if image_size(changed) != before:
            check_image_is_alone(record)
        return changed

    return change
