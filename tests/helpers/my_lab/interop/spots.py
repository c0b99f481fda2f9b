"""Checkpoints of another code base, which calls the encoder `trunk` and has no '/' in names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.interop.trained import TrainedModel, Written


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether the array names are those of this family."""
    return 'trunk.norm.scale' in flat


def read(flat: Mapping[str, np.ndarray], extra: Mapping[str, Any]) -> TrainedModel:
    """Read the model; its sizes follow from the array shapes."""
    del extra
    ours = {name.replace('trunk', 'encoder').replace('.', '/'): a for name, a in flat.items()}
    slots = ours['box_head/bias'].size // 4
    model = {
        'name': 'my_lab.models.spots',
        'num_classes': ours['head/bias'].size // slots - 1,
        'slots': slots,
        'width': ours['box_head/kernel'].shape[0],
    }
    return TrainedModel.from_file(
        unflatten_dict(ours, sep='/'), model, None, 'spots of another lab'
    )


def write(imported: TrainedModel) -> Written:
    """Return the arrays under the other code base's names."""
    flat = flatten_dict(imported.params, sep='/')
    arrays = {name.replace('encoder', 'trunk').replace('/', '.'): a for name, a in flat.items()}
    return Written(arrays, notes=('how many patches are hidden is not written',))


WRITERS = {('my_lab.models.spots', 'npz'): write}
