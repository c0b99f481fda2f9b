"""Swin v2: cosine attention, continuous position biases, and norms at the end of branches.

Liu et al., 2022, arXiv:2111.09883.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from vit_jax.errors import UserError
from vit_jax.models import swin
from vit_jax.models.base import Params, Resized, Size
from vit_jax.models.swin import VARIANTS as VARIANTS
from vit_jax.nn.cosine_windows import PostNormBlock, PostNormMerging, windows_on
from vit_jax.nn.parameter_pictures import ParameterPictures
from vit_jax.nn.window_stages import is_shifted
from vit_jax.nn.windows import Windows

WINDOW = 8


def variant(name: str) -> dict[str, Any]:
    """Keywords of `Model` for a shape of `swin.VARIANTS`, and a window other than 8: 'T', 'B/w16'.

    Raises:
      UserError: if there is no such shape, or the window is not a positive number.
    """
    return swin.variant(name if '/' in name else f'{name}/w{WINDOW}')


class Model(swin.Model):
    """Swin v2, whose fields are those of `swin` and these.

    Attributes:
      window: as of `swin`; 8 by default.
      pretrained_windows: for each stage, the side of the windows of an earlier training, by which
        relative positions are measured; () or 0 for that of its own windows.
      image_size: height in pixels of the images whose maps limit the windows, as released models
        have it: a stage whose map is not larger than a window has one of the map's size, whatever
        images come. None: the maps of the images that come.

    Raises:
      UserError: if a field has no such value.
    """

    window: int = WINDOW
    pretrained_windows: tuple[int, ...] = ()
    image_size: int | None = None

    merging = PostNormMerging
    weightless = (*swin.Model.weightless, 'pretrained_windows', 'image_size')

    def __post_init__(self) -> None:
        sides = self.pretrained_windows
        if sides and (len(sides) != len(self.depths) or min(sides) < 0):
            raise UserError(
                f'pretrained_windows {tuple(sides)}: give one side, or 0, for each of '
                f'{len(self.depths)} stages'
            )
        super().__post_init__()
        if self.image_size is not None and self.image_size < self.stride:
            raise UserError(f'image_size={self.image_size}: must be at least {self.stride}')

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """None: the biases are outputs of an MLP."""
        del params, image_size
        return []

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """The parameters as they are: they fit windows and images of any size."""
        del old_size, new_size, method
        return params, []

    def _windows(self, i: int, j: int, height: int, width: int) -> Windows:
        side, shifts, fixed = self._side(i)
        return windows_on(height, width, side, is_shifted(j) and shifts, fixed)

    def _block(self, i: int, dtype: Any) -> Callable[..., nn.Module]:
        side, shifts, fixed = self._side(i)
        fields = self._block_fields(i, dtype)
        pretrained = self.pretrained_windows[i] if self.pretrained_windows else 0

        def block(shifted: bool, name: str) -> nn.Module:
            return PostNormBlock(
                **fields,
                window=side,
                shifted=shifted and shifts,
                pretrained=pretrained,
                fixed=fixed,
                name=name,
            )

        return block

    def _side(self, i: int) -> tuple[int, bool, bool]:
        """The side of a stage's windows; whether every second block shifts them; and whether both
        hold for maps of any size.
        """
        if self.image_size is None:
            return self.window, True, False
        rows = self.image_size // self.patch_size // 2**i
        return min(self.window, rows), rows > self.window, True
