"""Base classes of models: what a model offers besides its call, and how parameters are resized.

`Model` has the defaults, `PatchModel` adds a ViT's pictures and its resizing to other images, and
`EncoderDecoder` generates sequences.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError, check_choice
from vit_jax.models._resizing import Params as Params
from vit_jax.models._resizing import Resized as Resized
from vit_jax.models._resizing import Size as Size
from vit_jax.models._resizing import resize_patches, resize_positions, resize_relative
from vit_jax.nn import options
from vit_jax.nn.attention import check_remat
from vit_jax.nn.attention_choice import ATTENTIONS
from vit_jax.nn.blocks import GELUS
from vit_jax.nn.maps import (
    HIDDEN_STATES,
    AttentionMap,
    HiddenState,
    ParameterPictures,
    choose_layers,
    collect,
    collect_blocks,
    embedding_filters,
    keep_hidden_states,
    position_similarity,
    require_grid,
)
from vit_jax.nn.norms import NORMS
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.positions import sincos2d
from vit_jax.nn.rotary import Rope, RopeDinov3
from vit_jax.nn.stochastic import check_rate

DTYPES = ('float32', 'bfloat16', 'float16')
CHOICES: Mapping[str, Iterable[str]] = {
    **{'attention': ATTENTIONS, 'gelu': GELUS, 'block.gelu': GELUS},
    **{'dtype': DTYPES, 'block.residual_dtype': DTYPES},
}


# The effect of a field on a trained model, by its name in any model:
#   'none': rounding at most; the field concerns training, precision, kernels or initial values
#   'outputs': other outputs of the same parameters, up to scanning of blocks
#   'noted': as 'outputs'; a difference from the checkpoint is reported
#   'binding': must equal the checkpoint's
# All others determine the parameters.
EFFECTS: Mapping[str, str] = {
    **dict.fromkeys(('attention', 'remat', 'dtype', 'block.residual_dtype'), 'none'),
    **dict.fromkeys(('dropout', 'attention_dropout', 'drop_path', 'patch_dropout'), 'none'),
    **dict.fromkeys(('block.attention_dropout', 'block.drop_path'), 'none'),
    **dict.fromkeys(('logits.scale', 'logits.bias', 'positions.std'), 'none'),
    **dict.fromkeys(('frozen_stages', 'resnet.frozen_stages'), 'none'),
    **dict.fromkeys(('scan', 'head.bias', 'head.norm', 'resnet.dilate'), 'outputs'),
    **dict.fromkeys(('norm_eps', 'block.norm_eps', 'positions.kind'), 'noted'),
    **dict.fromkeys((f'positions.rope.{field}' for field in vars(Rope())), 'noted'),
    **dict.fromkeys((f'positions.rope_dinov3.{field}' for field in vars(RopeDinov3())), 'noted'),
    **dict.fromkeys(('gelu', 'block.gelu', 'block.norm_place'), 'binding'),
}


class Model(nn.Module):
    """Defaults of a model, which is called as `model(*inputs, train)` and returns a dict of arrays.

    Attributes:
      head_layers: The layers from the representation on; the last has an output for each class.
      effects: Effect on a trained model of each of the class's own fields that has an entry in
        none of its bases, see `EFFECTS`.
      mup_kinds: Pairs of a pattern of parameters and a kind of `optim.mup`, where shapes do not
        determine the kind.
      largest: Pairs of a pattern of parameters and their largest value after a training step.
      first_layer: A pattern of the parameters that see the image, if it is not the first of
        `layer_order`.
      image_method: The method that takes images first.
      translates: Whether it maps sequences to sequences, like `EncoderDecoder`.
      generates_text: Whether it generates texts by searches that need the special ids of
        `vit_jax vocab`.
      part_task: Task of the part that `transferable` describes.
    """

    head_layers: ClassVar[tuple[str, ...]] = ('head',)
    largest: ClassVar[tuple[tuple[str, float], ...]] = ()
    effects: ClassVar[Mapping[str, str]] = EFFECTS
    mup_kinds: ClassVar[tuple[tuple[str, str], ...]] = ()
    first_layer: ClassVar[str] = ''
    image_method: ClassVar[str] = '__call__'
    translates: ClassVar[bool] = False
    generates_text: ClassVar[bool] = False
    part_task: ClassVar[str] = 'classify'

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the constructor take groups as mappings, and their keys under flat names."""
        super().__init_subclass__(**kwargs)
        init: Callable[..., None] = cls.__init__

        @functools.wraps(init)
        def init_groups(self: Any, *args: Any, **fields: Any) -> None:
            init(self, *args, **options.build(cls, fields))

        cls.__init__ = init_groups  # type: ignore[method-assign]

    @classmethod
    def effect_of(cls, field: str) -> str:
        """Look up the effect of a field such as 'block.gelu', see `EFFECTS`; '' if unlisted."""
        tables = (vars(base).get('effects', {}) for base in cls.__mro__)
        return next((table[field] for table in tables if field in table), '')

    @property
    def stride(self) -> int | None:
        """Side in pixels of the square of one token; None for models without patches."""
        return getattr(self, 'patch_size', None)

    @property
    def own_size(self) -> Size | None:
        """Image size of the parameters where images may have any size; None if it is theirs."""
        return None

    @property
    def end_of_text(self) -> int | None:
        """Id that texts have to end with; None if they need none."""
        return None

    @property
    def attends(self) -> bool:
        """Whether the model offers its attention maps."""
        return type(self).attention_maps is not Model.attention_maps

    def attention_maps(self, intermediates: Mapping[str, Any], *inputs: Any) -> list[AttentionMap]:
        """Collect the attention of every layer.

        Args:
          intermediates: Collection that a call with `mutable=['intermediates']` returns.
          inputs: Inputs of this call.
        """
        del intermediates, inputs
        return []

    def hidden_states(
        self,
        variables: Mapping[str, Any],
        *inputs: Any,
        layers: Sequence[int] | None = None,
        normalized: bool = False,
    ) -> tuple[Any, list[HiddenState]]:
        """Apply the model, and return the tokens between its layers too.

            outputs, states = model.hidden_states(variables, images, layers=[-4, -1])

        Args:
          variables: {'params': ...} and other collections, as for `apply`.
          inputs: Inputs of the model.
          layers: Numbers as in transformers' `hidden_states`: 0 is the embedding, 1 the output of
            the first block, -1 of the last. timm's `forward_intermediates` counts blocks from 0. By
            default all.
          normalized: Whether the tokens go through the model's final norm, if it has one.

        Returns:
          The outputs, and a state for each layer.

        Raises:
          UserError: if the model keeps no hidden states, there is no such layer, or the norm is for
            another width, as in the early stages of a Swin.
        """
        with nn.intercept_methods(keep_hidden_states):
            outputs, collections = self.apply(variables, *inputs, mutable=[HIDDEN_STATES])
        states = self.collect_hidden_states(collections.get(HIDDEN_STATES, {}), *inputs)
        if not states:
            raise UserError(f'{type(self).__module__}: this model does not return hidden states')
        if layers is not None:
            states = [states[layer] for layer in choose_layers(len(states), layers)]
        if not normalized or (norm := self.final_norm_of(variables['params'])) is None:
            return outputs, states
        return outputs, [dataclasses.replace(state, tokens=norm(state.tokens)) for state in states]

    def collect_hidden_states(
        self, collection: Mapping[str, Any], *inputs: Any
    ) -> list[HiddenState]:
        """Collect the states of all layers; none by default.

        Args:
          collection: Arrays that `keep_hidden_states` kept in a call.
          inputs: Inputs of this call.
        """
        del collection, inputs
        return []

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Make a function of tokens [B N D] of the norm after the last block; None without one."""
        del params
        return None

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Make pictures of parameters; none by default."""
        del params, image_size
        return []

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameter paths in order; empty if there is no order."""
        return ()

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images of a different size.

        Args:
          params: Parameters of the model; some may be absent.
          old_size: Size of the images that they were made for; None if unknown.
          new_size: Size of the new images.
          method: Interpolation of grids of positions, see `ops.resize.grid`.
        """
        del old_size, new_size, method
        return params, []

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]] | None:
        """Describe the part that other tasks start from, if it is a separate model.

        Returns:
          Keywords of this part as a model with `name`, and the names of its parameters here.
        """
        return None


