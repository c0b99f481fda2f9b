"""CapPa: a ViT learns from captions that a small decoder predicts.

Tschannen et al., 2023, arXiv:2306.07915. The decoder writes a caption token by token, each given
the image and the earlier tokens (Cap), or predicts all in parallel from only the image (Pa).
The ViT's parameters have the names of `vit.Model`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError, check_multiple
from vit_jax.models import base, vit
from vit_jax.models.base import Params, Resized, Size, check_counts, check_fields
from vit_jax.nn import encoder_decoder
from vit_jax.nn.attention import causal_mask
from vit_jax.nn.blocks import Mlp
from vit_jax.nn.dense import class_head
from vit_jax.nn.encoder_decoder import Cache, Memory, Stack
from vit_jax.nn.maps import AttentionMap, HiddenState, ParameterPictures, collect
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.options import NormFields
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.stochastic import Dropout

# The ViT encoder's part of the parameters.
ENCODER = ('patch_embed', 'pos_embed', 'encoder')


def variant(name: str) -> dict[str, int]:
    """Look up keywords of `Model` for a name such as 'B/16': a ViT, and 6 blocks of its width.

    Raises:
      UserError: as `vit.variant`.
    """
    return vit.variant(name)


class Model(base.Model):
    """A ViT and a decoder that predicts the caption of its image.

    Besides the call it has the methods by which `vit_jax.ops.search` writes captions: `encode`,
    `init_cache` and `decode_step`.

    Attributes:
      vocab_size: V, ids of captions are in 0..V-1.
      length: T, number of ids of a caption, including padding.
      patch_size, width, depth, mlp_dim, num_heads: Sizes of the ViT, see the model `vit`. Its
        representation is the mean of its tokens.
      decoder_depth: Blocks of the decoder, which has the ViT's width, heads and MLPs.
      decoder_bias: Whether norms and MLPs of the decoder's blocks have biases. Its attention never
        has biases.
      mask_token: Whether there is a token for parallel prediction, which replaces all tokens of a
        caption; Cap does not need it.
      dropout: Dropout rate of both parts.
      block: Options of the norms of both parts, see `NormFields`.
      scan: One scanned block instead of unrolled ones in the ViT; see the model `vit`.
      remat: Recomputation in the backward pass of the ViT; see the model `vit`.
      attention: Implementation: 'xla', 'pallas', 'cudnn' or 'auto'; see the model `vit`.
      dtype: Computation dtype. Parameters, layer norm statistics, softmax and logits stay float32.

    Raises:
      UserError: for an invalid field, images that do not fit the patches or the positions, or a
        caption longer than `length`.
    """

    vocab_size: int | None = None
    length: int = 64
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    decoder_depth: int = 6
    decoder_bias: bool = False
    mask_token: bool = True
    dropout: float = 0.0
    block: NormFields = NormFields()
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    generates_text = True
    mup_kinds = (('^(token_embed/embedding|mask_token)$', 'embedding'),)

    def __post_init__(self) -> None:
        check_fields(self, 'dropout', 'remat', 'attention', 'dtype')
        check_counts(self, 'length', 'depth', 'decoder_depth')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        super().__post_init__()

    def setup(self) -> None:
        self.vit = vit.Model(**self._vit_fields)
        nn.share_scope(self, self.vit)  # its parameters are at the top level, as in a ViT
        self.captions = CaptionDecoder(
            vocab_size=self.vocab_size or 0,
            length=self.length,
            width=self.width,
            depth=self.decoder_depth,
            mlp_dim=self.mlp_dim,
            num_heads=self.num_heads,
            use_bias=self.decoder_bias,
            mask_token=self.mask_token,
            dropout=self.dropout,
            norm_eps=self.block.norm_eps,
            attention=self.attention,
            dtype=self.dtype,
        )
        nn.share_scope(self, self.captions)
        self.captions.prepare()

    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        target_in: Int[Array, 'B T'] | None = None,
        parallel: Bool[Array, 'B'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Predict the captions of images, or only encode images.

        Args:
          images: Normalized images.
          target_in: Bos and the caption without its last token; None for no caption.
          parallel: True for captions to predict in parallel from only the image; by default none.
          train: Whether dropout acts.

        Returns:
          logits: [B T V] in float32, of the captions' tokens; absent without captions.
          tokens: [B N D], the patches after the final norm.
          pre_logits: [B D], their mean.
        """
        outputs = self.vit(images, train)
        if target_in is None:
            return outputs
        memory = whole_memory(outputs['tokens'])
        return outputs | {'logits': self.decode(memory, target_in, parallel, train)}

    def encode(self, images: Float[Array, 'B H W C'], train: bool = False) -> Memory:
        """Encode images for the decoder."""
        return whole_memory(self.vit(images, train)['tokens'])

    def decode(
        self,
        memory: Memory,
        target_in: Int[Array, 'B T'],
        parallel: Bool[Array, 'B'] | None = None,
        train: bool = False,
    ) -> Float[Array, 'B T V']:
        """Compute the logits of the captions; see `__call__`."""
        return self.captions(memory, target_in, parallel, train)

    def init_cache(self, memory: Memory, max_len: int) -> Cache:
        """Make the decoder's state before its first step, with room for `max_len` tokens."""
        return self.captions.init_cache(memory, max_len)

    def decode_step(
        self, cache: Cache, token: Int[Array, 'B'], position: int | Int[Array, '']
    ) -> tuple[Float[Array, 'B V'], Cache]:
        """Read a token of the caption, see `CaptionDecoder.decode_step`."""
        return self.captions.decode_step(cache, token, position)

    def max_tokens(self) -> int:
        """Return the largest number of tokens of a caption."""
        return self.length

    def attention_maps(
        self,
        intermediates: Mapping[str, Any],
        images: Float[Array, 'B H W C'],
        target_in: Int[Array, 'B T'] | None = None,
        *parallel: Any,
    ) -> list[AttentionMap]:
        """Collect attention maps from the `intermediates` of a call with these inputs.

        The order is: of the ViT, of the decoder to the caption, of the decoder to the image.
        """
        del parallel
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        maps = collect(intermediates, 'encoder', grid, grid)
        if target_in is None:
            return maps
        tokens = target_in.shape[1:]
        return [
            *maps,
            *collect(intermediates, 'decoder', tokens, tokens),
            *collect(intermediates, 'decoder', tokens, grid, 'cross'),
        ]

    def collect_hidden_states(
        self, collection: Mapping[str, Any], images: Float[Array, 'B H W C'], *others: Any
    ) -> list[HiddenState]:
        """Collect the states of the ViT's layers."""
        return self._vit().collect_hidden_states(collection, images, *others)

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """Bind the ViT's last norm."""
        return self._vit().final_norm_of(params)

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw the pictures of the ViT."""
        return self._vit().parameter_pictures(params, image_size)

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters from the image on; the decoder comes last."""
        return self._vit().layer_order()

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images, and patches, of a different size; see `base.Model`."""
        return self._vit().resize_params(params, old_size, new_size, method)

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Describe the ViT: keywords of `config.model`, and parameter paths."""
        return {'name': 'vit', **self._vit_fields}, ENCODER

    def _vit(self) -> vit.Model:
        """Make the ViT as a separate model, without parameters."""
        return vit.Model(**self._vit_fields, parent=None)

    @property
    def _vit_fields(self) -> dict[str, Any]:
        shape = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')
        same = (*shape, 'dropout', 'scan', 'remat', 'attention', 'dtype')
        return {
            **{name: getattr(self, name) for name in same},
            'block': vars(self.block),
            'positions': {'std': self.width**-0.5},
            'pool': {'kind': 'gap'},
        }


