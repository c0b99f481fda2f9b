"""The base of all models: the methods of a Linen module besides the call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError, check_choice
from vit_jax.nn.attention_choice import ATTENTIONS
from vit_jax.nn.attention_maps import AttentionMap
from vit_jax.nn.blocks import GELUS
from vit_jax.nn.parameter_pictures import ParameterPictures
from vit_jax.nn.recompute import check_remat
from vit_jax.nn.stochastic import check_rate

Size = tuple[int, int]  # height and width in pixels
Params = dict[str, Any]  # nested arrays
Resized = tuple[Params, list[str]]  # and notes on what was changed, for people

DTYPES = ('float32', 'bfloat16', 'float16')
CHOICES: Mapping[str, Iterable[str]] = {
    **{'attention': ATTENTIONS, 'gelu': GELUS},
    **{'dtype': DTYPES, 'residual_dtype': DTYPES},
}


def check_fields(model: Any, *names: str) -> None:
    """Check fields that mean the same in several models.

    Args:
      model: with the fields.
      names: of CHOICES, or `remat`; others are rates.

    Raises:
      UserError: for a value that a field cannot have.
    """
    for name in names:
        value = getattr(model, name)
        if name == 'remat':
            check_remat(value)
        elif name not in CHOICES:
            check_rate(name, value)
        elif (name, value) != ('residual_dtype', None):
            check_choice(name, value, CHOICES[name])


def check_counts(model: Any, *names: str) -> None:
    """Raise UserError for a field that is less than 1; None is one that is not used."""
    for name in names:
        if (value := getattr(model, name)) is not None and value < 1:
            raise UserError(f'{name} must be at least 1, not {value}')


class Model(nn.Module):
    """Defaults of a model, which is called as `model(*inputs, train)` and returns a dict of arrays.

    Attributes:
      head_layers: the layers from the representation on; the last has an output for each class.
      weightless: fields that do not change the parameters, up to scanning of blocks.
      binding: those of them that must be as in the checkpoint that training starts from.
      noted: those of them whose difference from the checkpoint is reported.
      inert: fields that change the outputs of a trained model by rounding at most.
      mup_kinds: pairs of a pattern of parameters and a kind of `optim.mup`, for those whose kind
        their shapes do not tell.
      pads_pixels: whether it pads images to whole patches, by its field `pad_value`.
      translates: whether it generates sequences, as `EncoderDecoder`.
    """

    head_layers: ClassVar[tuple[str, ...]] = ('head',)
    weightless: ClassVar[tuple[str, ...]] = ()
    binding: ClassVar[tuple[str, ...]] = ('gelu',)
    noted: ClassVar[tuple[str, ...]] = ('norm_eps',)
    inert: ClassVar[tuple[str, ...]] = (
        *('attention', 'remat', 'dtype', 'residual_dtype', 'frozen_stages', 'posemb_std'),
        *('dropout', 'attention_dropout', 'drop_path', 'patch_dropout', 'init_scale', 'init_bias'),
    )
    mup_kinds: ClassVar[tuple[tuple[str, str], ...]] = ()
    pads_pixels: ClassVar[bool] = False
    translates: ClassVar[bool] = False

    @property
    def stride(self) -> int | None:
        """Side in pixels of the square of one token; None for models without patches."""
        return getattr(self, 'patch_size', None)

    @property
    def own_size(self) -> Size | None:
        """Size of images that the parameters are for, whatever images come; None if these tell."""
        return None

    @property
    def end_of_text(self) -> int | None:
        """The id with which texts have to end; None if the model looks for none."""
        return None

    @property
    def attends(self) -> bool:
        """Whether the model offers its attention maps."""
        return type(self).attention_maps is not Model.attention_maps

    def attention_maps(self, intermediates: Mapping[str, Any], *inputs: Any) -> list[AttentionMap]:
        """The attention of every layer.

        Args:
          intermediates: the collection that a call with `mutable=['intermediates']` returns.
          inputs: of that call.
        """
        del intermediates, inputs
        return []

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Pictures of parameters; none by default."""
        del params, image_size
        return []

    def layer_order(self) -> tuple[str, ...]:
        """Patterns of the layers' parameter paths from the input on; empty if there is no order."""
        return ()

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """The parameters for images of another size.

        Args:
          params: of the model; some may be absent.
          old_size: of the images that they were made for; None if unknown.
          new_size: of the new images.
          method: of interpolation of grids of positions, see `ops.resize.grid`.
        """
        del old_size, new_size, method
        return params, []

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]] | None:
        """The part that other tasks start from, if that is another model than this one.

        Returns:
          Keywords of that model with its `name`, and the names of its parameters in this one.
        """
        return None


class EncoderDecoder(Model):
    """Defaults of a model from sequences to sequences, with the methods of `vit_jax.ops.search`."""

    translates = True

    def __call__(
        self, source: Int[Array, 'B S'], target_in: Int[Array, 'B T'], train: bool = False
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Scores of every next token, given the true ones before it.

        Args:
          source: tokens, with eos at the end, then padding.
          target_in: bos and the target without its last token.
          train: whether dropout acts.

        Returns:
          logits: [B T V] in float32.
          memory: [B S _], the outputs of the encoder.
        """
        memory = self.encode(source, train)
        return {'logits': self.decode(memory, target_in, train), 'memory': memory.tokens}
