"""The table of the costs of every model's named sizes on the usual images.

`make docs` counts them, which takes half a minute.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

PACKAGE = 'vit_jax.models'
TABLE = pathlib.Path(__file__).with_suffix('.json')
IMAGE_SIZE = 224  # of the table
TOKENS = 64  # of a sentence
# Sizes that depend on the data otherwise; the classes are those of ImageNet.
ASSUMED = {'num_classes': 1000, 'vocab_size': 32_000}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One size of one model.

    Attributes:
      model: its module.
      name: the argument of the module's `variant`.
      parameters: their number.
      gmacs: of the forward pass on one example, in 10^9 multiply-accumulates.
    """

    model: str
    name: str
    parameters: int
    gmacs: float


def read_table() -> dict[str, list[Variant]]:
    """The variants of every model on images of `IMAGE_SIZE`."""
    return {
        model: [Variant(model, *row) for row in rows]
        for model, rows in json.loads(TABLE.read_text()).items()
    }