def whole_memory(tokens: Float[Array, 'B N D']) -> Memory:
    """Wrap all tokens of images, none of which is padding."""
    return Memory(tokens, jnp.ones((len(tokens), 1, 1, tokens.shape[1]), bool))


class CaptionDecoder(nn.Module):
    """A decoder of captions: token by token, or all tokens in parallel from only the image.

    Attributes:
      vocab_size: V, ids of captions are in 0..V-1.
      length: T, number of ids of a caption, including padding.
      width: D, width of the decoder and of the image's tokens.
      depth, mlp_dim, num_heads: Sizes of the blocks, see the model `vit`.
      use_bias: Whether norms and MLPs of the blocks have biases.
      mask_token: Whether captions can be predicted in parallel.
      dropout, norm_eps, attention, dtype: See `Model`.
    """

    vocab_size: int
    length: int
    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    use_bias: bool = False
    mask_token: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-6
    attention: str = 'auto'
    dtype: str = 'float32'

    def setup(self) -> None:
        init = nn.initializers.normal(1.0)
        self.token_embed = nn.Embed(self.vocab_size, self.width, embedding_init=init)
        if self.mask_token:
            self.mask_embed = self.param('mask_token', init, (1, 1, self.width))
        positions = nn.initializers.normal(self.width**-0.5)
        self.text_pos_embed = self.param('text_pos_embed', positions, (1, self.length, self.width))
        block = functools.partial(
            DecoderBlock,
            self.num_heads,
            self.mlp_dim,
            norm='pre',
            dropout=self.dropout,
            attention_dropout=self.dropout,
            norm_eps=self.norm_eps,
            dtype=jnp.dtype(self.dtype),
            attention_by=self.attention,
            causal=True,
            use_bias=self.use_bias,
        )
        self.decoder = Stack(block, self.depth)
        self.token_head = class_head(self.vocab_size)

    def prepare(self) -> None:
        """Make the parameters of `setup`, so that they draw their initial values first."""

    def __call__(
        self,
        memory: Memory,
        target_in: Int[Array, 'B T'],
        parallel: Bool[Array, 'B'] | None = None,
        train: bool = False,
    ) -> Float[Array, 'B T V']:
        """Compute the logits of the captions of encoded images; see `Model.__call__`."""
        tokens, mask = target_in.shape[1], None
        if tokens > self.length:
            raise UserError(
                f'captions have {tokens} ids, the model was made for {self.length}: set the length '
                "of the transform tokenize('caption', LENGTH) and config.model.length alike"
            )
        x = self.token_embed(target_in)
        if parallel is not None:
            if not self.mask_token:
                raise UserError(
                    'config.model.mask_token=False: captions cannot be predicted in parallel; set '
                    'config.task.parallel=0'
                )
            hidden = parallel[:, None, None]
            x = jnp.where(hidden, self.mask_embed, x)
            mask = causal_mask(tokens) | hidden[..., None]
        x = (x + self.text_pos_embed[:, :tokens]).astype(self.dtype)
        return self.token_head(self.decoder(x, memory, train, None, mask))

    def init_cache(self, memory: Memory, max_len: int) -> Cache:
        """Make the state before the first step, with room for `max_len` tokens."""
        return self.decoder.start(memory, max_len)

    def decode_step(
        self, cache: Cache, token: Int[Array, 'B'], position: int | Int[Array, '']
    ) -> tuple[Float[Array, 'B V'], Cache]:
        """Read the token at `position` of the caption shifted right, bos at 0.

        Returns:
          The logits of the next token, equal to the ones of the call, and the next step's cache.
        """
        x = self.token_embed(token) + self.text_pos_embed[0, position]
        x, cache = self.decoder.step(x.astype(self.dtype)[:, None], cache, position)
        return self.token_head(x[:, 0]), cache


