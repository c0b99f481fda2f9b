"""Checkpoints: saved by Orbax in the background, complete or absent, verified when read.

A step is a directory `checkpoints/STEP` with three Orbax items: `variables` (what
inference needs), `training` (the optimizer's state and the rest) and `meta` (JSON).
`manifest.json` is written when everything else is, and Orbax's rename commits it with
the rest: a directory without it was never finished.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from vit_jax import manifest
from vit_jax.errors import UserError

PyTree = Any
Spec = tuple[tuple[int, ...], np.dtype]  # of one leaf

_VARIABLES = ('params', 'collections', 'ema')
_NAMED = 5  # how many parameters an error message names
_log = logging.getLogger(__name__)


class Checkpointer:
    """Writes and restores the steps of one run; every process of the run makes one.

    The caller holds the workdir's lock: what killed runs have left is removed.

    Args:
      directory: holds one directory a step; made by the first save.
      keep_last: how many of the newest steps stay, at least 1.
      keep_every: multiples of it stay for good; 0 for none.
    """

    def __init__(self, directory: str | Path, *, keep_last: int = 2, keep_every: int = 0) -> None:
        if keep_last < 1 or keep_every < 0:
            raise UserError(
                f'checkpoint: keep_last must be >= 1 and keep_every >= 0, not {keep_last} and '
                f'{keep_every}'
            )
        self.directory = Path(directory).absolute()
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=_preservation(keep_last, keep_every),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._commit,
                # A directory that cannot be made fails at once, not by a timeout.
                create_directories_asynchronously=False,
            ),
        )
        self._opened: _Manager | None = None
        self._saving: int | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The finished steps in ascending order; their files are not verified."""
        return manifest.steps(self.directory)

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Starts writing a step; returns once the arrays are copied from the devices.

        Waits for the save before. A step that is already there is left alone.

        Args:
          step: the directory's name.
          state: a dataclass or dict of pytrees of arrays; `params`, `collections` and
            `ema` are what `load_variables` finds.
          meta: what JSON can hold.

        Raises:
          UserError: if the disk is full or not writable, in this save or the one before.
        """
        self.wait()
        if step in self._manager.all_steps():
            return
        self._saving = step
        items = {name: ocp.args.StandardSave(tree) for name, tree in _split(state).items()}
        try:
            args = ocp.args.Composite(**items, meta=ocp.args.JsonSave(meta))
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            self._fail(error)

    def check(self) -> None:
        """Raises as `save` does if the save in the background has failed; call it often."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Blocks until the save in the background is finished; raises as `save` does."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(error)
        self._saving = None

    def close(self) -> None:
        """Waits for the save in the background and ends Orbax's threads."""
        self.wait()
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def restore_latest(
        self, target: PyTree, *, strict: bool = False, cast: bool = False
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Restores the newest intact step; None if no save was ever finished.

        What is newer is moved out of the way with a warning, so that the run can save
        these steps again: unfinished ones are deleted, damaged ones go to `rejected/`.

        Args:
          target: the state with a `jax.ShapeDtypeStruct` with sharding for each array;
            the device layout of the run that saved it does not matter.
          strict: raise if a newer step is damaged instead of going back.
          cast: allow arrays stored in another dtype.

        Returns:
          The step, the state, and the `meta` given to `save`.

        Raises:
          UserError: if every finished step is damaged, or if the step does not fit
            `target`; names the arrays with both shapes or dtypes.
        """
        step = _agree(self._select(strict) if jax.process_index() == 0 else None)
        return None if step is None else self._restore(step, target, cast)

    def restore(
        self, step: int, target: PyTree, *, cast: bool = False
    ) -> tuple[int, PyTree, dict[str, Any]]:
        """Restores one step as `restore_latest` does; raises `UserError` if it is damaged."""
        _require_intact(self.directory, step)
        return self._restore(step, target, cast)

    @property
    def _manager(self) -> _Manager:
        if self._opened is None:
            self._opened = _Manager(self.directory, options=self._options)
        return self._opened

    def _commit(self) -> None:
        """Runs on process 0 when all processes have written, just before the commit."""
        assert self._saving is not None
        manifest.write(self.directory, self._saving)

    def _fail(self, error: Exception) -> NoReturn:
        step, self._saving, self._opened = self._saving, None, None
        reason = _disk_trouble(error)
        if reason is None:
            raise error
        if jax.process_index() == 0:
            manifest.clear_newer(self.directory, max(self.steps(), default=None))
        raise UserError(
            f'the checkpoint of step {step} could not be written to {self.directory}: {reason}; '
            f'finished steps: {self.steps() or "none"}; once that is mended, the same command '
            'continues from the last of them'
        ) from error

    def _select(self, strict: bool) -> int | None:
        step, damaged = manifest.newest_intact(self.directory)
        if damaged and (strict or step is None):
            raise _damage(self.directory, damaged)
        manifest.clear_newer(self.directory, step)
        return step

    def _restore(self, step: int, target: PyTree, cast: bool) -> tuple[int, PyTree, dict[str, Any]]:
        targets = _split(target)
        _require_fit(self.directory / str(step), targets, cast)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in targets.items()}
        args = ocp.args.Composite(**items, meta=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        state = _join(target, {name: restored[name] for name in targets})
        return step, state, restored['meta']


def load_variables(
    directory: str | Path, step: int | None = None, *, ema: bool = True
) -> tuple[int, dict[str, PyTree], dict[str, Any]]:
    """Reads what inference needs into numpy arrays; nothing of the optimizer is read.

    Args:
      directory: a run's `checkpoints` directory, of which nothing is changed.
      step: the step to read; by default the newest intact one.
      ema: take the averaged parameters if the run kept them.

    Returns:
      The step, `{'params': ..., other collections}` and the `meta` given to `save`.

    Raises:
      UserError: if there is no such step, or it is damaged.
    """
    directory, read = Path(directory).absolute(), ('variables', 'meta')
    if step is None:
        step, damaged = manifest.newest_intact(directory, read)
        if step is None:
            raise _damage(directory, damaged)
    else:
        _require_intact(directory, step, read)
    stored = _stored(directory / str(step))['variables']
    params = 'ema' if ema and stored.get('ema') is not None else 'params'
    wanted = {name: stored[name] for name in (params, 'collections') if stored.get(name)}
    values, meta = _read_numpy(directory / str(step), wanted)
    return step, {'params': values[params], **values.get('collections', {})}, meta


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        # Asking JAX registers `step` as this process's progress. Orbax asks from a
        # background thread about a step that the loop has long passed.
        return False


def _preservation(keep_last: int, keep_every: int) -> policies.PreservationPolicy:
    rules: list[policies.PreservationPolicy] = [policies.LatestN(keep_last)]
    if keep_every:
        rules.append(policies.EveryNSteps(keep_every))
    return policies.AnyPreservationPolicy(rules)


def _children(state: PyTree) -> tuple[dict[str, PyTree], Any]:
    """The state's fields by name, and the structure that holds them."""
    fields, structure = jax.tree_util.tree_flatten_with_path(state, lambda x: x is not state)
    return {_name(path): child for path, child in fields}, structure


def _split(state: PyTree) -> dict[str, dict[str, PyTree]]:
    """The fields sorted into Orbax items; an item without any array does not exist."""
    items: dict[str, dict[str, PyTree]] = {'variables': {}, 'training': {}}
    for name, child in _children(state)[0].items():
        items['variables' if name in _VARIABLES else 'training'][name] = child
    return {item: fields for item, fields in items.items() if jax.tree.leaves(fields)}


def _join(target: PyTree, items: dict[str, dict[str, PyTree]]) -> PyTree:
    fields, structure = _children(target)
    restored = {name: child for item in items.values() for name, child in item.items()}
    return structure.unflatten([restored.get(name, child) for name, child in fields.items()])


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='/')


