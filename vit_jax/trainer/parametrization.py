"""The factors of `config.optim.parametrization`: a model compared with its narrow base model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import calls
from vit_jax.config import defaults
from vit_jax.errors import UserError, nearest
from vit_jax.interop.trained import fields
from vit_jax.optim import mup
from vit_jax.optim.make import STANDARD

_KEY = 'config.optim.parametrization'


def of_config(
    config: ConfigDict, model: Any, params: Any, params_of: Callable[[Any], Any]
) -> Mapping[str, mup.Factors] | None:
    """The factors of muP; None for the standard parametrization.

    Args:
      config: checked.
      model: of the config.
      params: shapes of its parameters.
      params_of: model -> these shapes.

    Raises:
      UserError: for another text, or a base model that differs in more than widths.
    """
    text = defaults.arguments(config, 'optim').get('parametrization', STANDARD)
    if (widths := base_fields(text, fields(model))) is None:
        return None
    base = params_of(model.clone(parent=None, **widths))
    return mup.factors(params, base, model.mup_kinds)


def base_fields(text: str, known: Iterable[str]) -> dict[str, Any] | None:
    """The fields of the base model that `mup(...)` gives; None for 'standard'.

    Args:
      text: of the config.
      known: the fields that models of this kind have.

    Raises:
      UserError: for another text, or an unknown field.
    """
    if text == STANDARD:
        return None
    call = calls.parse_call(text, _KEY)
    args, widths = calls.arguments(call)
    if calls.function_name(call) != 'mup' or args or not widths:
        raise UserError(
            f"{_KEY}={text!r}: write 'standard', or 'mup(width=64, ...)' with the widths of the "
            'model that the hyperparameters were tuned on'
        )
    for key in widths:
        if key not in known:
            raise UserError(f'{_KEY}: ' + nearest('field of config.model', key, known))
    return widths
