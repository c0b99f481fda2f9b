"""Muon for this package's kernel layouts, built from parts of Optax."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from vit_jax.tree_paths import block_paths, map_paths, param_paths, path_name

PyTree = Any


def muon(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.0,
    mask: Callable[[Any], Any] | None = None,
    *,
    matrices: str = r'block.*kernel$',
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    rms: float = 0.2,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Momentum orthogonalized by Newton-Schulz iteration for kernels, AdamW for the rest.

    Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; weight decay and update sizes
    follow Liu et al., 2025, arXiv:2502.16982, section 2.2. Updates of a kernel with fan-in n and
    fan-out m are multiplied by rms * sqrt(max(n, m)). Their root mean square is then about `rms`,
    as with AdamW, so that AdamW's learning rate and weight decay can be reused. Queries, keys,
    values and scanned blocks are treated as separate matrices.

    Args:
      learning_rate: Number, or function of the number of previous updates.
      weight_decay: Strength of the decoupled decay, in both groups.
      mask: Function from parameters to whether they decay; by default all do.
      matrices: Pattern of orthogonalized kernels. The default leaves embeddings and heads to AdamW,
        as the authors recommend.
      beta: Decay of the momentum.
      nesterov: Whether to use Nesterov momentum.
      ns_steps: Newton-Schulz iterations.
      rms: Root mean square of the updates.
      b1, b2: Decay rates of AdamW's moments.
      eps: Number added to denominators in both groups.
      mu_dtype: Dtype of the momentum; the parameters' dtype if None.
    """

    orthogonal = optax.chain(
        contrib.scale_by_muon(
            ns_steps=ns_steps,
            beta=beta,
            eps=eps,
            mu_dtype=mu_dtype,
            nesterov=nesterov,
            weight_dimension_numbers=_dimensions,
        ),
        _to_rms(rms),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adamw = optax.adamw(
        learning_rate, b1, b2, eps, mu_dtype=mu_dtype, weight_decay=weight_decay, mask=mask
    )
    return _by_kind(matrices, orthogonal, adamw)


def adamuon(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.0,
    mask: Callable[[Any], Any] | None = None,
    *,
    matrices: str = r'block.*kernel$',
    beta: float = 0.95,
    nesterov: bool = False,
    ns_steps: int = 5,
    rms: float = 0.2,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-7,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Muon whose orthogonalized updates are divided by their second moment; AdamW for the rest.

    Si et al., 2025, arXiv:2507.11005, in timm's form: without the signs of the momentum, and with
    Newton-Schulz coefficients that differ from step to step. Each update is scaled to a root mean
    square of `rms`, so that AdamW's learning rate and weight decay can be reused. Queries, keys,
    values and scanned blocks are treated as separate matrices.

    Args:
      learning_rate: Number, or function of the number of previous updates.
      weight_decay: Strength of the decoupled decay, in both groups.
      mask: Function from parameters to whether they decay; by default all do.
      matrices: Pattern of orthogonalized kernels, as for `muon`.
      beta: Decay of the momentum.
      nesterov: Whether both groups use Nesterov momentum, as in NAdaMuon.
      ns_steps: Newton-Schulz iterations; from the fifth on with the same coefficients.
      rms: Root mean square of the updates.
      b1: Decay rate of AdamW's first moment.
      b2: Decay rate of the second moments of both groups.
      eps: Number added to denominators in both groups.
      mu_dtype: Dtype of the momentum; the parameters' dtype if None.
    """
    adaptive = optax.chain(
        _momentum(beta, nesterov, mu_dtype),
        _orthogonalized(ns_steps, eps),
        optax.scale_by_rms(b2, eps, eps_in_sqrt=False),
        _normalized(rms, eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam = optax.nadamw if nesterov else optax.adamw
    for_others = adam(
        learning_rate, b1, b2, eps, mu_dtype=mu_dtype, weight_decay=weight_decay, mask=mask
    )
    return _by_kind(matrices, adaptive, for_others)


nadamuon = functools.partial(adamuon, nesterov=True)
_SUMMARY = 'AdaMuon with Nesterov momentum; NAdamW for the rest.\n'
nadamuon.__doc__ = _SUMMARY + str(adamuon.__doc__).partition('\n')[2]

# Of https://leloykun.github.io/ponder/muon-opt-coeffs, one row for each iteration.
_QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def _by_kind(
    matrices: str,
    orthogonal: optax.GradientTransformation,
    for_others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Apply one transformation to the parameters that a pattern matches, another to the rest."""

    def kind(path: str) -> str:
        return 'muon' if re.search(matrices, path) else 'adamw'

    return optax.partition(
        {'muon': orthogonal, 'adamw': for_others}, lambda tree: map_paths(kind, tree)
    )


def _momentum(beta: float, nesterov: bool, dtype: Any) -> optax.GradientTransformation:
    """Average gradients from zero on, without correction of the bias."""
    average = optax.ema(beta, debias=False, accumulator_dtype=dtype)

    def update(updates: PyTree, state: Any, _: PyTree = None) -> tuple[PyTree, Any]:
        means, state = average.update(updates, state)
        if nesterov:
            means = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, means, updates)
        return means, state

    return optax.GradientTransformation(average.init, update)


def _orthogonalized(steps: int, eps: float) -> optax.GradientTransformation:
    """Orthogonalize matrices by Newton-Schulz iteration, without a state."""
    rows = (*_QUINTIC[:steps], *_QUINTIC[-1:] * (steps - len(_QUINTIC)))
    muon = contrib.scale_by_muon(
        *(rows, steps, 0.0, eps),
        nesterov=False,
        weight_dimension_numbers=_dimensions,
    )
    return optax.stateless(lambda updates, _: muon.update(updates, muon.init(updates))[0])


def _normalized(rms: float, eps: float) -> optax.GradientTransformation:
    """Scale each matrix to a root mean square of `rms`."""

    def scaled(keys: Any, update: jax.Array) -> jax.Array:
        axes = sum(_axes(path_name(keys), update), ())
        count = math.prod(update.shape[i] for i in axes)
        norm = jnp.sqrt(jnp.square(update).sum(axes, keepdims=True))
        return update * (rms * count**0.5 / (norm + eps))

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))


