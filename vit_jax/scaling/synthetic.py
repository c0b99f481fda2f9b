"""Synthetic laws with noise, on which bands are tuned and measured."""

from __future__ import annotations

import dataclasses

import numpy as np

from vit_jax.scaling import forms

SPAN = 64.0  # ratio of the largest fitted x to the smallest


@dataclasses.dataclass(frozen=True)
class Law:
    """A kind of law, drawn with random parameters.

    Attributes:
      name: for tables.
      form: of the truth.
      noise: standard deviation of log y.
      correlation: of the noise of neighboring points (AR(1)).
      tuned: whether the width of bands was chosen on it.
    """

    name: str
    form: str
    noise: float
    correlation: float = 0.0
    tuned: bool = False


LAWS = (
    Law('power, 2 %', 'power', 0.02, tuned=True),
    Law('irreducible, 2 %', 'irreducible', 0.02),
    Law('irreducible, 5 %', 'irreducible', 0.05, tuned=True),
    Law('shifted, 2 %, correlated', 'shifted', 0.02, 0.6, tuned=True),
    Law('shifted, 5 %', 'shifted', 0.05),
    Law('m4, 2 %', 'm4', 0.02, tuned=True),
    Law('m4, 2 %, correlated', 'm4', 0.02, 0.6),
    Law('joint, 1 %', 'joint', 0.01),
)


def draw(form: str, rng: np.random.Generator) -> forms.Theta:
    """Parameters of a random law with typical exponents, in the units of `places`."""
    if form == 'joint':
        (alpha, beta), e = rng.uniform(0.25, 0.6, 2), rng.uniform(0.3, 1.0)
        return np.array([0.0, alpha, 0.0, beta, e])
    b = rng.uniform(0.2, 0.8)
    if form == 'm4':
        c, alpha = rng.uniform(0.1, 0.4), rng.uniform(0.3, 1.5)
        log_a = np.log(0.6 * (1 - c)) - alpha * np.log(0.4 * (1 - c))
        return np.array([log_a, b, c, 1.0, alpha])
    d = rng.uniform(0.0, 4.0) if form == 'shifted' else 0.0
    c = 0.0 if form == 'power' else rng.uniform(0.1, 1.0) * (SPAN + d) ** -b
    return np.array([0.0, b, c, d])


def places(form: str, points: int) -> tuple[np.ndarray, np.ndarray]:
    """The fitted x [N, K], and those at 4 and 10 times the largest [2, K].

    Of the joint law N and D span a factor of 8 each on a grid, and compute one of 64.
    """
    if form != 'joint':
        return np.geomspace(1.0, SPAN, points)[:, None], SPAN * np.array([[4.0], [10.0]])
    side = np.geomspace(1.0, np.sqrt(SPAN), 4)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    return grid, np.sqrt(SPAN * np.array([4.0, 10.0]))[:, None] * np.ones((1, 2))


def noise(law: Law, count: int, rng: np.random.Generator) -> np.ndarray:
    """Errors [N] of log y, correlated between neighbors."""
    errors = rng.standard_normal(count)
    for i in range(1, count):
        fresh = np.sqrt(1 - law.correlation**2) * errors[i]
        errors[i] = law.correlation * errors[i - 1] + fresh
    return law.noise * errors
