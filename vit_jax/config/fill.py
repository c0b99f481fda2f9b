"""Sizes of the model that a config leaves open, filled in from the data."""

from __future__ import annotations

from ml_collections import ConfigDict

from vit_jax.errors import UserError


def num_classes(config: ConfigDict, size: int) -> None:
    """Sets `config.model.num_classes` from the data where the config leaves it open.

    Raises:
      UserError: if the data has more classes than the model.
    """
    _fill(config, 'num_classes', size, 'classes')


def vocab_size(config: ConfigDict, size: int) -> None:
    """Sets `config.model.vocab_size` from the data where the config leaves it open.

    Raises:
      UserError: if the data has more ids than the model.
    """
    _fill(config, 'vocab_size', size, 'ids in its vocabulary')


def _fill(config: ConfigDict, key: str, size: int, what: str) -> None:
    if key not in config.model or not size:
        return
    if config.model[key] is None:
        config.model[key] = size
    if config.model[key] < size:
        raise UserError(
            f'config.model.{key}={config.model[key]}: {config.data.source} has {size} {what}; '
            'leave it unset or raise it'
        )