class DecoderBlock(encoder_decoder.DecoderBlock):
    """A pre-norm block whose attention has no biases, with the MLP of a ViT.

    Dropout also acts on the hidden layer of the MLP.
    """

    use_bias: bool = False

    def setup(self) -> None:
        def norm() -> LayerNorm:
            return LayerNorm(self.norm_eps, dtype=self.dtype, use_bias=self.use_bias)

        self.attention = self._make_attention(('qkv',))
        self.attention_norm = norm()
        self.cross = self._make_attention(('q', 'kv'))
        self.cross_norm = norm()
        mlp: Any = Mlp(self.mlp_dim, self.dropout, dtype=self.dtype, use_bias=self.use_bias)
        self.mlp = mlp
        self.mlp_norm = norm()
        self.drop = Dropout(self.dropout)

    def __call__(
        self,
        x: Float[Array, 'B T D'],
        memory: Memory,
        train: bool = False,
        positions: Float[Array, '#B T D'] | None = None,
        mask: Bool[Array, '#B 1 T T'] | None = None,
    ) -> Float[Array, 'B T D']:
        """Apply the block; `mask`, true where a token may attend, replaces the causal mask."""
        limits = {'causal': True} if mask is None else {'mask': mask}
        x = self._attend_to_itself(x, positions, train, **limits)
        y = self._enter(x, self.cross_norm)
        y = self.cross(y, memory.tokens, memory.tokens, mask=memory.mask, train=train)
        return self._finish(x, y, train)

    def _make_attention(self, kernels: tuple[str, ...]) -> MultiHeadAttention:
        options = self.dtype, self.attention_by, vit.PROJECTIONS
        return MultiHeadAttention(self.num_heads, kernels, self.attention_dropout, *options)
