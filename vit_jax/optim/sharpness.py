"""Sharpness-aware minimization: the gradient at the worst parameters nearby.

SAM (Foret et al., 2021, arXiv:2010.01412) moves the parameters w by a distance rho along the
gradient of the loss, and takes the gradient there, g_p. GSAM (Zhuang et al., 2022,
arXiv:2203.08065, algorithm 1) also shrinks the gap between the two losses: it subtracts from g_p
alpha times the part of the first gradient that is orthogonal to it.

A step needs two gradients, so it takes about twice the time, and memory for one more copy of the
trained parameters. Both gradients are over the whole global batch, for any split; the authors of
GSAM instead move the parameters by the gradient of each device's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.run import Durations, Sam, Schedule
from vit_jax.optim import schedules

PyTree = Any
Differentiate = Callable[..., tuple[PyTree, dict[str, jax.Array], PyTree]]
EPS = 1e-12


def remarks(sam: Sam) -> list[str]:
    """Describe the cost of a step with a rho above 0."""
    return [f'sharpness-aware, rho {sam.rho}: two gradients a step, about twice its time']


def make_sharpness_aware(
    sam: Sam, schedule: Schedule, times: Durations | None
) -> Callable[[Differentiate, jax.Array], Differentiate]:
    """Return a function that makes `gradients.separable` or `coupled` sharpness-aware at a step.

    Args:
      sam: Perturbation, with a rho above 0.
      schedule: Schedule of rho, with `sam.rho` as its peak.
      times: Durations of the run; may be None if the schedule is constant.
    """
    strength = schedules.strength(schedule, sam.rho, times)

    def aware(differentiate: Differentiate, step: jax.Array) -> Differentiate:
        rho = strength(step) if callable(strength) else strength
        return twice(differentiate, rho, sam.alpha)

    return aware


def twice(differentiate: Differentiate, rho: float | jax.Array, alpha: float) -> Differentiate:
    """Differentiate at perturbed parameters, but return the first pass's metrics and collections;
    the metric `sharpness` is the loss at the perturbed parameters minus the loss.

    Both passes draw the same random numbers because they have the same keys.
    """

    def perturbed(
        forward: Any, loss: Any, params: PyTree, collections: PyTree, examples: Any, split: Any
    ) -> tuple[PyTree, dict[str, jax.Array], PyTree]:
        context = collections, examples, split
        initial_grads, metrics, new_collections = differentiate(forward, loss, params, *context)
        length = rho / (optax.tree.norm(initial_grads) + EPS)
        moved = jax.tree.map(lambda p, g: p + length * g, params, initial_grads)
        perturbed_grads, perturbed_metrics, _ = differentiate(forward, loss, moved, *context)
        metrics = metrics | {'sharpness': perturbed_metrics['loss'] - metrics['loss']}
        return without_orthogonal(perturbed_grads, initial_grads, alpha), metrics, new_collections

    return perturbed


def without_orthogonal(grads: PyTree, other: PyTree, alpha: float) -> PyTree:
    """Subtract `alpha` times the part of `other` that is orthogonal to `grads`."""
    if not alpha:
        return grads
    along = optax.tree.vdot(grads, other) / jnp.maximum(optax.tree.vdot(grads, grads), EPS**2)
    return jax.tree.map(lambda g, o: g - alpha * (o - along * g), grads, other)
