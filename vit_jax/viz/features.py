"""Pictures of features: principal components of patches as colors, and nearest neighbors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vit_jax.array_types import Bool, Float, Int, UInt8
from vit_jax.errors import UserError
from vit_jax.viz import batch, figures
from vit_jax.viz.photo import Photo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 6  # images per row
SIDE = 1.9  # inches of an image
PIXELS = 256  # of the shorter side of a photo
CLIPPED = 1.0  # percent of the patches at each end of a component with clipped color
Grid = tuple[int, int]


def draw_components(
    photos: Sequence[Photo],
    patches: Sequence[Float[np.ndarray, 'n D']],
    grids: Sequence[Grid],
    background: bool = False,
) -> Figure:
    """Draw images above their patches, colored by `component_colors`.

    Figure 1 of DINOv2, arXiv:2304.07193.

    Args:
      photos: Photos of the images.
      patches: Features of each image's patches in raster order.
      grids: Rows and columns of patches of each image.
      background: Whether the background is colored too.
    """
    colors = component_colors(patches, grids, background)
    num_columns = min(len(photos), ACROSS)
    num_rows = math.ceil(len(photos) / num_columns)
    aspect = max(photo.image.shape[0] / photo.image.shape[1] for photo in photos)
    figure = figures.new_figure((SIDE * num_columns, (2 * SIDE * aspect + batch.LINE) * num_rows))
    axes = figure.subplots(2 * num_rows, num_columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for i, (photo, patch_colors, grid) in enumerate(zip(photos, colors, grids, strict=True)):
        row, column = divmod(i, num_columns)
        figures.show_image(axes[2 * row, column], photo.view(PIXELS), photo.path.name)
        figures.show_image(axes[2 * row + 1, column], patch_colors.reshape(*grid, 3), '')
    return figure


def component_colors(
    patches: Sequence[Float[np.ndarray, 'n D']], grids: Sequence[Grid], background: bool = False
) -> list[UInt8[np.ndarray, 'n 3']]:
    """Color patches by the first three principal components of the foreground of all images.

    The first component of all patches separates the foreground from the background, which becomes
    black (DINOv2, arXiv:2304.07193, section 7.5). The threshold is Otsu's, and the foreground is
    the side with fewer patches at the edges of images. With `background`, the components are of all
    patches, and none is black.
    """
    rows = np.concatenate(patches).astype(np.float64)
    edges = np.concatenate([_is_edge(*grid).ravel() for grid in grids])
    first = principal_components(rows, 1)[:, 0]
    is_foreground = np.ones(len(rows), bool) if background else foreground(first, edges)
    values = principal_components(rows[is_foreground], 3)
    low, high = np.percentile(values, [CLIPPED, 100 - CLIPPED], axis=0)
    values = np.clip((values - low) / np.maximum(high - low, 1e-12), 0, 1)
    colors = np.zeros((len(rows), 3), np.uint8)
    colors[is_foreground, : values.shape[1]] = np.round(255 * values)
    return np.split(colors, np.cumsum([len(patches_of_image) for patches_of_image in patches])[:-1])


def principal_components(rows: Float[np.ndarray, 'N D'], count: int) -> Float[np.ndarray, 'N c']:
    """Project centered rows to their first principal components; at most D."""
    rows = rows - rows.mean(0)
    axes = np.linalg.eigh(rows.T @ rows)[1]  # in ascending order; much cheaper than an SVD
    return rows @ axes[:, ::-1][:, :count]


def foreground(
    scores: Float[np.ndarray, ' N'], edges: Bool[np.ndarray, ' N']
) -> Bool[np.ndarray, ' N']:
    """Return the side of Otsu's threshold with fewer patches at the edges of images."""
    above = scores > otsu_threshold(scores)
    if above.all() or not above.any():
        return np.ones_like(above)
    return above if edges[above].mean() <= edges[~above].mean() else ~above


def otsu_threshold(scores: Float[np.ndarray, ' N']) -> float:
    """Return the threshold with the largest variance between the two sides (Otsu, 1979)."""
    ordered = np.sort(scores)
    below = np.arange(1, len(ordered))
    sums = np.cumsum(ordered)
    means = sums[:-1] / below, (sums[-1] - sums[:-1]) / (len(ordered) - below)
    between = below * (len(ordered) - below) * (means[0] - means[1]) ** 2
    return float(ordered[np.argmax(between)]) if len(below) else float('inf')


def grid_of(count: int, shape: tuple[int, ...]) -> Grid:
    """Return rows and columns of `count` square patches of an image [H W C].

    Raises:
      UserError: if the patches do not fill the image.
    """
    rows = max(1, round(math.sqrt(count * shape[0] / shape[1])))
    if count % rows:
        raise UserError(f'{count} patches do not form a grid over {shape[1]} x {shape[0]} pixels')
    return rows, count // rows


def _is_edge(rows: int, columns: int) -> Bool[np.ndarray, 'rows columns']:
    edge = np.ones((rows, columns), bool)
    edge[1:-1, 1:-1] = False
    return edge


def nearest_neighbors(
    features: Float[np.ndarray, 'N D'], queries: Int[np.ndarray, ' Q'], count: int
) -> tuple[Int[np.ndarray, 'Q k'], Float[np.ndarray, 'Q k']]:
    """Return the rows with the largest cosine to each query, without the query, and the cosines."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    cosines = unit[queries] @ unit.T
    cosines[np.arange(len(queries)), queries] = -np.inf
    order = np.argsort(-cosines, axis=1, kind='stable')[:, : min(count, len(features) - 1)]
    return order, np.take_along_axis(cosines, order, axis=1)


def draw_neighbors(
    queries: Sequence[Photo],
    neighbors: Sequence[Sequence[Photo]],
    cosines: Float[np.ndarray, 'Q k'],
) -> Figure:
    """Draw a row per query: the image, and its nearest neighbors with their cosines."""
    rows = []
    for query, near, values in zip(queries, neighbors, cosines, strict=True):
        panels = [('image', figures.as_picture(query.image))]
        for photo, value in zip(near, values.tolist(), strict=True):
            panels.append((f'{photo.path.name}  {value:.2f}', figures.as_picture(photo.image)))
        rows.append(panels)
    return batch.draw_rows(rows, [photo.path.name for photo in queries])
