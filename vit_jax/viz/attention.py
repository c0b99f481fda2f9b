"""Where a Transformer looks: attention weights as heat maps over the image.

Weights are numpy arrays [L, B, H, N, N]: layers, batch, heads, queries, keys; every row
sums to one. Tokens are the patches of a grid row by row, after a class token if any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import traverse_util
from jaxtyping import Float, UInt8
from matplotlib import colormaps
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from PIL import Image

from vit_jax.errors import UserError
from vit_jax.viz import figures

Grid = tuple[int, int]  # rows and columns of patches


def stack_weights(
    intermediates: Mapping[str, Any], stack: str = 'encoder', module: str = 'attention'
) -> Float[np.ndarray, 'L B H N M']:
    """The weights that the layers of an encoder or decoder have sown, in the order of the layers.

    Args:
      intermediates: the collection that `model.apply(..., mutable=['intermediates'])` returns,
        of blocks `block_0`, `block_1`, ..., of scanned `blocks`, or of the stack itself where
        its layers share one attention.
      stack: path of the encoder's or decoder's module, '/'-joined.
      module: of a block: its `attention`, or `cross`, that of a decoder to the encoder.

    Raises:
      UserError: if there are none.
    """
    flat = traverse_util.flatten_dict(dict(intermediates), sep='/')
    place = rf'{re.escape(stack)}(/(block_(\d+)|blocks)/{re.escape(module)})?/attention'
    pattern = re.compile(place)
    found = {m: v[0] for k, v in flat.items() if (m := pattern.fullmatch(k))}
    if not found:
        raise UserError(f'this model keeps no attention weights in {stack!r}')
    if len(found) == 1 and (scanned := np.asarray(next(iter(found.values())))).ndim == 5:
        return scanned
    layers = sorted(found, key=lambda m: int(m[3] or 0))
    return np.stack([np.asarray(found[layer]) for layer in layers])


def rollout(weights: Float[np.ndarray, 'L B H N N']) -> Float[np.ndarray, 'B N N']:
    """How much of each input token reaches each output token through all layers.

    The mean over heads, plus the identity for the residual connection, rows normalised
    to one, and multiplied from the last layer to the first (Abnar & Zuidema 2020,
    arXiv:2005.00928, section 3, as the ViT authors drew their figure 6).
    """
    mixed = weights.mean(axis=2) + np.eye(weights.shape[-1])
    mixed /= mixed.sum(axis=-1, keepdims=True)
    result = mixed[0]
    for layer in mixed[1:]:
        result = layer @ result
    return result


def heat_map(
    attention: Float[np.ndarray, '*rest N N'], grid: Grid, query: tuple[int, int] | None = None
) -> Float[np.ndarray, '*rest h w']:
    """How much a query looks at each patch.

    Args:
      attention: weights or a rollout; rows are queries.
      grid: rows and columns of patches.
      query: the patch (row, column) that looks; None for the class token, or for the
        mean over all patches where the model has no class token.

    Raises:
      UserError: if the query lies outside of the grid.
    """
    height, width = grid
    patches = height * width
    first = attention.shape[-1] - patches
    if query is None:
        rows = attention[..., 0, :] if first else attention.mean(axis=-2)
    else:
        row, column = query
        if not (0 <= row < height and 0 <= column < width):
            raise UserError(
                f'the patch {row},{column} is outside of the grid of {height} x {width} patches'
            )
        rows = attention[..., first + row * width + column, :]
    return rows[..., first:].reshape(*rows.shape[:-1], height, width)


def overlay(
    image: UInt8[np.ndarray, 'Y X 3'], heat: Float[np.ndarray, 'h w']
) -> UInt8[np.ndarray, 'Y X 3']:
    """The heat map over a darkened grey image; brightest where the heat has its maximum."""
    height, width = image.shape[:2]
    smooth = Image.fromarray(heat.astype(np.float32)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    strength = np.clip(np.asarray(smooth) / max(heat.max(), 1e-12), 0, 1)
    grey = (image.mean(axis=-1, keepdims=True) / 255) * np.ones(3)
    colour = colormaps['inferno'](0.05 + 0.9 * strength)[..., :3]
    alpha = 0.3 + 0.5 * strength[..., None]
    return np.round(255 * ((1 - alpha) * grey + alpha * colour)).astype(np.uint8)


def draw(
    image: UInt8[np.ndarray, 'Y X 3'],
    weights: Float[np.ndarray, 'L H N N'],
    grid: Grid,
    *,
    layer: int = -1,
    query: tuple[int, int] | None = None,
    title: str = '',
) -> Figure:
    """One picture: the image, the rollout, all layers, and the heads of one layer.

    Args:
      image: as a person sees it.
      weights: of one example.
      grid: rows and columns of patches.
      layer: whose heads are shown, counted from 0, or from the end if negative.
      query: see `heat_map`.
      title: printed above everything.

    Raises:
      UserError: if the model has no such layer, or the grid no such patch.
    """
    depth, heads = weights.shape[:2]
    if not -depth <= layer < depth:
        raise UserError(f'there is no layer {layer}: the model has {depth}, 0 to {depth - 1}')
    chosen = layer % depth
    layers = heat_map(weights.mean(axis=1), grid, query)
    main = {
        'input': image,
        f'layer {chosen}, mean of heads': overlay(image, layers[chosen]),
        'rollout': overlay(image, heat_map(rollout(weights[:, None])[0], grid, query)),
    }
    small = {
        'Layers, mean of heads (each map is scaled to its own maximum)': {
            f'layer {i}': overlay(image, h) for i, h in enumerate(layers)
        },
        f'Heads of layer {chosen}': {
            f'head {i}': overlay(image, h)
            for i, h in enumerate(heat_map(weights[chosen], grid, query))
        },
    }
    return _lay_out(title, main, small, _marker(image, grid, query), max(depth, heads))


def _lay_out(
    title: str,
    main: dict[str, np.ndarray],
    small: dict[str, dict[str, np.ndarray]],
    marker: Rectangle | None,
    most: int,
) -> Figure:
    """Three large pictures above sections of small ones."""
    inches, columns = 9.0, 6 if most <= 12 else 8
    tall = main['input'].shape[0] / main['input'].shape[1]
    rows = [1] + [-(-len(section) // columns) for section in small.values()]
    sides = [inches / len(main)] + [inches / columns] * len(small)
    heights = [n * (side * tall + 0.2) + 0.35 for n, side in zip(rows, sides, strict=True)]
    figure = Figure(figsize=(inches, sum(heights)), layout='constrained')
    spec = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    parts = [figure.add_subfigure(spec[i]) for i in range(len(rows))]
    _section(parts[0], title, main, 1, len(main), 10)
    if marker is not None:
        parts[0].axes[0].add_patch(marker)
    for part, n, (heading, pictures) in zip(parts[1:], rows[1:], small.items(), strict=True):
        _section(part, heading, pictures, n, columns, 8)
    return figure


def _section(
    part: SubFigure,
    heading: str,
    pictures: dict[str, np.ndarray],
    rows: int,
    columns: int,
    size: int,
) -> None:
    part.suptitle(heading, x=0.01, ha='left', fontsize=11, color=figures.INK, va='top')
    for i, (name, picture) in enumerate(pictures.items()):
        figures.show_image(part.add_subplot(rows, columns, i + 1), picture, name, size)


def _marker(image: np.ndarray, grid: Grid, query: tuple[int, int] | None) -> Rectangle | None:
    """A frame around the patch that looks."""
    if query is None:
        return None
    side = image.shape[0] / grid[0], image.shape[1] / grid[1]
    corner = query[1] * side[1] - 0.5, query[0] * side[0] - 0.5
    return Rectangle(
        corner, side[1], side[0], fill=False, edgecolor=figures.COLOURS[1], linewidth=2
    )
