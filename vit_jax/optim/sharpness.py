"""Sharpness-aware minimization: the gradient at the worst parameters nearby.

SAM (Foret et al., 2021, arXiv:2010.01412) moves the parameters w by a distance rho along the
gradient of the loss, and takes the gradient there, g_p. GSAM (Zhuang et al., 2022,
arXiv:2203.08065, algorithm 1) also shrinks the gap between the two losses: it subtracts from g_p
alpha times the part of the first gradient that is orthogonal to it.

A step needs two gradients, so that it takes about twice the time, and memory for one more copy of
the trained parameters. Both are those of the whole global batch, however it is split: the authors
of GSAM move the parameters by the gradient of each device's own rows instead.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError
from vit_jax.optim import schedules

PyTree = Any
Differentiate = Callable[..., tuple[PyTree, dict[str, jax.Array], PyTree]]
OFF: Mapping[str, Any] = types.MappingProxyType({})
EPS = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sam:
    """The perturbation of sharpness-aware minimization.

    Attributes:
      rho: distance between the parameters and those that the gradient is taken at; 0 for plain
        training. GSAM's authors let it fall from 0.6 to 0.1 for a ViT-B/32.
      alpha: share of GSAM's second objective, the gap between the two losses; 0 for SAM.

    Raises:
      UserError: if a number is negative.
    """

    rho: float = 0.0
    alpha: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 0:
                raise UserError(f'config.step.sam.{name}={value}: must be at least 0')
        if self.alpha and not self.rho:
            raise UserError(f'config.step.sam.alpha={self.alpha}: needs a rho above 0, as of 0.1')


def gradients_per_step(options: Mapping[str, Any]) -> int:
    """The number of gradients that a step computes with these keywords of `Sam`: 1 or 2."""
    return 2 if Sam(**options).rho else 1


def remarks(options: Mapping[str, Any]) -> list[str]:
    """A line about the cost of these keywords of `Sam`, if they have any."""
    if gradients_per_step(options) == 1:
        return []
    return [f'sharpness-aware, rho {options["rho"]}: two gradients a step, about twice its time']


def make(
    options: Mapping[str, Any],
    schedule: Mapping[str, Any],
    total_steps: int,
    to_steps: Callable[[str], int],
) -> Callable[[Differentiate, jax.Array], Differentiate]:
    """A function that makes `gradients.separable` or `coupled` sharpness-aware at a step.

    Args:
      options: keywords of `Sam`.
      schedule: keywords of `optim.schedules.make` for rho, with `rho` as its peak.
      total_steps: length of training.
      to_steps: turns a duration such as `'5%'` into steps.

    Raises:
      UserError: for a value outside its range.
    """
    sam = Sam(**options)
    where = 'config.step.sam_schedule'
    strength = schedules.from_strength(schedule, sam.rho, total_steps, to_steps, where)

    def aware(differentiate: Differentiate, step: jax.Array) -> Differentiate:
        if not sam.rho:
            return differentiate
        rho = strength(step) if callable(strength) else strength
        return twice(differentiate, rho, sam.alpha)

    return aware


def twice(differentiate: Differentiate, rho: float | jax.Array, alpha: float) -> Differentiate:
    """`differentiate` at the perturbed parameters, with the metrics and collections of the first
    pass; the metric `sharpness` is the loss at the perturbed parameters minus the loss.

    Both passes draw the same random numbers, since they have the same keys.
    """

    def perturbed(
        forward: Any, loss: Any, params: PyTree, collections: PyTree, examples: Any, split: Any
    ) -> tuple[PyTree, dict[str, jax.Array], PyTree]:
        rest = collections, examples, split
        first, metrics, after = differentiate(forward, loss, params, *rest)
        length = rho / (optax.tree.norm(first) + EPS)
        moved = jax.tree.map(lambda p, g: p + length * g, params, first)
        second, there, _ = differentiate(forward, loss, moved, *rest)
        metrics = metrics | {'sharpness': there['loss'] - metrics['loss']}
        return without_orthogonal(second, first, alpha), metrics, after

    return perturbed


def without_orthogonal(grads: PyTree, other: PyTree, alpha: float) -> PyTree:
    """`grads` minus `alpha` times the part of `other` that is orthogonal to them."""
    if not alpha:
        return grads
    along = optax.tree.vdot(grads, other) / jnp.maximum(optax.tree.vdot(grads, grads), EPS**2)
    return jax.tree.map(lambda g, o: g - alpha * (o - along * g), grads, other)
