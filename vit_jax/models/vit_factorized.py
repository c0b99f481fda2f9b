"""ViT with a position for each row of patches and one for each column.

Factorized positions of NaViT, Dehghani et al., 2023, arXiv:2307.06304, section 3.2, as learned
tables that are added, and stretched over grids of other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.base import Params, Resized, Size
from vit_jax.models.vit import variant as variant
from vit_jax.nn.maps import ParameterPictures, embedding_filters, position_similarity
from vit_jax.nn.options import PositionFields
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.positions import learned
from vit_jax.ops import resize

TABLES = ('pos_embed_y', 'pos_embed_x')


class Model(vit.Model):
    """ViT whose patches get the sum of `pos_embed_y` [1 h D] of their row and `pos_embed_x` [1 w D]
    of their column. For the fields see `vit`.

    Tokens before the patches have no positions, whatever `positions.prefix` is.

    Raises:
      UserError: as for `vit`, or if `positions.embed` is not 'learn'.
    """

    positions: PositionFields = PositionFields(prefix='none')

    def __post_init__(self) -> None:
        if self.positions.embed != 'learn':
            raise UserError(
                f'positions.embed={self.positions.embed!r}: positions of rows and columns are '
                "learned, take 'learn'"
            )
        super().__post_init__()

    def _positions(self, tokens: int, images: Any) -> Array:
        grid = patch_grid(images.shape[1], images.shape[2], self.stride)
        rows, columns = (
            learned(self, count, self.width, self.positions.std, name)
            for count, name in zip(grid, TABLES, strict=True)
        )
        table = (rows[:, :, None] + columns[:, None]).reshape(1, -1, self.width)
        return jnp.pad(table, ((0, 0), (tokens - table.shape[1], 0), (0, 0)))

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images, and patches, of a different size; see `base.Model`.

        Methods that end in 'cropped' stretch both tables over the longer side, and cut.
        """
        params, notes = super().resize_params(params, old_size, new_size, method)
        grid, plain = patch_grid(*new_size, self.stride), method.removesuffix(resize.CROPPED)
        for name, side in zip(TABLES, grid, strict=True):
            table = params.get(name)
            length = side if plain == method else max(grid)
            if table is None or table.shape[1] == length == side:
                continue
            stretched = resize.grid(np.asarray(table[0])[:, None], (length, 1), plain)
            params = params | {name: stretched[None, :side, 0]}
            notes = [*notes, f'{name}: {table.shape[1]} positions resized to {side} ({method})']
        return params, notes

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw similarities of the patches' positions, and the filters that embed patches."""
        rows, columns = (np.asarray(params[name][0]) for name in TABLES)
        table = (rows[:, None] + columns).reshape(-1, self.width)
        grid = len(rows), len(columns)
        return [position_similarity('pos_embed', table, grid), *embedding_filters(params)]

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters in order: the embeddings, then each block."""
        first, *blocks = super().layer_order()
        return first.replace('|pos_embed|', '|pos_embed_[xy]|'), *blocks
