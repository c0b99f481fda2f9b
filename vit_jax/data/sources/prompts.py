"""`prompts:JSON`: prompts of classes, for zero-shot classification.

    prompts:{"names": ["cat", "dog"], "templates": ["a photo of a {}", "a drawing of a {}"]}

Each pair of a name and a template makes a record {label, caption}, class by class; the label is the
number of the name. There is one split, `all`.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from vit_jax.data import listing
from vit_jax.data.records import Listing, Record, SourceInfo
from vit_jax.errors import UserError
from vit_jax.storage import paths


class Source:
    """Records {label, caption}."""

    def __init__(self, path: str, split: str):
        if split != 'all':
            raise UserError(f"source prompts: unknown split {split!r} (valid: 'all')")
        try:
            content = paths.parse_json(path)
            names, templates = (_parse_texts(content[k]) for k in ('names', 'templates'))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                'source prompts: write {"names": [...], "templates": [...]} after the colon'
            ) from error
        check_prompts(names, templates)
        self.info = SourceInfo(len(names), names)
        self._templates = templates

    def __len__(self) -> int:
        return len(self.info.class_names) * len(self._templates)

    def __getitem__(self, index: int, /) -> Record:
        label, template = divmod(index, len(self._templates))
        name = self.info.class_names[label]
        return {'label': label, 'caption': self._templates[template].replace('{}', name)}

    def labels(self) -> np.ndarray:
        return np.arange(len(self)) // len(self._templates)

    def listing(self, indices: np.ndarray, /) -> Listing:
        return Listing(listing.digest_of(self.info.class_names, self._templates, indices))

    def record_name(self, index: int, /) -> str:
        return f'prompt {self[index]["caption"]!r}'


def _parse_texts(value: Any) -> tuple[str, ...]:
    """Parse a list of texts; TypeError for anything else, such as a text, a sequence of letters."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError('not a list of texts')
    return tuple(value)


def check_prompts(names: tuple[str, ...], templates: tuple[str, ...]) -> None:
    """Raise UserError unless class names are unique, and templates contain {}."""
    if not names or not templates:
        raise UserError('needs a class and a template, such as "a photo of a {}"')
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f'two classes have the name {repeated[0]!r}; rename one')
    if not all(name.strip() for name in names):
        raise UserError('a class has an empty name')
    for template in templates:
        if '{}' not in template:
            raise UserError(f'the template {template!r} has no {{}} for the class name')
