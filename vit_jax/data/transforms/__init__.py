"""What happens to an example on its way to the batch, as one line of text.

    inception_crop(224)|flip|randaugment(2, 15)

is read by `parse_transforms`. A name stands for a function of `TRANSFORMS`, or, dotted
(`my_lab.augment.solarize(128)`), for one of the user's own. It is called once, with the
arguments given in the text; it checks them (ValueError) and returns the function that is
applied to each example: `apply(image)` or `apply(image, rng)`, where image is uint8
[H, W, C] and must not be changed in place, or `apply(record)` or `apply(record, rng)`
where the whole record is needed. `rng` is a `numpy.random.Generator` of this example
alone, valid until the call returns.
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
from vit_jax.data.transforms import image, randaugment, text
from vit_jax.data.vocabulary import Codec
from vit_jax.errors import UserError, nearest

Step = Callable[[Record, np.random.Generator], Record]

TRANSFORMS: dict[str, Callable[..., Callable]] = {
    factory.__name__: factory
    for factory in (
        image.central_crop,
        image.flip,
        image.inception_crop,
        image.keep,
        image.pad_and_crop,
        image.random_crop,
        image.random_erasing,
        image.resize,
        image.resize_small,
        image.value_range,
        randaugment.randaugment,
        text.lower,
        text.swap,
        text.tokenize,
    )
}


@dataclasses.dataclass(frozen=True)
class Transforms:
    """Transforms applied one after the other.

    Attributes:
      spec: the text they were read from.
      steps: functions of (record, rng).
      random: whether any of them draws random numbers.
      vocab: for those that make ids of text.
    """

    spec: str
    steps: tuple[Step, ...]
    random: bool
    vocab: Codec | None = None

    def __call__(self, record: Record, rng: np.random.Generator) -> Record:
        for step in self.steps:
            record = step(record, rng)
        return record

    def __reduce__(self) -> tuple[Any, ...]:
        # The steps are closures; the text is what travels to worker processes.
        return parse_transforms, (self.spec, self.vocab)


def parse_transforms(spec: str, vocab: Codec | None = None) -> Transforms:
    """Reads `a(1, x=2)|b`; nothing in the text is executed but the functions it names.

    Args:
      spec: the text.
      vocab: given to the functions that take a `vocab`.

    Raises:
      UserError: if the text is malformed, or a name or an argument is wrong.
    """
    if not spec.strip():
        return Transforms(spec, (), random=False, vocab=vocab)
    try:
        tree = ast.parse(spec.strip(), mode='eval').body
    except (SyntaxError, ValueError) as error:
        raise UserError(
            f"transforms {spec!r}: {error}; write for example 'pad_and_crop(4)|flip'"
        ) from error
    made = [_make(node, spec, vocab) for node in _pieces(tree)]
    steps = tuple(step for step, _ in made)
    return Transforms(spec, steps, any(random for _, random in made), vocab)


def _pieces(node: ast.expr) -> list[ast.expr]:
    """`a|b|c` is a Python expression: a tree of binary operators."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_pieces(node.left), *_pieces(node.right)]
    return [node]


def _make(node: ast.expr, spec: str, vocab: Codec | None) -> tuple[Step, bool]:
    """The step that `node` names, and whether it draws random numbers."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    where = f'transforms {spec!r}: {ast.unparse(node)!r}'
    args, kwargs = _arguments(call, where)
    factory = _factory(ast.unparse(call.func), where)
    signature = inspect.signature(factory)
    if 'vocab' in signature.parameters:
        kwargs['vocab'] = vocab
    try:
        signature.bind(*args, **kwargs)
        apply = factory(*args, **kwargs)
    except (TypeError, ValueError) as error:
        known = str(signature).partition(' -> ')[0]
        raise UserError(f'{where}: {error}; it takes {known}') from error
    return _step(apply, where)


def _arguments(call: ast.Call, where: str) -> tuple[list[Any], dict[str, Any]]:
    try:
        if any(keyword.arg is None for keyword in call.keywords):
            raise ValueError('**')
        args = [ast.literal_eval(arg) for arg in call.args]
        return args, {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    except (TypeError, ValueError) as error:
        raise UserError(
            f'{where}: arguments must be plain numbers, strings or tuples of them'
        ) from error


def _factory(name: str, where: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition('.')
    if not module:
        if name not in TRANSFORMS:
            raise UserError(f'{where}: ' + nearest('transform', name, TRANSFORMS))
        return TRANSFORMS[name]
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f'{where}: cannot import {name!r}: {error}') from error
    if not callable(found):
        raise UserError(f'{where}: {name!r} is no function')
    return found


def _step(apply: Any, where: str) -> tuple[Step, bool]:
    takes = tuple(inspect.signature(apply).parameters) if callable(apply) else ()
    steps: dict[tuple[str, ...], Step] = {
        ('record', 'rng'): apply,
        ('record',): lambda record, rng: apply(record),
        ('image', 'rng'): lambda record, rng: {**record, 'image': apply(record['image'], rng)},
        ('image',): lambda record, rng: {**record, 'image': apply(record['image'])},
    }
    if takes not in steps:
        raise UserError(
            f'{where}: must return a function of (image), (image, rng), (record) or (record, rng)'
        )
    return steps[takes], 'rng' in takes