def _axes(path: str, leaf: Any) -> contrib.MuonDimensionNumbers:
    stacked = is_stacked(path, leaf)
    inputs, outputs = kernel_axes(path, len(leaf.shape) - stacked)
    return contrib.MuonDimensionNumbers(
        tuple(i + stacked for i in inputs), tuple(i + stacked for i in outputs)
    )


def _dimensions(tree: PyTree) -> PyTree:
    """Return the axes of each kernel, for Optax."""
    leaves = param_paths(tree)
    return map_paths(lambda path: _axes(path, leaves[path]), tree)


def _to_rms(rms: float) -> optax.GradientTransformation:
    """Scale updates with singular values of 1 to a root mean square of `rms`."""

    def scaled(keys: Any, update: jax.Array) -> jax.Array:
        axes = _axes(path_name(keys), update)
        fans = (math.prod(update.shape[i] for i in side) for side in axes)
        return update * (rms * max(fans) ** 0.5)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))


Axes = tuple[int, ...]

# Projections to heads; one letter for each of their C parts.
TO_HEADS = re.compile(r'/([qkv]+)/(kernel|bias)$')


def is_stacked(path: str, leaf: Any) -> bool:
    """Return whether a parameter has scanned blocks on axis 0."""
    return block_paths(path, leaf) != [path]


def kernel_axes(path: str, ndim: int) -> tuple[Axes, Axes]:
    """Return a kernel's input and output axes; other axes count independent matrices.

    Dense layers have [in, out], convolutions [H, W, in, out], projections to heads [D, C, H, K] and
    from them [H, K, D].

    Args:
      path: Path of the parameter.
      ndim: Number of axes, not counting scanned blocks.
    """
    if TO_HEADS.search(path):
        return (0,), (2, 3)
    return tuple(range(ndim - 1)), (ndim - 1,)
