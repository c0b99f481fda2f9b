"""Fine-tuning trains small adapters of frozen kernels, or a few of the parameters.

LoRA (Hu et al., 2021, arXiv:2106.09685) replaces a kernel W by W + alpha / rank A B, with A of
`rank` columns and B of `rank` rows, zero at the start. DoRA (Liu et al., 2024, arXiv:2402.09353,
equation 5) gives each output a magnitude m and the direction of that sum; as in section 4.3, the
norm in the denominator has no gradient. VeRA (Kopiczko et al., 2024, arXiv:2310.11454, equation 2)
trains only two vectors, W + A diag(d) B diag(b), between random A and B that layers of one size
share. IA3 (Liu et al., 2022, arXiv:2205.05638, section 3.3) multiplies outputs, and the inputs of
an MLP's second layer, by learned factors. BitFit (Ben Zaken et al., 2022, arXiv:2106.10199) trains
biases, and prompts (VPT-shallow, Jia et al., 2022, arXiv:2203.12119) tokens beside the patches.

Adapters are leaves of the parameter tree next to their kernel, `fc1/lora/kernel/a`. A fused
attention projection, `qkv`, has one adapter per part: `qkv/lora/query/a`. Kernels are replaced
before the model is called, so models need no change. A step needs the gradient of each adapted
kernel, which is as large as the kernel, but no other; optimizer state, communication and
checkpoints are small.
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
from jax import Array

from vit_jax.array_types import Float
from vit_jax.config.run import LORA_LAYERS, Lora
from vit_jax.errors import UserError
from vit_jax.optim.muon import TO_HEADS, is_stacked, kernel_axes
from vit_jax.tree_paths import param_paths

PyTree = Any
LORA, WHOLE, BIAS = 'lora', 'kernel', 'bias'  # names in the tree
PARTS = {'q': 'query', 'k': 'key', 'v': 'value'}
LEAVES = 'a|b|magnitude|lambda_d|lambda_b|factor|input_factor'
LEAF = re.compile(rf'(^|/){LORA}/\w+/({LEAVES})$')
IA3_LAYERS = ('(key|value)/kernel$', r'\bfc2/kernel$')
SECOND_OF_MLP = re.compile(r'\bfc2/kernel$')
TRAINED = {'bitfit': r'(^|/)bias$', 'prompts': r'(^|/)register_tokens$'}
TITLES = {
    **{'lora': 'LoRA', 'vera': 'VeRA', 'ia3': 'IA3', 'bitfit': 'BitFit'},
    'prompts': 'visual prompts',
}
SHARED_KEY = 0  # of VeRA's random matrices
INITIAL_D = 0.1


class Part(NamedTuple):
    """A matrix with an adapter: a kernel, or the queries, keys or values of a fused one.

    Attributes:
      name: Name in the tree, below `lora`.
      number: Index of the part on the axis after the inputs; None for a whole kernel.
      stack: Shape of the leading axes, (L,) for scanned blocks.
      inputs, outputs: Shapes of inputs and outputs.
    """

    name: str
    number: int | None
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def take(self, kernel: Any) -> Any:
        """Return this part of a kernel."""
        axis = len(self.stack) + len(self.inputs)
        return kernel if self.number is None else jnp.take(kernel, self.number, axis)

    @property
    def columns(self) -> tuple[int, ...]:
        """Axes of the inputs."""
        return tuple(range(len(self.stack), len(self.stack) + len(self.inputs)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.stack, *self.inputs, *self.outputs)


def parts(path: str, kernel: Any) -> list[tuple[str, Part]]:
    """List the parts of a kernel, with their paths for patterns."""
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
    """Return whether a parameter is a matrix that can have an adapter."""
    return path.endswith('/kernel') and len(leaf.shape) - is_stacked(path, leaf) >= 2


def add(params: PyTree, options: Lora, key: jax.Array) -> PyTree:
    """Add initial adapters to parameters, which do not change the model's outputs.

    As in `peft`, A is uniform in +-1 / sqrt(inputs) and B zero, factors are one, and VeRA's d 0.1
    and b zero. BitFit and prompts add none.

    Args:
      params: Parameters of the model.
      options: Options of the adapters.
      key: Key of the initial values.

    Raises:
      UserError: for a pattern that matches no kernel.
    """
    flat = traverse_util.flatten_dict(dict(params), sep='/')
    patterns = kernel_patterns(options)
    unused = {*patterns}
    for path, kernel in param_paths(params).items():
        for name, part in parts(path, kernel) if is_kernel(path, kernel) else ():
            if not (matches := {pattern for pattern in patterns if _matches(pattern, name)}):
                continue
            unused -= matches
            place = f'{path.removesuffix("/kernel")}/{LORA}/{part.name}'
            part_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            leaves = _initial_leaves(part, kernel, options, part_key, name)
            flat |= {f'{place}/{leaf}': value for leaf, value in leaves.items()}
    if unused:
        kernels = (pair for pair in param_paths(params).items() if is_kernel(*pair))
        example = next((parts(*pair)[0][0] for pair in kernels), '')
        raise UserError(
            f'config.lora.layers: {min(unused)!r} matches no kernel; one is {example!r}'
        )
    return traverse_util.unflatten_dict(flat, sep='/')


def kernel_patterns(options: Lora) -> tuple[str, ...]:
    """Return the patterns of the adapted kernels; none for methods without adapters."""
    if options.method in TRAINED:
        return ()
    is_default = tuple(options.layers) == LORA_LAYERS
    return IA3_LAYERS if options.method == 'ia3' and is_default else tuple(options.layers)


def _matches(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except re.error as error:
        raise UserError(f'config.lora: {pattern!r} is not a regex: {error}') from None


def _initial_leaves(
    part: Part, kernel: Any, options: Lora, key: jax.Array, name: str
) -> dict[str, jax.Array]:
    if options.method == 'ia3':
        if SECOND_OF_MLP.search(name):
            return {'input_factor': jnp.ones((*part.stack, *part.inputs), jnp.float32)}
        return {'factor': jnp.ones((*part.stack, *part.outputs), jnp.float32)}
    if options.method == 'vera':
        return {
            'lambda_d': jnp.full((*part.stack, options.rank), INITIAL_D, jnp.float32),
            'lambda_b': jnp.zeros((*part.stack, *part.outputs), jnp.float32),
        }
    limit = math.prod(part.inputs) ** -0.5
    shape = (*part.stack, *part.inputs, options.rank)
    leaves = {
        'a': jax.random.uniform(key, shape, jnp.float32, -limit, limit),
        'b': jnp.zeros((*part.stack, options.rank, *part.outputs), jnp.float32),
    }
    return leaves | ({'magnitude': _norms(part, part.take(kernel))} if options.dora else {})


def _norms(part: Part, matrix: Any) -> jax.Array:
    """Compute the norm of each output's column, [*stack *outputs]."""
    return jnp.sqrt(jnp.sum(matrix**2, axis=part.columns))


