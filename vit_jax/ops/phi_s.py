"""PHI-S: features standardized by a rotation and one scale, in NumPy.

Ranzinger et al., 2024, arXiv:2410.01680, section 3: y = H U^T (x - mean) / phi, where U has the
eigenvectors of the covariance, H is a normalized Hadamard matrix and phi^2 the mean eigenvalue.
Every channel then has variance 1, and the inverse is exact at any rank, unlike whitening's.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np

from vit_jax.array_types import Float
from vit_jax.errors import UserError

ARRAYS = ('mean', 'matrix')  # of a file of statistics


@dataclasses.dataclass
class Moments:
    """Sums over the rows of features, in float64.

    Attributes:
      count: Number of rows.
      total: Sum of the rows, [D].
      products: Sum of the outer products of the rows minus `origin`, [D D].
      origin: First row, near the mean, so that little precision is lost.
    """

    count: int = 0
    total: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    products: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))
    origin: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

    def add(self, features: Float[np.ndarray, '*N D']) -> None:
        """Add the rows of some features."""
        rows = np.asarray(features, np.float64).reshape(-1, features.shape[-1])
        if not self.count:
            width = rows.shape[1]
            self.origin, self.total = rows[0].copy(), np.zeros(width)
            self.products = np.zeros((width, width))
        rows = rows - self.origin
        self.count += len(rows)
        self.total += rows.sum(0)
        self.products += rows.T @ rows

    @property
    def mean(self) -> Float[np.ndarray, ' D']:
        """Mean row."""
        return self.origin + self.total / self.count

    @property
    def covariance(self) -> Float[np.ndarray, 'D D']:
        """Covariance of the rows, divided by one less than their number."""
        shift = np.outer(self.total, self.total) / self.count
        return (self.products - shift) / (self.count - 1)


def standardization(moments: Moments) -> dict[str, np.ndarray]:
    """Compute `mean` [D] and `matrix` [D D] of y = matrix (x - mean), in float32.

    Raises:
      UserError: if the features are not finite, or do not vary.
    """
    if moments.count < 2:
        raise UserError('PHI-S needs at least two patches')
    covariance = moments.covariance
    if not np.isfinite(covariance).all():
        raise UserError('PHI-S: the features are not finite')
    values, vectors = np.linalg.eigh(covariance)
    values = np.maximum(values, 0)
    phi = math.sqrt(values.mean())
    if not phi > 0:
        raise UserError('PHI-S: the features do not vary')
    matrix = rotation(values) @ vectors.T / phi
    return {'mean': moments.mean.astype(np.float32), 'matrix': matrix.astype(np.float32)}


def rotation(variances: Float[np.ndarray, ' D']) -> Float[np.ndarray, 'D D']:
    """Return an orthogonal matrix that turns uncorrelated channels into ones of equal variance.

    It is a normalized Hadamard matrix where one of this size can be constructed, as for the widths
    of most ViTs, and otherwise a product of plane rotations for these variances.
    """
    width = len(variances)
    signs = hadamard(width)
    return equalize(variances) if signs is None else signs / math.sqrt(width)


def equalize(variances: Float[np.ndarray, ' D']) -> Float[np.ndarray, 'D D']:
    """Rotate, in planes, uncorrelated channels until each has the mean variance."""
    matrix, mean = np.eye(len(variances)), variances.mean()
    current = dict(enumerate(variances.tolist()))
    for _ in range(len(variances) - 1):
        low, high = min(current, key=current.__getitem__), max(current, key=current.__getitem__)
        spread = current[high] - current[low]
        if spread <= 0:
            break
        # The plane's two channels are uncorrelated: sin^2 shares their variances.
        sine = math.sqrt(min(max((mean - current[low]) / spread, 0.0), 1.0))
        cosine = math.sqrt(1 - sine * sine)
        below, above = matrix[low].copy(), matrix[high].copy()
        matrix[low] = cosine * below + sine * above
        matrix[high] = cosine * above - sine * below
        current[high] += current[low] - mean
        del current[low]  # finished; the other one is uncorrelated with all that remain
    return matrix


def hadamard(size: int) -> Float[np.ndarray, 'N N'] | None:
    """Construct a Hadamard matrix by Sylvester and Paley; None if neither yields this size."""
    for doublings in itertools.count():
        quotient, remainder = divmod(size, 2**doublings)
        if remainder or not quotient:
            return None
        if (matrix := _core(quotient)) is not None:
            break
    doubling = np.array([[1.0, 1], [1, -1]])
    return functools.reduce(lambda m, _: np.kron(doubling, m), range(doublings), matrix)


def _core(size: int) -> np.ndarray | None:
    """Construct a Hadamard matrix from quadratic residues modulo a prime."""
    if size == 1:
        return np.ones((1, 1))
    if size % 4 == 0 and _is_prime(size - 1):  # so that the prime is 3 modulo 4
        skew = np.zeros((size, size))
        skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, _residues(size - 1)
        return np.eye(size) + skew
    half = size // 2
    if size % 4 == 0 and _is_prime(half - 1) and half % 4 == 2:  # the prime is 1 modulo 4
        symmetric = np.zeros((half, half))
        symmetric[0, 1:], symmetric[1:, 0], symmetric[1:, 1:] = 1, 1, _residues(half - 1)
        plane, axis = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
        return np.kron(symmetric, plane) + np.kron(np.eye(half), axis)
    return None


def _residues(prime: int) -> np.ndarray:
    """Return the matrix of Legendre symbols of i - j."""
    symbols = np.full(prime, -1.0)
    symbols[np.arange(prime) ** 2 % prime] = 1
    symbols[0] = 0
    numbers = np.arange(prime)
    return symbols[(numbers[:, None] - numbers) % prime]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % i for i in range(2, math.isqrt(number) + 1))
