"""The shapes of the published ViTs."""

import re

from vit_jax.errors import UserError, check_choice

# name: width, depth, mlp_dim, num_heads
VARIANTS = {
    'mu': (32, 1, 128, 2),
    'Ti': (192, 12, 768, 3),
    'S': (384, 12, 1536, 6),
    'M': (512, 12, 2048, 8),
    'B': (768, 12, 3072, 12),
    'L': (1024, 24, 4096, 16),
    'So400m': (1152, 27, 4304, 16),
    'H': (1280, 32, 5120, 16),
    'g': (1408, 40, 6144, 16),
    'g-opt': (1536, 40, 6144, 16),
    'G': (1664, 48, 8192, 16),
    'G-opt': (1536, 48, 8192, 16),
    'e': (1792, 56, 15360, 16),
}


def variant(name: str) -> dict[str, int]:
    """Keywords of `Model` for a name such as 'B/16': a shape of VARIANTS and a patch size.

    Raises:
      UserError: if there is no such shape, or the patch size is not a positive number.
    """
    shape, slash, patch = name.partition('/')
    check_choice('ViT variant', shape, VARIANTS)
    if not slash or not re.fullmatch('[1-9][0-9]*', patch):
        raise UserError(f'ViT variant {name!r} needs a patch size, for example {shape}/16')
    fields = ('width', 'depth', 'mlp_dim', 'num_heads')
    return {'patch_size': int(patch), **dict(zip(fields, VARIANTS[shape], strict=True))}