def merge_adapters(params: PyTree, scale: float) -> PyTree:
    """Merge adapters into their kernels, and drop them from the tree.

    Args:
      params: Parameters, with adapters or without.
      scale: Alpha / rank.
    """
    return _merge_below(params, scale, '')


def _merge_below(params: Mapping[str, PyTree], scale: float, above: str) -> dict[str, PyTree]:
    merged = {
        name: _merge_below(child, scale, f'{above}{name}/') if isinstance(child, Mapping) else child
        for name, child in params.items()
        if name != LORA
    }
    if LORA in params:
        path = f'{above}{WHOLE}'
        merged[WHOLE] = _merge_kernel(path, params[WHOLE], params[LORA], scale)
        if BIAS in params:
            merged[BIAS] = _merge_bias(path, params[WHOLE], params[BIAS], params[LORA])
    return merged


def _merge_kernel(path: str, kernel: Any, adapters: Mapping[str, Any], scale: float) -> jax.Array:
    """Merge a kernel with its adapters."""
    kernel_parts = [part for _, part in parts(path, kernel)]
    matrices = [
        _merge_part(part, part.take(kernel), adapters[part.name], scale)
        if part.name in adapters
        else part.take(kernel)
        for part in kernel_parts
    ]
    if kernel_parts[0].number is None:
        return matrices[0]
    return jnp.stack(matrices, axis=len(kernel_parts[0].stack) + len(kernel_parts[0].inputs))


def _merge_bias(path: str, kernel: Any, bias: Any, adapters: Mapping[str, Any]) -> jax.Array:
    """Multiply a bias by the factors of its outputs (IA3); other adapters leave it."""
    if not any('factor' in adapter for adapter in adapters.values()):
        return bias
    kernel_parts = [part for _, part in parts(path, kernel)]
    if kernel_parts[0].number is None:
        return bias * adapters[WHOLE]['factor']
    axis = len(kernel_parts[0].stack)
    biases = jnp.moveaxis(bias, axis, 0)
    factors = (adapters.get(part.name, {}).get('factor', 1.0) for part in kernel_parts)
    return jnp.stack([bias * factor for bias, factor in zip(biases, factors, strict=True)], axis)


def shared_matrices(
    inputs: int, outputs: int, rank: int
) -> tuple[Float[Array, 'I r'], Float[Array, 'r O']]:
    """Draw VeRA's random matrices, uniform in +-1 / sqrt(inputs) and +-1 / sqrt(rank)."""
    key = jax.random.key(SHARED_KEY, impl='threefry2x32')
    a_key, b_key = (jax.random.fold_in(key, size) for size in (inputs, 2**20 + outputs))
    limits = inputs**-0.5, rank**-0.5
    a = jax.random.uniform(a_key, (inputs, rank), jnp.float32, -limits[0], limits[0])
    b = jax.random.uniform(b_key, (rank, outputs), jnp.float32, -limits[1], limits[1])
    return a, b


