"""Attention weights as heat maps over the image.

Weights are numpy arrays [L, H, Q, K]: layers, heads, queries, keys; each row sums to one. The
tokens of an image are first those outside of the grid, such as a class token, then its patches in
raster order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vit_jax.array_types import Float, UInt8
from vit_jax.errors import UserError
from vit_jax.viz import figures

if TYPE_CHECKING:
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.patches import Rectangle

Grid = tuple[int, ...]  # (rows, columns) of patches, or (tokens,) for tokens without positions
Weights = Float[np.ndarray, 'L H Q K']
FLAT = 0.1  # maximum relative deviation from the middle value in a flat map
WIDTH = 1350  # pixels of a saved picture


def draw_layers(
    image: UInt8[np.ndarray, 'Y X 3'],
    weights: Weights,
    query_grid: Grid,
    key_grid: Grid,
    *,
    layer: int = -1,
    query: Grid | None = None,
    title: str = '',
    real_size: tuple[int, int] | None = None,
    to_itself: bool = True,
) -> Figure:
    """Draw one query: the image, the rollout, all layers, and the heads of one layer.

    The rollout is omitted if queries and keys are different tokens.

    Args:
      image: Image before the task's normalization.
      weights: Weights of one example.
      query_grid, key_grid: See `heat_map`.
      layer: Layer of the heads, counted from 0, or from the end if negative.
      query: See `heat_map`.
      title: Title above everything.
      real_size: Height and width in pixels of the part of `image` to draw, without padding.
      to_itself: Whether queries and keys are the same tokens.

    Raises:
      UserError: if the model has no such layer, or the grid no such query.
    """
    index = layer_index(len(weights), layer)
    layers = heat_map(weights.mean(axis=1), query_grid, key_grid, query)
    mean = layers[index]
    large = {'input': image, f'layer {index}, mean of heads{_flat(mean)}': overlay(image, mean)}
    if to_itself and query_grid == key_grid and weights.shape[-1] == weights.shape[-2]:
        heat = heat_map(rollout(weights), query_grid, key_grid, query)
        large[f'rollout{_flat(heat)}'] = overlay(image, heat)
    heads = heat_map(weights[index], query_grid, key_grid, query)
    heads_of = {f'head {i}': heat for i, heat in enumerate(heads)}
    sections = {f'Heads of layer {index}': _overlays(image, heads_of)}
    if len(layers) > 1:  # a single layer is already among the large pictures
        heading = 'Layers, mean of heads (each map is scaled to its own maximum)'
        layer_maps = {f'layer {i}': heat for i, heat in enumerate(layers)}
        sections = {heading: _overlays(image, layer_maps), **sections}
    marker = _query_frame(image, query_grid, query)
    return _draw_page(title, large, sections, marker, real_size)


def draw_queries(
    image: UInt8[np.ndarray, 'Y X 3'],
    weights: Weights,
    key_grid: Grid,
    *,
    layer: int = -1,
    head: int | None = None,
    title: str = '',
    names: Mapping[int, str] | None = None,
    real_size: tuple[int, int] | None = None,
) -> Figure:
    """Draw all queries of one layer, for decoders whose queries have no position in the image.

    Args:
      image: Image before the task's normalization.
      weights: Weights of one example.
      key_grid: Rows and columns of the attended patches.
      layer: Layer, counted from 0, or from the end if negative.
      head: Head of the layer; None for the mean.
      title: Title above everything.
      names: {index: name} of the queries to draw; None for all.
      real_size: See `draw_layers`.

    Raises:
      UserError: if the model has no such layer, or the layer no such head.
    """
    layer_map, layer_title = layer_weights(weights, layer, head)
    height, width = key_grid
    maps = layer_map[:, layer_map.shape[1] - height * width :].reshape(-1, height, width)
    mean = maps.mean(axis=0)
    large = {'input': image, f'mean of all queries{_flat(mean)}': overlay(image, mean)}
    names = dict.fromkeys(range(len(maps)), '') if names is None else names
    maps_of_queries = {
        f'query {i}: {name}' if name else f'query {i}': maps[i] for i, name in names.items()
    }
    subject = 'Queries' if len(names) == len(maps) else f'{len(names)} of {len(maps)} queries'
    heading = f'{subject} of {layer_title} (each map is scaled to its own maximum)'
    return _draw_page(title, large, {heading: _overlays(image, maps_of_queries)}, None, real_size)


def heat_map(
    attention: Float[np.ndarray, '*rest Q K'],
    query_grid: Grid,
    key_grid: Grid,
    query: Grid | None = None,
) -> Float[np.ndarray, '*rest h w']:
    """Return the attention of a query to each patch.

    Args:
      attention: Weights or a rollout; rows are queries.
      query_grid: Grid of the queries; earlier tokens are outside of the grid.
      key_grid: Rows and columns of the attended patches.
      query: Position in `query_grid`; None for the class token, or for the mean over all queries if
        there is none.

    Raises:
      UserError: if the query is outside of the grid.
    """
    height, width = key_grid
    first = attention.shape[-2] - math.prod(query_grid)
    if query is None:
        rows = attention[..., 0, :] if first else attention.mean(axis=-2)
    else:
        rows = attention[..., first + _query_index(query, query_grid), :]
    patches = rows[..., rows.shape[-1] - height * width :]
    return patches.reshape(*rows.shape[:-1], height, width)


def _query_index(query: Grid, grid: Grid) -> int:
    """Return the index of a query in its grid."""
    is_inside = len(query) == len(grid) and all(
        0 <= q < n for q, n in zip(query, grid, strict=True)
    )
    if not is_inside:
        name = ','.join(map(str, query))
        size = f'{grid[0]} rows and {grid[1]} columns' if len(grid) == 2 else f'{grid[0]} queries'
        raise UserError(f'the query {name} is outside of the grid of {size}')
    return int(np.ravel_multi_index(query, grid))


def rollout(weights: Float[np.ndarray, 'L H N N']) -> Float[np.ndarray, 'N N']:
    """Attention rollout: the share of each input token in each output token through all layers.

    The mean over heads plus the identity (for the residual connection), rows normalized to one, is
    multiplied from the last layer to the first (Abnar & Zuidema 2020, arXiv:2005.00928, section 3,
    as in figure 6 of the ViT paper).
    """
    mixed = weights.mean(axis=1) + np.eye(weights.shape[-1])
    mixed /= mixed.sum(axis=-1, keepdims=True)
    result = mixed[0]
    for layer in mixed[1:]:
        result = layer @ result
    return result


def layer_weights(
    weights: Weights, layer: int = -1, head: int | None = None
) -> tuple[Float[np.ndarray, 'Q K'], str]:
    """Return the weights of a head, or the mean over the heads of a layer, and their title.

    Args:
      weights: Weights of one example.
      layer: Layer, counted from 0, or from the end if negative.
      head: Head, counted from 0; None for the mean.

    Raises:
      UserError: if there is no such layer or head.
    """
    depth, heads = weights.shape[:2]
    name = f'layer {layer_index(depth, layer)}'
    if head is None:
        suffix = '' if heads == 1 else f', mean of {heads} heads'
        return weights[layer].mean(axis=0), name + suffix
    if not 0 <= head < heads:
        raise UserError(f'there is no head {head}: a layer has {heads}, 0 to {heads - 1}')
    return weights[layer, head], f'{name}, head {head}'


def layer_index(depth: int, layer: int) -> int:
    """Return the index of a layer from 0; raise UserError if the model has no such layer."""
    if not -depth <= layer < depth:
        raise UserError(f'there is no layer {layer}: the model has {depth}, 0 to {depth - 1}')
    return layer % depth


def overlay(
    image: UInt8[np.ndarray, 'Y X 3'], heat: Float[np.ndarray, 'h w']
) -> UInt8[np.ndarray, 'Y X 3']:
    """Lay a heat map over a darkened gray image, which remains visible even at the maximum."""
    height, width = image.shape[:2]
    smooth = Image.fromarray(heat.astype(np.float32)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    strength = np.clip(np.asarray(smooth) / max(heat.max(), 1e-12), 0, 1)
    gray = 0.6 * (image.mean(axis=-1, keepdims=True) / 255) * np.ones(3)
    color = _colors()(strength)[..., :3]
    alpha = 0.75 * strength[..., None]
    return np.round(255 * ((1 - alpha) * gray + alpha * color)).astype(np.uint8)


def _overlays(
    image: UInt8[np.ndarray, 'Y X 3'], maps: Mapping[str, Float[np.ndarray, 'h w']]
) -> dict[str, np.ndarray]:
    """Lay maps over an image that is reduced to the visible resolution."""
    factor = max(1, min(image.shape[:2]) * choose_columns(len(maps), 3) // WIDTH)
    small = np.asarray(Image.fromarray(image).reduce(factor))
    return {f'{name}{_flat(heat)}': overlay(small, heat) for name, heat in maps.items()}


def _flat(heat: Float[np.ndarray, 'h w']) -> str:
    """Mark a nearly uniform map in its title; empty for others.

    Scaled to its maximum, such a map would seem to attend strongly everywhere.
    """
    low, high = float(heat.min()), float(heat.max())
    spread = (high - low) / max(high + low, 1e-12)
    return (
        f' (flat: ±{100 * spread:.0f} %)' if heat.size > 1 and high > 0 and spread <= FLAT else ''
    )


@functools.cache
def _colors() -> ListedColormap:
    """Return a color map without its nearly black and white ends, which also occur in images."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps['inferno'](np.linspace(0.05, 0.95, 256)))


