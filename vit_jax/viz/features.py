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

ACROSS = 6  # images in a row
SIDE = 1.9  # inches of an image
PIXELS = 256  # of the shorter side of a photograph
CLIPPED = 1.0  # percent of the patches at each end of a component that get the same color
Grid = tuple[int, int]


def draw_components(
    photos: Sequence[Photo], patches: Sequence[Float[np.ndarray, 'n D']], grids: Sequence[Grid]
) -> Figure:
    """Draw images above their patches, colored as by `component_colors`.

    Figure 1 of DINOv2, arXiv:2304.07193.

    Args:
      photos: of the images.
      patches: the features of each image's patches, row by row.
      grids: rows and columns of patches of each image.
    """
    colors = component_colors(patches, grids)
    across = min(len(photos), ACROSS)
    lines = math.ceil(len(photos) / across)
    tall = max(photo.image.shape[0] / photo.image.shape[1] for photo in photos)
    figure = figures.new_figure((SIDE * across, (2 * SIDE * tall + batch.LINE) * lines))
    axes = figure.subplots(2 * lines, across, squeeze=False)
    for one in axes.flat:
        one.set_axis_off()
    for i, (photo, mine, grid) in enumerate(zip(photos, colors, grids, strict=True)):
        line, column = divmod(i, across)
        figures.show_image(axes[2 * line, column], photo.view(PIXELS), photo.path.name)
        figures.show_image(axes[2 * line + 1, column], mine.reshape(*grid, 3), '')
    return figure


def component_colors(
    patches: Sequence[Float[np.ndarray, 'n D']], grids: Sequence[Grid]
) -> list[UInt8[np.ndarray, 'n 3']]:
    """Colors by the first three principal components of the foreground of all images together.

    The first component of all patches separates the foreground from the background, which becomes
    black (DINOv2, arXiv:2304.07193, section 7.5). The threshold is Otsu's, and the foreground is
    the side with fewer patches at the edges of the images.
    """
    rows = np.concatenate(patches).astype(np.float64)
    edges = np.concatenate([_is_edge(*grid).ravel() for grid in grids])
    inside = foreground(principal_components(rows, 1)[:, 0], edges)
    values = principal_components(rows[inside], 3)
    low, high = np.percentile(values, [CLIPPED, 100 - CLIPPED], axis=0)
    values = np.clip((values - low) / np.maximum(high - low, 1e-12), 0, 1)
    colors = np.zeros((len(rows), 3), np.uint8)
    colors[inside, : values.shape[1]] = np.round(255 * values)
    return np.split(colors, np.cumsum([len(each) for each in patches])[:-1])


def principal_components(rows: Float[np.ndarray, 'N D'], count: int) -> Float[np.ndarray, 'N c']:
    """The first principal components of centered rows; fewer if there are fewer dimensions."""
    rows = rows - rows.mean(0)
    axes = np.linalg.eigh(rows.T @ rows)[1]  # in ascending order; far cheaper than an SVD
    return rows @ axes[:, ::-1][:, :count]


def foreground(
    scores: Float[np.ndarray, ' N'], edges: Bool[np.ndarray, ' N']
) -> Bool[np.ndarray, ' N']:
    """The patches on the side of Otsu's threshold with the smaller share at the edges of images."""
    above = scores > otsu_threshold(scores)
    if above.all() or not above.any():
        return np.ones_like(above)
    return above if edges[above].mean() <= edges[~above].mean() else ~above


def otsu_threshold(scores: Float[np.ndarray, ' N']) -> float:
    """The threshold with the largest variance between the two sides (Otsu, 1979)."""
    ordered = np.sort(scores)
    below = np.arange(1, len(ordered))
    sums = np.cumsum(ordered)
    means = sums[:-1] / below, (sums[-1] - sums[:-1]) / (len(ordered) - below)
    between = below * (len(ordered) - below) * (means[0] - means[1]) ** 2
    return float(ordered[np.argmax(between)]) if len(below) else float('inf')


def grid_of(count: int, shape: tuple[int, ...]) -> Grid:
    """Rows and columns of so many square patches of an image [H W C].

    Raises:
      UserError: if they do not fill it.
    """
    rows = max(1, round(math.sqrt(count * shape[0] / shape[1])))
    if count % rows:
        raise UserError(f'{count} patches form no grid over {shape[1]} x {shape[0]} pixels')
    return rows, count // rows


def _is_edge(rows: int, columns: int) -> Bool[np.ndarray, 'rows columns']:
    edge = np.ones((rows, columns), bool)
    edge[1:-1, 1:-1] = False
    return edge


def nearest_neighbors(
    features: Float[np.ndarray, 'N D'], queries: Int[np.ndarray, ' Q'], count: int
) -> tuple[Int[np.ndarray, 'Q k'], Float[np.ndarray, 'Q k']]:
    """The rows of the largest cosine with each query, itself left out, and the cosines."""
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
    """Draw a row for each query: the image, and its nearest ones with their cosines."""
    rows = []
    for query, near, values in zip(queries, neighbors, cosines, strict=True):
        panels = [('image', figures.as_picture(query.image))]
        for photo, value in zip(near, values.tolist(), strict=True):
            panels.append((f'{photo.path.name}  {value:.2f}', figures.as_picture(photo.image)))
        rows.append(panels)
    return batch.draw_rows(rows, [photo.path.name for photo in queries])
