"""Checkpoints of other code bases, read and written by families, one per code base.

`read` and `write` of `checkpoint` and `TrainedModel` of `trained` are imported on first use.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ('read', 'write'):
        from vit_jax.interop import checkpoint

        return getattr(checkpoint, name)
    if name == 'TrainedModel':
        from vit_jax.interop.trained import TrainedModel

        return TrainedModel
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