def _merge_part(part: Part, matrix: Any, adapter: Mapping[str, Any], scale: float) -> jax.Array:
    if 'factor' in adapter:
        return matrix * jnp.expand_dims(adapter['factor'], part.columns)
    if 'input_factor' in adapter:
        rows = adapter['input_factor']
        return matrix * rows.reshape(*rows.shape, *[1] * len(part.outputs))
    if 'lambda_d' in adapter:
        d, b = adapter['lambda_d'], adapter['lambda_b']
        first, second = shared_matrices(
            math.prod(part.inputs), math.prod(part.outputs), d.shape[-1]
        )
        second = second * b.reshape(*part.stack, 1, -1)
        product = jnp.matmul(d[..., None, :] * first, second, precision=jax.lax.Precision.HIGHEST)
        return matrix + product.reshape(part.shape)
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
    """Return parameters, or their shapes, without adapters."""
    return {
        name: without(child) if isinstance(child, Mapping) else child
        for name, child in params.items()
        if name != LORA
    }


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Adapters of a run.

    Attributes:
      options: Options from the config.
      held: Paths of parameters that are never trained.
    """

    options: Lora
    held: frozenset[str]

    def without(self, params: PyTree) -> PyTree:
        """Return parameters, or their shapes, that the checkpoint has: no adapters or prompts."""
        flat = traverse_util.flatten_dict(without(params), sep='/')
        new = TRAINED['prompts'] if self.options.method == 'prompts' else '$.'
        remaining = {path: leaf for path, leaf in flat.items() if not re.search(new, path)}
        return traverse_util.unflatten_dict(remaining, sep='/')

    @property
    def pattern(self) -> str:
        """Pattern that matches the paths of `held`."""
        return f'^({"|".join(map(re.escape, sorted(self.held)))})$'

    def extend(self, variables: Mapping[str, PyTree], seed: int) -> dict[str, PyTree]:
        """Add initial adapters to a model's variables."""
        params = add(variables['params'], self.options, jax.random.key(seed))
        return {**variables, 'params': params}

    def wrap(self, model: Any) -> Adapted:
        """Wrap a model, so that it is called with its adapters."""
        return Adapted(model, self.options.scale)

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Split parameters into trained and frozen ones."""
        flat = traverse_util.flatten_dict(dict(params), sep='/')
        trained = {path: leaf for path, leaf in flat.items() if path not in self.held}
        base = {path: leaf for path, leaf in flat.items() if path in self.held}
        nested: list[PyTree] = [
            traverse_util.unflatten_dict(tree, sep='/') for tree in (trained, base)
        ]
        return nested[0], nested[1]

    def own(self, state: Any) -> Any:
        """Return a run's state, or its shapes, with only the trained parameters."""
        return dataclasses.replace(state, params=self.split(state.params)[0])

    def remarks(self, params: PyTree) -> list[str]:
        """Describe how many parameters are trained."""
        sizes = {path: leaf.size for path, leaf in param_paths(params).items()}
        trained = sum(size for path, size in sizes.items() if path not in self.held)
        kind = 'DoRA' if self.options.dora else TITLES[self.options.method]
        rank = f' of rank {self.options.rank}' if self.options.rank else ''
        return [f'{kind}{rank}: {trained:,} parameters are trained and saved']


def make_adapters(lora: Lora, model: Any, params: PyTree) -> tuple[Adapters, PyTree]:
    """Make the adapters of a run, and the shapes of its parameters with them.

    Args:
      lora: `config.lora`, which adapts something.
      model: Linen module, whose head is trained.
      params: Shapes of its parameters.

    Raises:
      UserError: for a pattern that matches nothing.
    """
    params = jax.eval_shape(lambda frozen_paths: add(frozen_paths, lora, jax.random.key(0)), params)
    paths = param_paths(params)
    if not any(_matches(TRAINED.get(lora.method, ''), path) for path in paths):
        needed = ': set config.model.registers' if lora.method == 'prompts' else ''
        raise UserError(
            f'config.lora.method={lora.method}: the model has no such parameter{needed}'
        )
    for pattern in lora.train:
        if not any(_matches(pattern, path) for path in paths):
            raise UserError(f'config.lora.train: {pattern!r} matches no parameter')
    heads = (f'^{re.escape(head)}/' for head in model.head_layers)
    by_method = (TRAINED[lora.method],) if lora.method in TRAINED else ()
    trained_patterns = (LEAF.pattern, *by_method, *heads, *lora.train)
    frozen_paths = [
        path for path in paths if not any(_matches(pattern, path) for pattern in trained_patterns)
    ]
    return Adapters(lora, frozenset(frozen_paths)), params


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model whose kernels are merged with their adapters before each call.

    Attributes:
      model: Linen module.
      scale: Alpha / rank.
    """

    model: Any
    scale: float

    def apply(self, variables: Mapping[str, PyTree], *inputs: Any, **options: Any) -> Any:
        """Call `model.apply` with merged kernels."""
        return self.model.apply(self.merged(variables), *inputs, **options)

    def merged(self, variables: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Return the variables of `model`, with merged kernels."""
        return {**variables, 'params': merge_adapters(variables['params'], self.scale)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
