"""The items of a saved step: splitting a state into them, and reading all or some of them.

`variables` has the variables for inference, `training` the optimizer's state and the rest,
`meta` JSON.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.storage.paths import why
from vit_jax.storage.step_folder import META, TRAINING, VARIABLES
from vit_jax.tree_paths import path_name, require_fit

if TYPE_CHECKING:  # Orbax takes a quarter of a second to import; a refused config needs none of it
    import orbax.checkpoint as ocp

PyTree = Any
Items = dict[str, dict[str, PyTree]]  # item -> field of the state -> arrays

ITEMS_OF_INFERENCE = (VARIABLES, META)
_FIELDS_OF_VARIABLES = ('params', 'collections', 'ema')


def handler() -> ocp.CompositeCheckpointHandler:
    """Orbax's handler of a step's items."""
    import orbax.checkpoint as ocp

    arrays = {VARIABLES: ocp.PyTreeCheckpointHandler(), TRAINING: ocp.PyTreeCheckpointHandler()}
    return ocp.CompositeCheckpointHandler(**arrays, **{META: ocp.JsonCheckpointHandler()})


def save_args(state: PyTree, meta: dict[str, Any]) -> ocp.args.Composite:
    """The items that Orbax is to write."""
    import orbax.checkpoint as ocp

    items = {name: ocp.args.PyTreeSave(tree) for name, tree in _split(state).items()}
    return ocp.args.Composite(**items, **{META: ocp.args.JsonSave(meta)})


def read(directory: Path, target: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """The state with the shardings of `target`, and `meta`.

    Raises:
      UserError: names the arrays that are missing or unknown, or differ in shape or dtype, with
        both; or if they cannot be read.
    """
    wanted = _split(target)
    with _reader(directory) as reader:
        require_fit(
            _arrays(_stored(reader, directory)),
            _arrays(wanted),
            f'the checkpoint {directory} does not fit this config',
            dtypes=True,
            first='params/',
            advice='. Use the config that it was trained with, or another --workdir',
        )
        restored = reader.restore(directory, args=_restore_args(wanted))
    return _join(target, {name: restored[name] for name in wanted}), restored[META]


def shapes(state: PyTree) -> Items:
    """Shapes and dtypes of the arrays of a state, by item."""
    return _split(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))


def require_written(directory: Path, saved: Items) -> None:
    """Open every array that Orbax has written, in a step that may not be committed yet.

    Raises:
      UserError: if an array cannot be opened, or differs from `shapes` of the saved state.
    """
    with _reader(directory) as reader:
        stored = _stored(reader, directory)
    require_fit(_arrays(stored), _arrays(saved), 'it is not the state that was saved', dtypes=True)


def read_variables(directory: Path) -> tuple[dict[str, PyTree], dict[str, Any]]:
    """The parameters (averaged if available), the collections, and `meta`.

    Raises:
      UserError: if they cannot be read, or are larger than the memory of this machine.
    """
    with _reader(directory) as reader:
        stored = _stored(reader, directory)[VARIABLES]
        params = 'ema' if stored.get('ema') is not None else 'params'
        wanted = {name: stored[name] for name in (params, 'collections') if stored.get(name)}
        _require_memory(directory, wanted)
        arrays = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), wanted)
        restored = reader.restore(directory, args=_restore_args({VARIABLES: arrays}))
    variables = restored[VARIABLES]
    return {'params': variables[params], **variables.get('collections', {})}, restored[META]


@contextlib.contextmanager
def _reader(directory: Path) -> Iterator[ocp.Checkpointer]:
    """Orbax's reader of a step's items, with errors of one line."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(handler()) as reader:
        try:
            yield reader
        except (OSError, ValueError, KeyError, MemoryError) as error:  # TensorStore's: ValueError
            reason = why(error).partition(' [tensorstore_spec')[0]
            raise UserError(f'the arrays of {directory} cannot be read: {reason}') from error


def _require_memory(directory: Path, arrays: PyTree) -> None:
    leaves = jax.tree.leaves(arrays)
    announced = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    if announced > (memory := os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')):
        raise UserError(
            f'{directory} declares arrays of {announced / 2**30:,.0f} GiB, and this machine has '
            f'{memory / 2**30:,.0f} GiB of memory: is this the right checkpoint?'
        )


def _split(state: PyTree) -> Items:
    """Split the fields of a state (a dataclass or a dict) into those for inference and the rest.

    An item without any array is left out.
    """
    items: Items = {VARIABLES: {}, TRAINING: {}}
    for name, child in _fields(state)[0].items():
        items[VARIABLES if name in _FIELDS_OF_VARIABLES else TRAINING][name] = child
    return {item: fields for item, fields in items.items() if jax.tree.leaves(fields)}


def _join(target: PyTree, items: Items) -> PyTree:
    """The state of `target`'s structure with the fields that `items` holds."""
    fields, structure = _fields(target)
    for item in items.values():
        fields |= item
    return structure.unflatten(fields.values())


def _stored(reader: ocp.Checkpointer, directory: Path) -> Items:
    """The shapes and dtypes of the arrays that a step holds."""
    items = reader.metadata(directory).item_metadata
    return {name: items[name].tree for name in (VARIABLES, TRAINING) if items.get(name)}


def _restore_args(items: Items) -> ocp.args.Composite:
    """Request for only the given arrays: on devices if they have a sharding, else in numpy."""
    import orbax.checkpoint as ocp

    trees = {
        name: ocp.args.PyTreeRestore(
            item=tree,
            restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
            partial_restore=True,
        )
        for name, tree in items.items()
    }
    return ocp.args.Composite(**trees, **{META: ocp.args.JsonRestore()})


def _fields(state: PyTree) -> tuple[dict[str, PyTree], Any]:
    children, structure = jax.tree_util.tree_flatten_with_path(state, lambda x: x is not state)
    return {path_name(keys): child for keys, child in children}, structure


def _arrays(items: Items) -> dict[str, Any]:
    """Every array by its path in the state."""
    leaves = jax.tree_util.tree_leaves_with_path(items)
    return {path_name(keys[1:]): leaf for keys, leaf in leaves}