def _draw_page(
    title: str,
    large: dict[str, np.ndarray],
    sections: dict[str, dict[str, np.ndarray]],
    marker: Rectangle | None,
    real_size: tuple[int, int] | None = None,
) -> Figure:
    """Draw large pictures with a color bar above sections of small ones."""
    full_size = large['input'].shape
    large, *cropped_sections = (
        _crop_padding(pictures, full_size, real_size) for pictures in (large, *sections.values())
    )
    sections = dict(zip(sections, cropped_sections, strict=True))
    inches, num_large = 9.0, len(large)
    columns = [choose_columns(len(section), num_large + 1) for section in sections.values()]
    aspect = large['input'].shape[0] / large['input'].shape[1]
    counts = map(len, sections.values())
    rows = [1] + [-(-count // n) for count, n in zip(counts, columns, strict=True)]
    sides = [inches / n for n in (num_large, *columns)]
    heights = [n * (side * aspect + 0.2) + 0.35 for n, side in zip(rows, sides, strict=True)]
    heights[0] += 0.18 * figures.wrap(title, inches, 11).count('\n')
    figure = figures.new_figure((inches, sum(heights)))
    spec = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    parts = [figure.add_subfigure(spec[i]) for i in range(len(rows))]
    _draw_section(parts[0], title, large, 1, num_large, 10)
    if marker is not None:
        parts[0].axes[0].add_patch(marker)
    for i, (heading, pictures) in enumerate(sections.items()):
        _draw_section(parts[i + 1], heading, pictures, rows[i + 1], columns[i], 8)
    _add_color_bar(parts[0])
    return figure


def choose_columns(count: int, least: int) -> int:
    """Choose a number of columns, at least `least`, that leaves few cells empty."""
    return max(count, least) if count <= 6 else min((6, 8, 5, 4), key=lambda n: -count % n)


def _crop_padding(
    pictures: dict[str, np.ndarray], full_size: tuple[int, ...], real_size: tuple[int, int] | None
) -> dict[str, np.ndarray]:
    """Crop padding from pictures of the same scene, given the sizes with and without it."""
    if real_size is None:
        return pictures
    shares = real_size[0] / full_size[0], real_size[1] / full_size[1]
    return {
        name: picture[: round(shares[0] * picture.shape[0]), : round(shares[1] * picture.shape[1])]
        for name, picture in pictures.items()
    }


def _draw_section(
    part: SubFigure,
    heading: str,
    pictures: dict[str, np.ndarray],
    rows: int,
    columns: int,
    size: int,
) -> None:
    figures.heading(part, heading, va='top')
    for i, (name, picture) in enumerate(pictures.items()):
        figures.show_image(part.add_subplot(rows, columns, i + 1), picture, name, size)


def _query_frame(image: np.ndarray, grid: Grid, query: Grid | None) -> Rectangle | None:
    """Return a frame around the patch of the query."""
    if query is None or len(grid) != 2:
        return None
    from matplotlib.patches import Rectangle

    side = image.shape[0] / grid[0], image.shape[1] / grid[1]
    corner = query[1] * side[1] - 0.5, query[0] * side[0] - 0.5
    return Rectangle(corner, side[1], side[0], fill=False, edgecolor=figures.COLORS[1], linewidth=2)


def _add_color_bar(part: SubFigure) -> None:
    """Draw the color bar next to the large pictures."""
    from matplotlib.cm import ScalarMappable

    scale = ScalarMappable(cmap=_colors())
    bar = part.colorbar(scale, ax=part.axes, fraction=0.03, pad=0.01, aspect=30, ticks=[0, 0.5, 1])
    bar.set_label("attention / the map's maximum", color=figures.FAINT, fontsize=8)
    bar.ax.tick_params(labelsize=8, colors=figures.FAINT, length=0)
    bar.outline.set_visible(False)
