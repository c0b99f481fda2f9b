"""Items of a saved step: write a state as items, and read all or some of them.

`variables` has the variables for inference, `training` the optimizer state and the rest, `meta`
JSON.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import math
import operator
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from etils.epath import gpath

from vit_jax.checkpoints import manifest
from vit_jax.errors import UserError
from vit_jax.storage import lock, paths, run_folder
from vit_jax.storage.paths import first_line
from vit_jax.storage.run_folder import META, TRAINING, VARIABLES
from vit_jax.tree_paths import path_name, require_fit

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

PyTree = Any
Items = dict[str, dict[str, PyTree]]  # item -> field of the state -> arrays

ITEMS_OF_INFERENCE = (VARIABLES, META)
OTHERS = 'other_emas'  # averages besides the run's first
_FIELDS_OF_VARIABLES = ('params', 'collections', 'ema', OTHERS)
_HEADER = b'/.zarray'
_NOT_SAVED = ('frozen',)  # of other checkpoints


def handler() -> ocp.CompositeCheckpointHandler:
    """Make Orbax's handler for the items of a step."""
    import orbax.checkpoint as ocp

    # Compressing makes trained weights 6 % smaller, and takes half of the CPU time of a save.
    arrays = {
        name: ocp.PyTreeCheckpointHandler(use_compression=False) for name in (VARIABLES, TRAINING)
    }
    return ocp.CompositeCheckpointHandler(**arrays, **{META: ocp.JsonCheckpointHandler()})


def save_args(state: PyTree, meta: dict[str, Any]) -> ocp.args.Composite:
    """Make the items for Orbax to write."""
    import orbax.checkpoint as ocp

    items = {name: ocp.args.PyTreeSave(tree) for name, tree in _split(state).items()}
    return ocp.args.Composite(**items, **{META: ocp.args.JsonSave(meta)})


def read(directory: Path, target: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Read the state with the shardings of `target`, and `meta`.

    Raises:
      UserError: names arrays that are missing, unknown, or have a different shape or dtype, with
        both; or if they cannot be read.
    """
    target_items = _split(target)
    with _reader(directory) as reader:
        require_fit(
            _arrays(_read_shapes(reader, directory)),
            _arrays(target_items),
            f'the checkpoint {directory} does not fit this config',
            dtypes=True,
            first='params/',
            advice='. Use the config that it was trained with, or another --workdir',
        )
        items = reader.restore(directory, args=_restore_args(target_items))
    return _join(target, {name: items[name] for name in target_items}), items[META]


def shapes(state: PyTree) -> Items:
    """Return shapes and dtypes of a state's arrays, by item."""
    return _split(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))


def require_written(directory: Path, saved: Items) -> None:
    """Check the arrays that Orbax has written, also in an uncommitted step.

    Opening each array leaves 6 KB in TensorStore, 3 MB for every save of a ViT-B: their headers
    hold the same shapes and dtypes.

    Raises:
      UserError: if an array is not readable, or differs from the `shapes` of the saved state.
    """
    with _convert_read_errors(directory):
        headers = {name: _headers(directory / name) for name in saved}
    require_fit(_arrays(headers), _arrays(saved), 'it is not the state that was saved', dtypes=True)


def _headers(item: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Read the shapes and dtypes of an item's stored arrays from their Zarr headers."""
    import tensorstore

    local = {'driver': 'file', 'path': f'{os.fspath(item)}/'}
    base = lock.store_spec(item) if paths.is_remote(item) else local
    store = tensorstore.KvStore.open({'driver': 'ocdbt', 'base': base}).result()
    names = [name for name in store.list().result() if name.endswith(_HEADER)]
    contents = [store.read(name) for name in names]
    headers = [json.loads(content.result().value) for content in contents]
    return {
        name.removesuffix(_HEADER).decode(): jax.ShapeDtypeStruct(x['shape'], x['dtype'])
        for name, x in zip(names, headers, strict=True)
    }


def read_variables(
    directory: Path, path: Sequence[str] = ()
) -> tuple[dict[str, PyTree], dict[str, Any]]:
    """Read the parameters (averaged if available), the collections, and `meta`.

    Args:
      directory: Folder of the step.
      path: Other parameters in the stored state, such as ('other_emas', '0_9999').

    Raises:
      UserError: if they cannot be read, or exceed the memory of this machine.
    """
    with _reader(directory) as reader:
        stored = _read_shapes(reader, directory)[VARIABLES]
        field, *keys = path or ('ema' if stored.get('ema') is not None else 'params',)
        names = {name: stored[name] for name in (field, 'collections') if stored.get(name)}
        if keys:
            names[field] = {key: stored[field][key] for key in keys}
        _require_memory(directory, names)
        arrays = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), names)
        restored = reader.restore(directory, args=_restore_args({VARIABLES: arrays}))
    variables = restored[VARIABLES]
    params = functools.reduce(operator.getitem, keys, variables[field])
    return {'params': params, **variables.get('collections', {})}, restored[META]


