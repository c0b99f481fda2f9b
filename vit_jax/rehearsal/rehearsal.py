"""Rehearsals: try everything that a run needs in a few minutes, before it queues.

extras       the packages that sources, evaluators and writers need
folder       a file is written, read and removed
data         the first, the last and ten random records of every split, after the transforms
start        a process trains, evaluates and saves until it is killed
resumption   another process restores the checkpoint and continues
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax import extras, signatures
from vit_jax.config import objects
from vit_jax.config.load import to_run
from vit_jax.config.run import Data, Evaluation, Run
from vit_jax.data.dataset import open_dataset
from vit_jax.data.records import BrokenRecord
from vit_jax.errors import UserError, resolve_module
from vit_jax.inference import fine_tune
from vit_jax.rehearsal.kill_and_resume import FAILED, OK, SKIPPED, DryRun, Row
from vit_jax.storage import paths, run_folder
from vit_jax.storage.model_ref import ModelRef

RECORDS = 10  # random records of a split, besides the first and the last
SUFFIX = '.rehearsal'  # of the folder next to the run folder
MINUTES = 30.0  # to wait for the first checkpoint
PROBE = b'vit_jax' * 2**17


class Failure(Exception):
    """A trial failed; the message gives the reason."""


def rehearse(
    config: ConfigDict,
    folder: str | os.PathLike[str],
    allowed: Sequence[str] = (),
    minutes: float = MINUTES,
) -> Iterator[Row]:
    """Try everything that a run needs, and leave no files.

    Args:
      config: Config of the run, from `config.load`.
      folder: Run folder, which stays unchanged; a temporary folder next to it is used.
      allowed: Modules that the config of the initial run may name.
      minutes: Minutes to wait for the first checkpoint, and for the resumption.

    Yields:
      A row for each trial as it ends. After a failure, trials that do not depend on it continue.

    Raises:
      UserError: if the rehearsal's folder already exists.
    """
    scratch = paths.path(f'{os.fspath(paths.absolute(folder))}{SUFFIX}')
    if paths.files(scratch):
        raise UserError(
            f'{scratch} belongs to another rehearsal: wait for its end, or remove the folder if it '
            'was killed'
        )
    failed = []
    with _remove_at_end(scratch):
        for row in _without_steps(config, os.fspath(folder), scratch, allowed):
            failed += [row.name] if row.result == FAILED else []
            yield row
        if failed:
            yield Row('start', SKIPPED, 0.0, f'needs: {", ".join(failed)}')
            return
        with tempfile.TemporaryDirectory() as local:
            yield from DryRun(config, scratch, pathlib.Path(local), allowed, minutes).rows()


@contextlib.contextmanager
def _remove_at_end(scratch: paths.Path) -> Iterator[None]:
    """Remove the folder at the end, with parents that were created for it."""
    local = () if paths.is_remote(scratch) else scratch.parents
    created = [parent for parent in local if not parent.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            paths.remove(scratch)
        with contextlib.suppress(OSError):
            for parent in created:
                parent.rmdir()


def _without_steps(
    config: ConfigDict, folder: str, scratch: paths.Path, allowed: Sequence[str]
) -> Iterator[Row]:
    """Yield the trials in this process, without devices."""
    run = to_run(config)
    yield _run_trial('extras', partial(_check_extras, run, folder))
    yield _run_trial('folder', partial(_check_folder, scratch))
    for name in run.writers if run.writers != Run.writers else ():
        yield _run_trial(f'writer {name}', partial(_check_writer, name))
    start_time = time.perf_counter()
    try:
        config = fine_tune.complete_config(config, None, allowed).config
    except UserError as error:
        yield Row('config', FAILED, time.perf_counter() - start_time, str(error))
        return
    run = to_run(config)
    for name, data in _data_sets(run):
        yield _run_trial(f'{name} {data.split}', partial(_check_data, run, data))


def _run_trial(name: str, trial: Callable[[], str]) -> Row:
    """Run a trial that returns a note; user errors and disk errors make it a failure."""
    start_time = time.perf_counter()
    try:
        note, result = trial(), OK
    except (UserError, Failure, BrokenRecord, OSError) as error:
        note, result = (
            str(error) if isinstance(error, UserError) else paths.first_line(error),
            FAILED,
        )
    return Row(name, result, time.perf_counter() - start_time, note)


def needed_extras(run: Run) -> set[str]:
    """Find the extras of the package that a run needs, installed or not.

    Raises:
      UserError: for the name of a module that does not exist.
    """
    evals = run.evals.values()
    texts = [data.source for data in (run.data, *evals)]
    sources = [source for text in texts for source, _ in signatures.parse_sources(text)]
    named = [
        *(('vit_jax.data.sources', source.partition(':')[0]) for source in sources),
        *(('vit_jax.evaluators', entry.evaluator) for entry in evals),
        *(('vit_jax.writers', name) for name in run.writers),
    ]
    modules = [resolve_module(package, name, 'name') for package, name in named if name]
    refs = [ModelRef.parse(text or '') for text in (run.init.checkpoint, run.branch.folder)]
    starts = [ref.locate()[0] for ref in refs]
    module_extras = {getattr(module, 'EXTRA', '') for module in modules} - {''}
    return module_extras | extras.named_by_urls([*starts, *sources])


def _check_extras(run: Run, folder: str) -> str:
    needed = sorted(needed_extras(run) | extras.named_by_urls([folder]))
    if lacking := [name for name in needed if not extras.is_installed(name)]:
        raise Failure(extras.install(*lacking))
    return ', '.join(needed) or 'none needed'


def _check_writer(name: str) -> str:
    objects.writer_class(name).require_access()
    return 'its service can be reached, as far as one knows without writing to it'


def _check_folder(scratch: paths.Path) -> str:
    """Write a megabyte, read it and remove it."""
    run_folder.require_writable(scratch)
    file = scratch / f'probe-{uuid.uuid4().hex}'
    with paths.reaching(scratch):
        paths.make_folder(scratch)
        paths.write_atomic(file, PROBE)
        if file.read_bytes() != PROBE:
            raise Failure(f'{file}: the bytes read differ from the bytes written')
        file.unlink()
    return f'{len(PROBE) / 1e6:.1f} MB written, read and removed'


def _data_sets(run: Run) -> Iterator[tuple[str, Data]]:
    """Yield the name and section of each distinct split."""
    keys = set()
    splits: list[tuple[str, Data]] = [('data', run.data)]
    for name, entry in run.evals.items():
        splits.append((f'evals.{name}', entry))
        if entry.fit:
            splits.append((f'evals.{name}', dataclasses.replace(entry, split=entry.fit)))
    for name, data in splits:
        key = data.source, data.split, data.transforms
        if data.split and key not in keys:
            keys.add(key)
            yield name, data


def _check_data(run: Run, section: Data) -> str:
    """Read the first, the last and random examples of a split, through the transforms."""
    batch_size = section.batch_size if isinstance(section, Evaluation) else None
    data = open_dataset(section, batch_size or run.batch_size, run.seed)
    examples, rng = data.plan.examples, np.random.default_rng(run.seed)
    indices = {0, len(examples) - 1, *rng.integers(len(examples), size=RECORDS).tolist()}
    start_time = time.perf_counter()
    for index in sorted(indices):
        record = examples.read(index, run.seed, index)
    seconds = (time.perf_counter() - start_time) / len(indices)
    fields = ', '.join(_describe_field(name, value) for name, value in record.items())
    return f'{len(indices)} of {len(examples):,} records, {1e3 * seconds:.1f} ms each: {fields}'


def _describe_field(name: str, value: Any) -> str:
    return f'{name} {list(np.shape(value))}' if np.ndim(value) else name
