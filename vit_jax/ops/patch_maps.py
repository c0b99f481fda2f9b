"""Maps between pixels of an image and patches of the model's image made of it, in NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vit_jax.array_types import Bool, Float, Int, Shaped


class Axis(NamedTuple):
    """One side of an image and of the model's image.

    Attributes:
      length: Pixels of the image.
      cells: Patches of the model's image.
      side: Pixels of the model's image.
      first, last: Ends of the image, in pixels of the model's image.
    """

    length: int
    cells: int
    side: int
    first: float
    last: float

    def weights(self) -> Float[np.ndarray, 'L n']:
        """Weigh the patches at each pixel, bilinearly between centers of patches."""
        center = np.clip(self._place() - 0.5, 0, self.cells - 1)
        low = np.minimum(center.astype(int), max(self.cells - 2, 0))
        pixels, matrix = np.arange(self.length), np.zeros((self.length, self.cells), np.float32)
        matrix[pixels, low] = 1 - (center - low)
        matrix[pixels, np.minimum(low + 1, self.cells - 1)] += center - low
        return matrix

    def membership(self) -> Float[np.ndarray, 'L n']:
        """1 for the patch that contains a pixel's center, 0 for others."""
        patch = np.floor(self._place())[:, None] == np.arange(self.cells)
        return patch.astype(np.float32)

    def inside(self) -> Bool[np.ndarray, ' L']:
        """Whether each pixel's center is in the model's image."""
        place = self._place()
        return (place >= 0) & (place < self.cells)

    def nearest(self, count: int) -> tuple[Int[np.ndarray, ' N'], Bool[np.ndarray, ' N']]:
        """Choose the pixel at the center of each of `count` parts of the model's image.

        Returns:
          Indices of pixels, and whether the center is in the image.
        """
        center = (np.arange(count) + 0.5) * self.side / count
        pixel = np.floor((center - self.first) * self.length / (self.last - self.first))
        is_inside = (pixel >= 0) & (pixel < self.length)
        return np.clip(pixel, 0, self.length - 1).astype(int), is_inside

    def _place(self) -> Float[np.ndarray, ' L']:
        """Centers of the pixels, in patches from the model's image's edge."""
        share = (np.arange(self.length) + 0.5) / self.length
        return (self.first + share * (self.last - self.first)) * self.cells / self.side


class View(NamedTuple):
    """Rows and columns of an image in the model's image."""

    rows: Axis
    columns: Axis

    @classmethod
    def locate(
        cls,
        size: tuple[int, int],
        grid: tuple[int, int],
        frame: tuple[int, int],
        corners: Float[np.ndarray, '2 2'],
    ) -> View:
        """Locate an image.

        Args:
          size: Height and width of the image in pixels.
          grid: Rows and columns of patches.
          frame: Height and width of the model's image in pixels.
          corners: (x, y) of the image's upper left and lower right corner in the model's image.
        """
        (left, top), (right, bottom) = corners.tolist()
        rows = Axis(size[0], grid[0], frame[0], top, bottom)
        return cls(rows, Axis(size[1], grid[1], frame[1], left, right))

    def inside(self) -> Bool[np.ndarray, 'H W']:
        """Whether the model's image shows a pixel."""
        return self.rows.inside()[:, None] & self.columns.inside()

    def enlarge(self, values: Float[np.ndarray, 'h w C']) -> Float[np.ndarray, 'H W C']:
        """Interpolate values of any grid of patches at pixels."""
        height, width = values.shape[:2]
        rows, columns = self.rows._replace(cells=height), self.columns._replace(cells=width)
        return _both(rows.weights(), columns.weights(), values)

    def pool(self, values: Float[np.ndarray, 'H W C']) -> Float[np.ndarray, 'h w C']:
        """Sum the values of the pixels in each patch."""
        return _both(self.rows.membership().T, self.columns.membership().T, values)

    def sample(
        self, values: Shaped[np.ndarray, 'H W'], shape: tuple[int, int], outside: float
    ) -> Shaped[np.ndarray, 'h w']:
        """Resize values of pixels to `shape` parts of the model's image by nearest neighbor.

        Args:
          values: Values of pixels.
          shape: Rows and columns.
          outside: Value where the model's image shows nothing of the image.
        """
        rows, in_rows = self.rows.nearest(shape[0])
        columns, in_columns = self.columns.nearest(shape[1])
        values_there = values[rows[:, None], columns]
        is_inside = in_rows[:, None] & in_columns
        return np.where(is_inside, values_there, np.array(outside, values.dtype))


def _both(rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Multiply the first axis of `values` by the matrix `rows`, the second by `columns`."""
    return np.matmul(columns, np.tensordot(rows, values, (1, 0)))
