"""Parameters and FLOPs of the named sizes of every model, computed from shapes.

`python -m vit_jax.profiling.variants` writes the table that `read_table` reads.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pathlib
import types
import typing
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from vit_jax.config.run import LEFT_OPEN
from vit_jax.errors import UserError, modules
from vit_jax.profiling import flops
from vit_jax.signatures import Parameters, parameters

PACKAGE = 'vit_jax.models'
TABLE = pathlib.Path(__file__).with_name('variants.json')
IMAGE_SIZE = 224  # of the table
TOKENS = 64  # of a sentence
# Sizes that otherwise depend on the data; ImageNet's number of classes.
ASSUMED = {'num_classes': 1000, 'vocab_size': 32_000}
PIXELS = {'H', 'W'}
# Lengths of one example along the dimensions of a model's annotations.
LENGTHS = {'B': 1, 'C': 3}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One size of one model.

    Attributes:
      model: Module of the model.
      name: Argument of the module's `variant`.
      parameters: Parameter count.
      gmacs: Multiply-accumulates of the forward pass on one example, in 10^9.
    """

    model: str
    name: str
    parameters: int
    gmacs: float


def read_table() -> dict[str, list[Variant]]:
    """Read the variants of every model, counted on images of `IMAGE_SIZE`."""
    return {
        model: [Variant(model, *row) for row in rows]
        for model, rows in json.loads(TABLE.read_text()).items()
    }


def count(model: str, image_size: int) -> Iterator[Variant]:
    """Count every variant of a model on square images, `image_size` pixels a side."""
    module = importlib.import_module(f'{PACKAGE}.{model}')
    for shape in getattr(module, 'VARIANTS', ()):
        yield measure(model, _complete(module, shape), image_size)


def _complete(module: types.ModuleType, shape: str) -> str:
    """Return the name of a shape, with the model's default patch size if it has none."""
    try:
        module.variant(shape)
    except UserError:
        return f'{shape}/{module.Model.patch_size}'
    return shape


def measure(model: str, name: str, image_size: int) -> Variant:
    """Count the parameters and FLOPs of a variant of a model."""
    module = importlib.import_module(f'{PACKAGE}.{model}')
    cls, keywords = module.Model, module.variant(name)
    fields = parameters(cls)
    sizes = {key: ASSUMED[key] for key in LEFT_OPEN if key in fields}
    scan_option = {'scan': True} if 'scan' in fields else {}  # one block is traced, not all
    inputs = [_blank(p.annotation, image_size) for p in _required_inputs(cls).values()]
    variables, forward = flops.variables_and_flops(cls(**sizes | scan_option | keywords), *inputs)
    count = sum(leaf.size for leaf in jax.tree.leaves(variables['params']))
    return Variant(model, name, count, forward / 2e9)


def _required_inputs(cls: Any) -> Parameters:
    """Find the required inputs of a model."""
    inputs = parameters(cls.__call__)
    return {k: p for k, p in inputs.items() if k != 'self' and p.default is inspect.Parameter.empty}


def _blank(annotation: Any, image_size: int) -> jax.ShapeDtypeStruct:
    """Make the shape and dtype of an example for an annotation such as `B H W C`."""
    names = annotation.dim_str.split()
    shape = [image_size if n in PIXELS else LENGTHS.get(n, TOKENS) for n in names]
    kinds = typing.cast(tuple[str, ...], annotation.dtypes)
    for kind in ('float32', 'int32', 'bool'):
        if kind in kinds:
            return jax.ShapeDtypeStruct(tuple(shape), np.dtype(kind))
    raise TypeError(f'{annotation}: cannot make an array of this type')


def main() -> None:
    """Write the table, one line for each model, including those without variants."""
    counted = {
        model: [(v.name, v.parameters, v.gmacs) for v in count(model, IMAGE_SIZE)]
        for model in modules(PACKAGE)
    }
    lines = (f'{json.dumps(model)}: {json.dumps(rows)}' for model, rows in counted.items())
    TABLE.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


if __name__ == '__main__':
    main()
