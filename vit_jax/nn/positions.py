"""Position embeddings for a sequence of tokens and for a grid of patches."""

import flax.linen as nn
import numpy as np
from jaxtyping import Array, Float, Float32

from vit_jax.errors import UserError, check_choice

LAYOUTS = ('interleaved', 'concatenated')


def sincos1d(
    tokens: int, dim: int, layout: str = 'interleaved', temperature: float = 10_000.0
) -> Float32[np.ndarray, 'N D']:
    """Fixed sine-cosine embedding of Vaswani et al., 2017, arXiv:1706.03762, section 3.5.

    The angles of position p are p / temperature^(2i / dim). In the layout 'interleaved', that of
    the paper, feature 2i is the sine and 2i + 1 the cosine; 'concatenated' has the sines in the
    first half and the cosines in the second.

    Raises:
      UserError: if `dim` is odd, or there is no such layout.
    """
    check_choice('positions', layout, LAYOUTS)
    if dim % 2:
        raise UserError(f'sine-cosine positions need an even width, not {dim}')
    angles = np.outer(np.arange(tokens), temperature ** -(np.arange(0, dim, 2) / dim))
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    if layout == 'concatenated':
        pairs = pairs.swapaxes(1, 2)
    return pairs.reshape(tokens, dim).astype(np.float32)


def sincos2d(
    height: int, width: int, dim: int, temperature: float = 10_000.0
) -> Float32[np.ndarray, 'N D']:
    """Fixed two-dimensional sine-cosine embedding of MoCo v3, arXiv:2104.02057.

    The four quarters of the features are sin x, cos x, sin y, cos y at `dim / 4` frequencies from 1
    to 1 / temperature, both included. Rows run over the grid line by line.

    Raises:
      UserError: unless `dim` is a multiple of 4 and at least 8.
    """
    if dim % 4 or dim < 8:
        raise UserError(
            f'posemb sincos2d needs a width that is a multiple of 4 from 8 up, not {dim}'
        )
    frequency = temperature ** -np.linspace(0.0, 1.0, dim // 4)
    y, x = np.mgrid[:height, :width]
    angles = [np.outer(axis.ravel(), frequency) for axis in (x, y)]
    table = np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)], axis=1)
    return table.astype(np.float32)


def learned(module: nn.Module, tokens: int, dim: int) -> Float[Array, '1 N D']:
    """The parameter `pos_embed` of `module`: a row for every token, E_pos of arXiv:2010.11929.

    Raises:
      UserError: if the parameter was made for another number of tokens.
    """
    if module.has_variable('params', 'pos_embed'):
        made_for: int = module.get_variable('params', 'pos_embed').shape[1]
        if made_for != tokens:
            raise UserError(
                f'pos_embed has rows for {made_for} tokens, but these images have {tokens}: '
                'use the image size of the checkpoint, or resize pos_embed'
            )
    return module.param('pos_embed', nn.initializers.normal(0.02), (1, tokens, dim))
