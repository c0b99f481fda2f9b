"""Packing of a source, shard by shard, in several processes or on several machines.

Shards hold equal numbers of examples in the order of the source. Their bytes depend neither on the
number of processes nor on interruptions. A shard is written completely or not at all, so that
packing continues where it stopped.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import json
import logging
import multiprocessing
import pathlib
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vit_jax import extras
from vit_jax.data import images, packed, sources
from vit_jax.data.records import DENSE, MAPS, OBJECTS, BrokenRecord, Record
from vit_jax.errors import UserError
from vit_jax.storage import lock, paths

log = logging.getLogger(__name__)

PLAN = '.plan.json'  # job of a folder that is not complete yet
Progress = Callable[[int], None]
LabeledShard = tuple[packed.Shard, np.ndarray | None]


class ShardId(NamedTuple):
    """A shard of a split."""

    split: str
    number: int
    total: int

    @property
    def name(self) -> str:
        """File name."""
        return f'{self.split}-{self.number:05}-of-{self.total:05}.array_record'


@dataclasses.dataclass(frozen=True)
class Job:
    """Source, target and options of packing.

    Attributes:
      source: Source name, such as `folder:/data/flowers`.
      splits: {name in the packed data: split expression}.
      out: Output folder.
      per_shard: Examples per shard.
      shorter_side: Shorter side in pixels to which larger images are reduced; 0 keeps all files.
      quality: JPEG quality of reduced images.

    Raises:
      UserError: if a number is out of range, or a split name cannot be a file name.
    """

    source: str
    splits: dict[str, str]
    out: str
    per_shard: int = 2048
    shorter_side: int = 0
    quality: int = 92

    def __post_init__(self) -> None:
        limits = {'per_shard': (1, 10**6), 'shorter_side': (0, 8192), 'quality': (1, 100)}
        for name, (low, high) in limits.items():
            if not low <= (value := getattr(self, name)) <= high:
                flag = name.replace('_', '-')
                raise UserError(f'--{flag} {value}: must be in {low}..{high}')
        for name in self.splits:
            if not re.fullmatch(r'\w+', name):
                raise UserError(
                    f"--split {name!r}: write NAME or NAME=EXPRESSION, such as train='train[:90%]'"
                )

    @property
    def options(self) -> dict[str, int]:
        """Changes to the images; empty if there are none."""
        if not self.shorter_side:
            return {}
        return {'shorter_side': self.shorter_side, 'quality': self.quality}

    def shards(self) -> list[ShardId]:
        """List every shard of every split."""
        _open_source.cache_clear()  # files may have changed since an earlier job
        sizes = {name: len(_open_source(self.source, e)) for name, e in self.splits.items()}
        totals = {name: -(-size // self.per_shard) for name, size in sizes.items()}
        return [ShardId(name, k, total) for name, total in totals.items() for k in range(total)]


def pack(job: Job, shards: Sequence[ShardId], workers: int, progress: Progress) -> packed.Manifest:
    """Write every missing shard, and then the manifest.

    Args:
      job: Source, target and options.
      shards: All shards of the job.
      workers: Number of processes; 0 writes in this one.
      progress: Function called after each shard with its number of examples.

    Raises:
      UserError: if the folder contains other data, or too many examples are broken.
      OSError: if a file cannot be written.
    """
    written_shards = []
    with claim_folder(job), _open_mapper(workers) as parallel_map:
        for result in parallel_map(functools.partial(write_shard, job), shards):
            written_shards.append(result)
            progress(result[0].examples)
        return finish(job, shards, written_shards)


def finish(
    job: Job, shards: Sequence[ShardId], written_shards: Sequence[LabeledShard]
) -> packed.Manifest:
    """Write the labels and the manifest of all written shards, in the order of `shards`.

    Raises:
      UserError: if too many examples are broken.
      OSError: if a file cannot be written.
    """
    out = paths.path(job.out)
    splits = {}
    for name in job.splits:
        results = [
            result
            for shard_id, result in zip(shards, written_shards, strict=True)
            if shard_id.split == name
        ]
        source = _open_source(job.source, job.splits[name])
        _require_few_broken(source, sum(shard.examples for shard, _ in results))
        labels = [array for _, array in results if array is not None]
        if len(labels) == len(results):
            _write_labels(out / f'{name}.labels.npy', np.concatenate(labels))
        splits[name] = tuple(shard for shard, _ in results)
    manifest = packed.Manifest(job.source, job.options, source.info, splits)
    paths.write_text_atomic(out / packed.MANIFEST, manifest.to_json())
    (out / PLAN).unlink(missing_ok=True)
    return manifest


@contextlib.contextmanager
def claim_folder(job: Job) -> Iterator[None]:
    """Make the output folder, or continue the one that this job has begun, and lock it.

    Raises:
      UserError: if the folder contains other files, or another process writes it.
    """
    _check_output(job)  # before a lock appears among other files
    out = paths.path(job.out)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.hold(out))
        except lock.InUse as error:
            owner = lock.describe_owner(lock.holder(out) or {})
            raise UserError(
                f'{out} is being written by another process ({owner}): wait for it, or choose '
                'another folder'
            ) from error
        plan = _check_output(job)
        paths.write_text_atomic(out / PLAN, plan)
        yield
    (out / lock.LOCK).unlink(missing_ok=True)


def _check_output(job: Job) -> str:
    """Return the plan to write to the folder; raise UserError if it contains other files."""
    out = paths.path(job.out)
    plan = json.dumps(dataclasses.asdict(job) | {'out': ''}, sort_keys=True)
    if (out / packed.MANIFEST).exists():
        raise UserError(f'{out} is already packed; choose another folder or remove it')
    begun_plan = paths.read_text(out / PLAN)
    if begun_plan is None and out.exists() and any(f.name != lock.LOCK for f in out.iterdir()):
        raise UserError(f'{out} contains other files; choose an empty or new folder')
    if begun_plan is not None and begun_plan != plan:
        raise UserError(
            f'{out} was begun with different options, {begun_plan}; use these, or choose another '
            'folder'
        )
    return plan


@contextlib.contextmanager
def _open_mapper(workers: int) -> Iterator[Callable[..., Iterable[LabeledShard]]]:
    """Yield `map`, or its parallel form over processes that each open the source."""
    if not workers:
        yield map
        return
    context = multiprocessing.get_context('spawn')  # threads of this process do not survive a fork
    ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with concurrent.futures.ProcessPoolExecutor(workers, context, ignore) as pool:
        try:
            yield pool.map
        except BaseException as error:
            for child in multiprocessing.active_children():
                child.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    'a worker process was killed, perhaps for lack of memory: reduce --workers, '
                    'then the same command continues'
                ) from error
            raise


def write_shard(job: Job, shard_id: ShardId) -> LabeledShard:
    """Write a shard unless it exists; return it with its labels, None if an example has none.

    Raises:
      OSError: if the shard cannot be written.
      UserError: if too many examples are broken, or a bucket cannot be reached.
    """
    target = paths.path(job.out) / shard_id.name
    if not paths.is_remote(target):
        file = pathlib.Path(target)
        if not file.exists():
            _write_examples(job, shard_id, file)
        return describe_shard(file)
    with tempfile.TemporaryDirectory() as folder, paths.reaching(target):
        file = pathlib.Path(folder, shard_id.name)
        if target.exists():
            _copy(target, file)
        else:
            _write_examples(job, shard_id, file)
            _copy(file, target)
        return describe_shard(file)


def _copy(source: paths.Path, target: paths.Path) -> None:
    with source.open('rb') as reader, target.open('wb') as writer:
        shutil.copyfileobj(reader, writer, 16 << 20)


def _write_examples(job: Job, shard_id: ShardId, file: pathlib.Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    source = _open_source(job.source, job.splits[shard_id.split])
    partial = file.with_name(f'.{file.name}.partial')
    writer = ArrayRecordWriter(str(partial), 'group_size:1')
    first = shard_id.number * job.per_shard
    broken = 0
    for index in range(first, min(first + job.per_shard, len(source))):
        try:
            writer.write(packed.encode(packed_example(source, index, job)))
        except BrokenRecord as reason:
            log.warning('skipping broken record: %s', reason)
            broken += 1
            _require_few_broken(source, len(source) - broken)
    writer.close()
    paths.sync(partial)
    partial.replace(file)
    paths.sync(file.parent)


@functools.lru_cache(maxsize=4)
def _open_source(name: str, split: str) -> sources.Subset:
    return sources.open_source(name, split)


def packed_example(source: sources.Subset, index: int, job: Job) -> Record:
    """Return a record whose image is a file: the source's file, or a smaller JPEG.

    Raises:
      BrokenRecord: if the image cannot be decoded.
      UserError: if an image with objects, depth or normals would be reduced.
    """
    record = source.encoded(index)
    name = source.record_name(index)
    pixels = images.decode_record(record, name).get('image')
    if pixels is None or not job.shorter_side or min(pixels.shape[:2]) <= job.shorter_side:
        return record
    if fixed := [key for key in record if key in (*OBJECTS, *MAPS, *DENSE)]:
        raise UserError(f'{name}: --shorter-side cannot resize {fixed[0]!r}; remove the flag')
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in (1, 3):
        raise UserError(
            f'{name}: --shorter-side supports only 8-bit gray or RGB images, not {pixels.dtype} '
            f'{pixels.shape}; remove the flag'
        )
    return record | {'image': reduce_image(pixels, job.shorter_side, job.quality)}


def reduce_image(pixels: np.ndarray, side: int, quality: int) -> bytes:
    """Encode an image as JPEG, resized by Lanczos's filter to a shorter side of `side` pixels.

    Args:
      pixels: uint8 [H, W, 1] or [H, W, 3].
      side: Shorter side of the result, in pixels.
      quality: JPEG quality, 1 to 100.
    """
    height, width = pixels.shape[:2]
    scale = side / min(height, width)
    size = max(side, round(width * scale)), max(side, round(height * scale))
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    file = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(file, 'JPEG', quality=quality)
    return file.getvalue()


def describe_shard(file: pathlib.Path) -> LabeledShard:
    """Describe an existing shard, and read its labels.

    Raises:
      UserError: if the shard cannot be read.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(file))
        count = reader.num_records()
        labels = [packed.decode(reader.read([i])[0]).get('label') for i in range(count)]
    except Exception as error:  # ArrayRecord raises several undocumented types
        raise UserError(f'{file} cannot be read ({error}): remove it and pack again') from error
    is_integer = [type(label) is int for label in labels]
    other_rows = (i for i, label in enumerate(labels) if not (is_integer[i] or label is None))
    row = next(other_rows, None)
    if any(is_integer) and row is not None:
        raise UserError(
            f'{file} record {row}: label {str(labels[row])[:40]} is not an integer; '
            'correct the source, remove the file and pack again'
        )
    shard = packed.Shard(file.name, count, file.stat().st_size, paths.sha256(file))
    return shard, np.array(labels) if all(is_integer) else None


