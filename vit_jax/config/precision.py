"""The dtypes of published recipes of ViTs, MAE and Swin."""

from __future__ import annotations


def precision(arg: str | None) -> tuple[str, dict[str, str]]:
    """The dtypes that the argument of an experiment asks for.

    Products are in bfloat16, the default precision of TPUs for float32, and the residual stream is
    in float32 as in the authors' code; with `fast` it is in bfloat16 too.

    Args:
      arg: of `get_config`, as `S/16,fast`.

    Returns:
      The argument without `fast`, and keywords of `config.model`.
    """
    words = (arg or '').split(',')
    rest = ','.join(word for word in words if word != 'fast')
    residual = {} if 'fast' in words else {'residual_dtype': 'float32'}
    return rest, {'dtype': 'bfloat16', **residual}
