"""What happens to an example on its way to the batch, as one line of text.

    inception_crop(224)|flip|randaugment(2, 15)

is read by `parse_transforms`. A name stands for a function of `TRANSFORMS`, or, dotted
(`my_lab.tf.foo(3)`), for one of the user's own. It is called once, with the arguments
given in the text, checks them, and returns the function that is applied to each example:
`apply(image)` or `apply(image, rng)`, uint8 [H, W, C] in and out, or
`apply(record)` or `apply(record, rng)` where the whole record is needed.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.data.records import Record
from vit_jax.errors import UserError, nearest

Step = Callable[[Record, np.random.Generator], Record]


@dataclasses.dataclass(frozen=True)
class Transforms:
    """Transforms applied one after the other.

    Attributes:
      spec: the text they were read from.
      steps: functions of (record, rng).
      random: whether any of them draws random numbers.
    """

    spec: str
    steps: tuple[Step, ...]
    random: bool

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        for step in self.steps:
            record = step(record, rng)
        return record

    def __reduce__(self) -> tuple[Any, ...]:
        # The steps are closures; the text is what travels to worker processes.
        return parse_transforms, (self.spec,)


def parse_transforms(spec: str) -> Transforms:
    """Reads `a(1, x=2)|b`; nothing in the text is executed but the named functions.

    Raises:
      UserError: if the text is malformed, or a name or an argument is wrong.
    """
    if not spec.strip():
        return Transforms(spec, (), random=False)
    try:
        tree = ast.parse(spec.strip(), mode='eval').body
    except SyntaxError as error:
        raise UserError(
            f'transforms {spec!r}: {error.msg}; write for example {EXAMPLE!r}'
        ) from None
    applied = [_make(node, spec) for node in _pieces(tree)]
    random = any('rng' in inspect.signature(apply).parameters for apply in applied)
    return Transforms(spec, tuple(_step(apply) for apply in applied), random)


EXAMPLE = 'pad_and_crop(4)|flip'


def _pieces(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_pieces(node.left), *_pieces(node.right)]
    return [node]


def _make(node: ast.expr, spec: str) -> Callable[..., Any]:
    """Calls the factory that `node` names with its literal arguments."""
    text = ast.unparse(node)
    called = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    try:
        args = [ast.literal_eval(arg) for arg in called.args]
        kwargs = {k.arg: ast.literal_eval(k.value) for k in called.keywords if k.arg}
        if len(kwargs) < len(called.keywords):
            raise ValueError
    except ValueError:
        raise UserError(
            f'transforms {spec!r}: the arguments in {text!r} must be plain numbers, strings or '
            'tuples'
        ) from None
    factory = _factory(ast.unparse(called.func), spec)
    try:
        inspect.signature(factory).bind(*args, **kwargs)
        return factory(*args, **kwargs)
    except (TypeError, ValueError) as error:
        signature = f'{ast.unparse(called.func)}{inspect.signature(factory)}'
        raise UserError(f'transforms {spec!r}: {text!r}: {error} (it is {signature})') from error


def _factory(name: str, spec: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition('.')
    if not module:
        if name not in TRANSFORMS:
            raise UserError(f'transforms {spec!r}: ' + nearest('transform', name, TRANSFORMS))
        return TRANSFORMS[name]
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f'transforms {spec!r}: cannot import {name!r}: {error}') from error


def _step(apply: Callable[..., Any]) -> Step:
    takes = list(inspect.signature(apply).parameters)
    draws = 'rng' in takes
    if takes[0] == 'record':
        return apply if draws else lambda record, rng: apply(record)
    if draws:
        return lambda record, rng: {**record, 'image': apply(record['image'], rng)}
    return lambda record, rng: {**record, 'image': apply(record['image'])}


def flip() -> Callable:
    """Mirrors left and right, half of the time."""

    def apply(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return image[:, ::-1] if rng.random() < 0.5 else image

    return apply


def pad_and_crop(pad: int) -> Callable:
    """Pads with black by `pad` pixels and crops the original size at random.

    The augmentation of He et al. (2016), section 4.2, with pad 4 for 32 x 32 images.
    """
    _check_positive(pad=pad)

    def apply(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        height, width, channels = image.shape
        padded = np.zeros((height + 2 * pad, width + 2 * pad, channels), image.dtype)
        padded[pad:-pad, pad:-pad] = image
        y, x = rng.integers(2 * pad + 1), rng.integers(2 * pad + 1)
        return padded[y : y + height, x : x + width]

    return apply


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name}={value!r} must be a positive integer')


TRANSFORMS: dict[str, Callable[..., Callable]] = {
    factory.__name__: factory for factory in (flip, pad_and_crop)
}
