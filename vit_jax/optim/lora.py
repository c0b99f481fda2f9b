"""Low-rank adaptation: fine-tuning trains small adapters of kernels that stay as they are.

LoRA (Hu et al., 2021, arXiv:2106.09685) replaces a kernel W by W + alpha / rank A B, with A of
`rank` columns and B of `rank` rows, zero at the start. DoRA (Liu et al., 2024, arXiv:2402.09353,
equation 5) gives each output a magnitude m of its own and the direction of that sum; as in section
4.3, the norm that it is divided by has no gradient.

Adapters are leaves of the tree of parameters beside their kernel, `fc1/lora/kernel/a`. A fused
projection of attention, `qkv`, has one for each of its parts: `qkv/lora/query/a`. The kernel is
replaced before the model is called, so that no model knows of them. A step needs the gradient of
each adapted kernel, which is as large as the kernel, but no other; the optimizer's state, what
devices exchange and the checkpoints are small.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from vit_jax.config.run import Lora
from vit_jax.errors import UserError
from vit_jax.optim.muon import TO_HEADS, is_stacked, kernel_axes
from vit_jax.tree_paths import param_paths

PyTree = Any
LORA, WHOLE = 'lora', 'kernel'  # names in the tree
PARTS = {'q': 'query', 'k': 'key', 'v': 'value'}
LEAF = re.compile(rf'(^|/){LORA}/\w+/(a|b|magnitude)$')


class Part(NamedTuple):
    """A matrix that has an adapter: a kernel, or the queries, keys or values of a fused one.

    Attributes:
      name: in the tree, below `lora`.
      number: of the part, on the axis after the inputs; None for a whole kernel.
      stack: shape of the axes in front, (L,) for scanned blocks.
      inputs, outputs: shapes.
    """

    name: str
    number: int | None
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def take(self, kernel: Any) -> Any:
        """This part of a kernel."""
        axis = len(self.stack) + len(self.inputs)
        return kernel if self.number is None else jnp.take(kernel, self.number, axis)

    @property
    def columns(self) -> tuple[int, ...]:
        """The axes of its inputs."""
        return tuple(range(len(self.stack), len(self.stack) + len(self.inputs)))

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the part."""
        return (*self.stack, *self.inputs, *self.outputs)


def parts(path: str, kernel: Any) -> list[tuple[str, Part]]:
    """The parts of a kernel, with their paths for patterns."""
    stacked = is_stacked(path, kernel)
    stack, shape = tuple(kernel.shape[:stacked]), tuple(kernel.shape[stacked:])
    inputs, outputs = (tuple(shape[i] for i in axes) for axes in kernel_axes(path, len(shape)))
    if not (fused := TO_HEADS.search(path)):
        return [(path, Part(WHOLE, None, stack, inputs, outputs))]
    above = path[: fused.start()]
    return [
        (f'{above}/{PARTS[letter]}/kernel', Part(PARTS[letter], i, stack, inputs, outputs))
        for i, letter in enumerate(fused[1])
    ]


def is_kernel(path: str, leaf: Any) -> bool:
    """Whether a parameter is a matrix that can have an adapter."""
    return path.endswith('/kernel') and len(leaf.shape) - is_stacked(path, leaf) >= 2


def add(params: PyTree, options: Lora, key: jax.Array) -> PyTree:
    """The parameters and initial adapters, with which a model computes the same.

    A is uniform in +-1 / sqrt(inputs), as in `peft`; B is zero.

    Args:
      params: of the model.
      options: of the adapters.
      key: of the initial values.

    Raises:
      UserError: for a pattern that matches no kernel.
    """
    flat = traverse_util.flatten_dict(dict(params), sep='/')
    unused = {*options.layers}
    for path, kernel in param_paths(params).items():
        for name, part in parts(path, kernel) if is_kernel(path, kernel) else ():
            if not (found := {pattern for pattern in options.layers if _matches(pattern, name)}):
                continue
            unused -= found
            place = f'{path.removesuffix("/kernel")}/{LORA}/{part.name}'
            drawn = jax.random.fold_in(key, zlib.crc32(name.encode()))
            made = _initial(part, kernel, options, drawn)
            flat |= {f'{place}/{leaf}': value for leaf, value in made.items()}
    if unused:
        kernels = (pair for pair in param_paths(params).items() if is_kernel(*pair))
        example = next((parts(*pair)[0][0] for pair in kernels), '')
        raise UserError(
            f'config.lora.layers: {min(unused)!r} matches no kernel; one is {example!r}'
        )
    return traverse_util.unflatten_dict(flat, sep='/')