def _specs(items: dict[str, PyTree]) -> dict[str, Spec]:
    """The arrays by their path in the state."""
    leaves = jax.tree_util.tree_leaves_with_path(items)
    return {_name(path[1:]): (tuple(x.shape), np.dtype(x.dtype)) for path, x in leaves}


def _reader() -> ocp.Checkpointer:
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            variables=ocp.PyTreeCheckpointHandler(),
            training=ocp.PyTreeCheckpointHandler(),
            meta=ocp.JsonCheckpointHandler(),
        )
    )


def _stored(directory: Path) -> dict[str, PyTree]:
    """The shapes and dtypes of the arrays that a step holds, by item."""
    with _reader() as reader:
        items = reader.metadata(directory).item_metadata
    return {name: items[name].tree for name in ('variables', 'training') if items[name] is not None}


def _require_fit(directory: Path, targets: dict[str, PyTree], cast: bool) -> None:
    stored, wanted = _specs(_stored(directory)), _specs(targets)
    common = [name for name in wanted if name in stored]
    faults = [f'{n} is missing' for n in wanted if n not in stored]
    faults += [f'{n} is not part of this model or optimizer' for n in stored if n not in wanted]
    for name in common:
        (shape, dtype), (new_shape, new_dtype) = stored[name], wanted[name]
        if shape != new_shape:
            faults.append(f'{name} has shape {shape}, this run needs {new_shape}')
        elif dtype != new_dtype and not cast:
            faults.append(f'{name} is {dtype}, this run needs {new_dtype}')
    if faults:
        more = f'; and {len(faults) - _NAMED} more' if len(faults) > _NAMED else ''
        raise UserError(
            f'the checkpoint {directory} does not fit the config: '
            f'{"; ".join(faults[:_NAMED])}{more}. Use the config it was trained with, or '
            'another --workdir'
        )


def _read_numpy(directory: Path, variables: PyTree) -> tuple[PyTree, dict[str, Any]]:
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), variables)
    args = ocp.args.Composite(
        variables=ocp.args.PyTreeRestore(
            item=variables, restore_args=as_numpy, partial_restore=True
        ),
        meta=ocp.args.JsonRestore(),
    )
    with _reader() as reader:
        restored = reader.restore(directory, args=args)
    return restored['variables'], restored['meta']


def _require_intact(directory: Path, step: int, items: tuple[str, ...] = ()) -> None:
    try:
        manifest.verify(directory / str(step), items)
    except (manifest.Unfinished, manifest.Damaged) as fault:
        found = manifest.steps(directory) or 'none'
        raise UserError(f'checkpoint {directory}/{step}: {fault} (steps: {found})') from fault


def _damage(directory: Path, damaged: dict[int, manifest.Damaged]) -> UserError:
    if not damaged:
        return UserError(f'no finished checkpoint in {directory}')
    listed = '; '.join(f'step {step}: {fault}' for step, fault in damaged.items())
    return UserError(
        f'damaged checkpoint in {directory}: {listed}. Bring the files back, or delete these '
        'directories to continue without them'
    )


def _agree(step: int | None) -> int | None:
    """Process 0's choice, on every process."""
    if jax.process_count() == 1:
        return step
    chosen = int(multihost_utils.broadcast_one_to_all(np.int64(-1 if step is None else step)))
    return None if chosen < 0 else chosen


def _disk_trouble(error: BaseException | None) -> str | None:
    """Why the disk refused, or None if it is not about the disk."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        if 'RESOURCE_EXHAUSTED' in str(error):
            return 'No space left on device'
        error = error.__cause__ or error.__context__
    return None