@contextlib.contextmanager
def _reader(directory: Path) -> Iterator[ocp.Checkpointer]:
    """Open Orbax's reader of a step; report its errors in one line."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(handler()) as reader, _convert_read_errors(directory):
        yield reader


@contextlib.contextmanager
def _convert_read_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, MemoryError) as error:  # TensorStore's: ValueError
        reason = first_line(error).partition(' [tensorstore_spec')[0]
        raise UserError(f'the arrays of {directory} cannot be read: {reason}') from error


def _require_memory(directory: Path, arrays: PyTree) -> None:
    leaves = jax.tree.leaves(arrays)
    declared_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    if declared_bytes > (memory := os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')):
        raise UserError(
            f'{directory} declares arrays of {declared_bytes / 2**30:,.0f} GiB, but this '
            f'machine has {memory / 2**30:,.0f} GiB of memory: is this the right checkpoint?'
        )


def _split(state: PyTree) -> Items:
    """Split the saved fields of a state (a dataclass or dict): those for inference and the rest.

    Items without arrays are left out.
    """
    items: Items = {VARIABLES: {}, TRAINING: {}}
    for name, child in _fields(state)[0].items():
        if name in _NOT_SAVED or (name == OTHERS and child is None):
            continue
        items[VARIABLES if name in _FIELDS_OF_VARIABLES else TRAINING][name] = child
    return {item: fields for item, fields in items.items() if jax.tree.leaves(fields)}


def _join(target: PyTree, items: Items) -> PyTree:
    """Replace the fields of `target` by those in `items`."""
    fields, structure = _fields(target)
    for item in items.values():
        fields |= item
    return structure.unflatten(fields.values())


def _read_shapes(reader: ocp.Checkpointer, directory: Path) -> Items:
    """Return the shapes and dtypes of the arrays in a step."""
    items = reader.metadata(directory).item_metadata
    return {name: items[name].tree for name in (VARIABLES, TRAINING) if items.get(name)}


def _restore_args(items: Items) -> ocp.args.Composite:
    """Request only the given arrays: on devices if they have a sharding, else in numpy."""
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
    """Return the arrays by their paths in the state, or by Orbax's names for these."""
    leaves = jax.tree_util.tree_leaves_with_path(items)
    return {path_name(keys[1:]).replace('.', '/'): leaf for keys, leaf in leaves}


class LiteralPath(gpath.PosixGPath):
    """Path for Orbax whose `glob` treats `[*?` in the folder's name literally.

    Orbax globs for the arrays that it has written, and would commit without them if it found none.
    """

    def glob(self, pattern: str) -> Iterator[LiteralPath]:
        matches = [self]
        for part in pattern.split('/'):
            relative = (path for folder in matches if folder.is_dir() for path in folder.iterdir())
            matches = [path for path in relative if fnmatch.fnmatchcase(path.name, part)]
        return iter(matches)


def _durable_path_class() -> type:
    """Return the class of temporary folders with which Orbax's steps survive a power cut.

    Orbax syncs arrays, but neither other files nor folders. Here everything is on disk before the
    step gets its name, and the name before the save finishes and older steps are deleted. The
    saving thread does this. It has read other processes' files for the manifest, so their hosts
    have handed them to the shared file system.
    """
    import orbax.checkpoint as ocp  # takes a quarter of a second

    class DurablePath(ocp.path.atomicity.AtomicRenameTemporaryPath):
        async def finalize(self) -> None:
            step, checkpoints = Path(self.get_final()), Path(self.get_final()).parent
            run_folder.sync(checkpoints.parent)
            paths.sync_all(Path(self.get()))
            await super().finalize()
            for path in (step / run_folder.COMMITTED, step, checkpoints, checkpoints.parent):
                paths.sync(path)

    return DurablePath


def orbax_path(directory: Path) -> LiteralPath:
    """Return the directory, local or remote, as a path for Orbax."""
    return LiteralPath(os.fspath(directory))


class Staging:
    """Folder where Orbax writes the steps of `directory`: itself, or a local one.

    Raises:
      UserError: if several processes would have to share a local folder.
    """

    def __init__(self, directory: Path):
        self.folder, self._directory = directory, directory
        self._local: tempfile.TemporaryDirectory[str] | None = None
        if paths.orbax_writes(directory):
            return
        if jax.process_count() > 1:
            raise UserError(
                f'{directory}: several processes save to a shared folder or to gs://, not to s3://'
            )
        self._local = tempfile.TemporaryDirectory(prefix='vit_jax-')
        self.folder = Path(self._local.name)

    def path_class(self) -> type | None:
        """Orbax's class for temporary folders of steps; None for its default."""
        return None if paths.is_remote(self._directory) else _durable_path_class()

    def upload(self, step: int) -> None:
        """Copy an uncommitted step to `directory`; the mark of the commit comes last."""
        if self._local is None:
            return
        paths.copy(manifest.uncommitted_step(self.folder, step), self._directory / str(step))
        manifest.commit(self._directory / str(step))

    def clear(self) -> None:
        """Free the local disk after a save."""
        if self._local is not None:
            for step in self.folder.iterdir():
                shutil.rmtree(step)

    def close(self) -> None:
        if self._local is not None:
            self._local.cleanup()


@contextlib.contextmanager
def readable_path(directory: Path) -> Iterator[LiteralPath]:
    """Yield the step's directory, or a local copy if Orbax cannot read it."""
    if paths.orbax_writes(directory):
        yield orbax_path(directory)
        return
    with tempfile.TemporaryDirectory(prefix='vit_jax-') as local:
        paths.copy(directory, copy := Path(local) / directory.name)
        yield orbax_path(copy)