def _require_few_broken(source: sources.Subset, packed_examples: int) -> None:
    broken = len(source) - packed_examples
    if broken > source.broken_limit:
        raise UserError(
            f'{source.title}: {broken} of {len(source)} records are broken, more than the '
            f'{source.broken_limit} that are tolerated; repair or remove them'
        )


def _write_labels(file: paths.Path, labels: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, labels.astype(np.int64))
    paths.write_atomic(file, content.getvalue())


def pack_with_beam(job: Job, shards: Sequence[ShardId], options: str) -> packed.Manifest:
    """Write all missing shards with Apache Beam on several machines, and then the manifest.

    Every machine needs access to the source and the output folder.

    Args:
      job: Source, target and options.
      shards: All shards of the job.
      options: Beam options, such as `--runner=DataflowRunner --project=P`.

    Raises:
      UserError: see `pack`; also if Beam or one of its workers fails.
    """
    with extras.needed_by('pack --beam', 'beam'):
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    try:
        with (
            claim_folder(job),
            beam.Pipeline(options=PipelineOptions(shlex.split(options))) as pipeline,
        ):
            (
                pipeline
                | 'shards' >> beam.Create(list(enumerate(shards)))
                | beam.Reshuffle()
                | 'write' >> beam.Map(functools.partial(write_numbered_shard, job))
                | beam.combiners.ToList()
                | 'finish' >> beam.Map(functools.partial(finish_with_beam, job, tuple(shards)))
            )
    except UserError:
        raise
    except Exception as error:  # its type depends on the runner
        reason = paths.first_line(error).partition(' [while running')[0]
        raise UserError(f'--beam: {reason}') from error
    out = paths.path(job.out)
    return packed.read_manifest(out, lambda name: (out / name).read_bytes(), job.out)


def write_numbered_shard(job: Job, numbered: tuple[int, Sequence[Any]]) -> tuple[int, LabeledShard]:
    """Write a shard in a Beam worker; return its number and the shard."""
    number, shard_id = numbered
    return number, write_shard(job, ShardId(*shard_id))


def finish_with_beam(
    job: Job,
    shards: Sequence[ShardId],
    written_shards: Sequence[tuple[int, LabeledShard]],
) -> None:
    """Write the manifest for shards that arrive in any order."""
    by_number = dict(written_shards)
    finish(job, shards, [by_number[number] for number in range(len(shards))])