class PatchModel(Model):
    """Pictures and resizing of a model with the fields of `models.vit.Model`."""

    def attention_maps(
        self: Any, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C']
    ) -> list[AttentionMap]:
        """Collect attention maps from the `intermediates` of a call with these images."""
        _, height, width, _ = images.shape
        grid = patch_grid(height, width, self.stride)
        return collect(intermediates, 'encoder', grid, grid)

    def collect_hidden_states(
        self: Any, collection: Mapping[str, Any], images: Float[Array, 'B H W C'], *others: Any
    ) -> list[HiddenState]:
        """Collect the states of the encoder's layers in a call with these images."""
        del others
        grid = patch_grid(images.shape[1], images.shape[2], self.stride)
        counts = {'prefix': self.prefix_tokens, 'class_tokens': self.class_tokens}
        return [
            HiddenState(name, tokens, grid, **counts)
            for name, tokens in collect_blocks(collection, 'encoder')
        ]

    def final_norm_of(self: Any, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Bind the encoder's last norm; a norm of the mean of the tokens does not count."""
        norm = params['encoder'].get('norm')
        return bind_norm(self.block.norm, self.block.norm_eps, self.dtype, norm)

    def parameter_pictures(
        self: Any, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw similarities of the patches' positions, and the filters that embed patches."""
        if self.positions.embed == 'none':
            return embedding_filters(params)
        grid = require_grid(image_size, self.stride)
        table = sincos2d(*grid, self.width)
        if self.positions.embed == 'learn':
            table = params['pos_embed'][0, self.positioned_tokens :]
        return [position_similarity('pos_embed', table, grid), *embedding_filters(params)]

    def resize_params(
        self: Any, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images, and patches, of a different size; see `Model`.

        If `old_size` is None, the old patches are assumed to form a square.

        Raises:
          UserError: if the images cannot be cut into patches, or the old patches do not form a
            square.
        """
        notes: list[str] = []
        kernel = params.get('patch_embed', {}).get('kernel')
        patch = self.patch_size if kernel is None or kernel.ndim != 4 else kernel.shape[0]
        if self.positions.embed == 'learn' and 'pos_embed' in params:
            stride = self.stride // self.patch_size * patch
            old = old_size and (old_size[0] // stride, old_size[1] // stride)
            new = patch_grid(*new_size, self.stride)
            params, notes = resize_positions(params, old, new, self.positioned_tokens, method)
        if self.positions.kind == 'relative':
            params, note = resize_relative(params, patch_grid(*new_size, self.stride), method)
            notes = notes + note
        if patch != self.kernel_side:
            params, note = resize_patches(params, self.kernel_side)
            notes += note
        return params, notes


class EncoderDecoder(Model):
    """Defaults of a model from sequences to sequences, with the methods of `vit_jax.ops.search`."""

    translates = generates_text = True

    def __call__(
        self, source: Int[Array, 'B S'], target_in: Int[Array, 'B T'], train: bool = False
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Score every next token, given the true ones before it.

        Args:
          source: Source tokens, with eos at the end, then padding.
          target_in: Bos and the target without its last token.
          train: Whether dropout acts.

        Returns:
          logits: [B T V] in float32.
          memory: [B S _], outputs of the encoder.
        """
        memory = self.encode(source, train)
        return {'logits': self.decode(memory, target_in, train), 'memory': memory.tokens}


def bind_norm(
    name: str, norm_eps: float, dtype: str, params: Mapping[str, Any] | None
) -> Callable[[Array], Array] | None:
    """Make a function of tokens [B N D] of a trained norm.

    Args:
      name: Key of NORMS.
      norm_eps: Value added to the variance.
      dtype: Computation dtype.
      params: Parameters of the norm; None without a norm.

    Returns:
      The function; None without parameters.
    """
    if params is None:
        return None
    options = {} if name == 'rms' else {'use_bias': 'bias' in params}
    norm = NORMS[name](norm_eps, dtype=jnp.dtype(dtype), parent=None, **options)
    return bind(norm, params)


def bind(norm: nn.Module, params: Mapping[str, Any]) -> Callable[[Array], Array]:
    """Make a function of tokens of a norm without a parent and its parameters, such as `scale`."""
    variables = {'params': jax.tree.map(jnp.asarray, params)}
    width = params['scale'].shape[-1]

    def apply(tokens: Array) -> Array:
        if tokens.shape[-1] != width:
            raise UserError(
                f'tokens of width {tokens.shape[-1]} cannot be normalized: the norm after the last '
                f'block has width {width}; take the last layer, or tokens without normalization'
            )
        normed: Any = norm.apply(variables, tokens)
        return normed

    return apply


def check_fields(model: Any, *names: str) -> None:
    """Check fields that mean the same in several models.

    Args:
      model: Model with the fields.
      names: Keys of CHOICES, `remat`, or rates.

    Raises:
      UserError: for a value that a field cannot have.
    """
    for name in names:
        value = operator.attrgetter(name)(model)
        if name == 'remat':
            check_remat(value)
        elif name not in CHOICES:
            check_rate(name, value)
        elif (name, value) != ('block.residual_dtype', None):
            check_choice(name, value, CHOICES[name])


def check_counts(model: Any, *names: str) -> None:
    """Raise UserError for a field that is less than 1; None passes."""
    for name in names:
        if (value := operator.attrgetter(name)(model)) is not None and value < 1:
            raise UserError(f'{name} must be at least 1, not {value}')
