"""SigLIP 2 NaFlex: SigLIP whose image tower takes images of any size and aspect ratio.

Tschannen et al., 2025, arXiv:2502.14786, section 2.4.2.
"""

from __future__ import annotations

from typing import Any

from vit_jax.models import naflex, siglip
from vit_jax.models.base import Size
from vit_jax.models.siglip import variant as variant


class Model(siglip.Model):
    """Model `siglip` with the model `naflex` as its image tower.

    Attributes:
      pos_grid, patch_dropout: Options of the image tower, see the model `naflex`.
    """

    pos_grid: int = 16
    patch_dropout: float = 0.0

    tower = naflex.Model

    @property
    def own_size(self) -> Size | None:
        """Height and width in pixels of images that use the table of positions as it is."""
        return self.image_tower().own_size

    @property
    def _image_fields(self) -> dict[str, Any]:
        options = {'pos_grid': self.pos_grid, 'patch_dropout': self.patch_dropout}
        return super()._image_fields | options
