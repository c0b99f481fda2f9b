"""Names of classes in the config.json of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.errors import UserError


def read(config: Mapping[str, Any], num_classes: int | None) -> tuple[str, ...]:
    """The names of all outputs; empty without classes, or if they are only LABEL_0, LABEL_1, ...

    Raises:
      UserError: if there is a name for more than `num_classes` outputs.
    """
    listed = dict(enumerate(config.get('label_names') or ()))  # of timm
    names = {int(i): str(name) for i, name in (config.get('id2label') or listed).items()}
    if not names or not num_classes:
        return ()
    if not 0 <= min(names) <= max(names) < num_classes:
        raise UserError(
            f'id2label in config.json names class {max(names, key=abs)}, but the head has '
            f'{num_classes} outputs; get config.json of this model'
        )
    ordered = tuple(names.get(i, f'LABEL_{i}') for i in range(num_classes))
    return () if ordered == _placeholders(num_classes) else ordered


def write(class_names: Sequence[str], num_classes: int | None) -> dict[str, dict[str, Any]]:
    """`id2label` and `label2id` for `num_classes` outputs; unnamed ones get placeholders."""
    count = num_classes or 0
    names = (*class_names[:count], *_placeholders(count)[len(class_names) :])
    return {
        'id2label': {str(i): name for i, name in enumerate(names)},
        'label2id': {name: i for i, name in enumerate(names)},
    }


def _placeholders(count: int) -> tuple[str, ...]:
    return tuple(f'LABEL_{i}' for i in range(count))