def _matches(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except re.error as error:
        raise UserError(f'config.lora: {pattern!r} is not a regex: {error}') from None


def _initial(part: Part, kernel: Any, options: Lora, key: jax.Array) -> dict[str, jax.Array]:
    limit = math.prod(part.inputs) ** -0.5
    shape = (*part.stack, *part.inputs, options.rank)
    made = {
        'a': jax.random.uniform(key, shape, jnp.float32, -limit, limit),
        'b': jnp.zeros((*part.stack, options.rank, *part.outputs), jnp.float32),
    }
    return made | ({'magnitude': _norms(part, part.take(kernel))} if options.dora else {})


def _norms(part: Part, matrix: Any) -> jax.Array:
    """The norm of each output's column, [*stack *outputs]."""
    return jnp.sqrt(jnp.sum(matrix**2, axis=part.columns))


def merge(params: PyTree, scale: float) -> PyTree:
    """The parameters of the model itself: kernels with their adapters, which are left out.

    Args:
      params: with adapters, or without.
      scale: alpha / rank.
    """
    return _merged(params, scale, '')


def _merged(params: Mapping[str, PyTree], scale: float, above: str) -> dict[str, PyTree]:
    found = {
        name: _merged(child, scale, f'{above}{name}/') if isinstance(child, Mapping) else child
        for name, child in params.items()
        if name != LORA
    }
    if LORA in params:
        found[WHOLE] = _adapted(f'{above}{WHOLE}', params[WHOLE], params[LORA], scale)
    return found


def _adapted(path: str, kernel: Any, adapters: Mapping[str, Any], scale: float) -> jax.Array:
    """A kernel with its adapters."""
    found = [part for _, part in parts(path, kernel)]
    made = [
        _adapted_part(part, part.take(kernel), adapters[part.name], scale)
        if part.name in adapters
        else part.take(kernel)
        for part in found
    ]
    if found[0].number is None:
        return made[0]
    return jnp.stack(made, axis=len(found[0].stack) + len(found[0].inputs))


def _adapted_part(part: Part, matrix: Any, adapter: Mapping[str, Any], scale: float) -> jax.Array:
    a, b = adapter['a'], adapter['b']
    a = a.reshape(*part.stack, -1, a.shape[-1])
    b = b.reshape(*part.stack, a.shape[-1], -1)
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    total = matrix + scale * product.reshape(part.shape)
    if 'magnitude' not in adapter:
        return total
    factor = adapter['magnitude'] / jax.lax.stop_gradient(_norms(part, total))
    return total * jnp.expand_dims(factor, part.columns)


def without(params: PyTree) -> PyTree:
    """The parameters, or their shapes, without adapters."""
    return {
        name: without(child) if isinstance(child, Mapping) else child
        for name, child in params.items()
        if name != LORA
    }


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a run.

    Attributes:
      options: of the config.
      held: paths of the parameters that are never trained.
    """

    options: Lora
    held: frozenset[str]

    without = staticmethod(without)

    @property
    def pattern(self) -> str:
        """Matches the paths of `held`."""
        return f'^({"|".join(map(re.escape, sorted(self.held)))})$'

    def extend(self, variables: Mapping[str, PyTree], seed: int) -> dict[str, PyTree]:
        """A model's variables with initial adapters."""
        params = add(variables['params'], self.options, jax.random.key(seed))
        return {**variables, 'params': params}

    def wrap(self, model: Any) -> Adapted:
        """The model, called with its adapters."""
        return Adapted(model, self.options.scale)

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The trained parameters, and those that never change."""
        flat = traverse_util.flatten_dict(dict(params), sep='/')
        own = {path: leaf for path, leaf in flat.items() if path not in self.held}
        base = {path: leaf for path, leaf in flat.items() if path in self.held}
        nested: list[PyTree] = [traverse_util.unflatten_dict(tree, sep='/') for tree in (own, base)]
        return nested[0], nested[1]

    def own(self, state: Any) -> Any:
        """A run's state, or its shapes, with the trained parameters alone."""
        return dataclasses.replace(state, params=self.split(state.params)[0])

    def remarks(self, params: PyTree) -> list[str]:
        """A line that counts what is trained."""
        sizes = {path: leaf.size for path, leaf in param_paths(params).items()}
        trained = sum(size for path, size in sizes.items() if path not in self.held)
        kind = 'DoRA' if self.options.dora else 'LoRA'
        return [f'{kind} of rank {self.options.rank}: {trained:,} parameters are trained and saved']


def make(lora: Lora, model: Any, params: PyTree) -> tuple[Adapters, PyTree]:
    """The adapters of a run, and the shapes of its parameters with them.

    Args:
      lora: `config.lora`, with a rank above 0.
      model: the Linen module, whose head is trained.
      params: shapes of its parameters.

    Raises:
      UserError: for a pattern that matches nothing.
    """
    params = jax.eval_shape(lambda held: add(held, lora, jax.random.key(0)), params)
    paths = param_paths(params)
    for pattern in lora.train:
        if not any(_matches(pattern, path) for path in paths):
            raise UserError(f'config.lora.train: {pattern!r} matches no parameter')
    heads = (f'^{re.escape(head)}/' for head in model.head_layers)
    own = (LEAF.pattern, *heads, *lora.train)
    held = [path for path in paths if not any(_matches(pattern, path) for pattern in own)]
    return Adapters(lora, frozenset(held)), params


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model whose kernels get their adapters before each call; otherwise as the model.

    Attributes:
      model: the Linen module.
      scale: alpha / rank.
    """

    model: Any
    scale: float

    def apply(self, variables: Mapping[str, PyTree], *inputs: Any, **options: Any) -> Any:
        """`model.apply` with the merged kernels."""
        merged = {**variables, 'params': merge(variables['params'], self.scale)}
        return self.model.apply(merged, *inputs, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
