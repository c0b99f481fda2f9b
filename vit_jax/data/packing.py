"""Packing of a source, shard by shard, in several processes or on several machines.

Shards hold equal numbers of examples in the order of the source, and their bytes depend on nothing
else: not on the number of processes, nor on interruptions. A shard is written completely or not at
all, so that packing continues where it stopped.
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
from vit_jax.data.records import OBJECTS, BrokenRecord, Record
from vit_jax.errors import UserError
from vit_jax.storage import paths

log = logging.getLogger(__name__)

PLAN = '.plan.json'  # the job that a folder is packed by, until it is complete
Progress = Callable[[int], None]
Made = tuple[packed.Shard, np.ndarray | None]


class ShardId(NamedTuple):
    """A shard of a split."""

    split: str
    number: int
    total: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f'{self.split}-{self.number:05}-of-{self.total:05}.array_record'


@dataclasses.dataclass(frozen=True)
class Job:
    """Source, target and options of packing.

    Attributes:
      source: its name, as `folder:/data/flowers`.
      splits: {name in the packed data: split expression}.
      out: the folder to write.
      per_shard: examples of a shard.
      shorter_side: pixels that larger images are reduced to; 0 keeps the files as they are.
      quality: quality of the JPEG files that reduced images become.

    Raises:
      UserError: if a number is out of range, or a name of a split cannot be that of a file.
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
                    f"--split {name!r}: write NAME or NAME=EXPRESSION, as train='train[:90%]'"
                )

    @property
    def options(self) -> dict[str, int]:
        """Changes to the images; empty if there are none."""
        if not self.shorter_side:
            return {}
        return {'shorter_side': self.shorter_side, 'quality': self.quality}

    def shards(self) -> list[ShardId]:
        """Every shard of every split."""
        _opened.cache_clear()  # files may have changed since another job
        sizes = {name: len(_opened(self.source, e)) for name, e in self.splits.items()}
        totals = {name: -(-size // self.per_shard) for name, size in sizes.items()}
        return [ShardId(name, k, total) for name, total in totals.items() for k in range(total)]


def pack(job: Job, shards: Sequence[ShardId], workers: int, progress: Progress) -> packed.Manifest:
    """Write every missing shard, and then the manifest.

    Args:
      job: source, target and options.
      shards: every shard of the job.
      workers: processes; 0 writes in this one.
      progress: called after each shard with its number of examples.

    Raises:
      UserError: if the folder holds other data, or too many examples are broken.
      OSError: if a file cannot be written.
    """
    claim(job)
    made = []
    with _mapper(workers) as run:
        for result in run(functools.partial(write_shard, job), shards):
            made.append(result)
            progress(result[0].examples)
    return finish(job, shards, made)


def finish(job: Job, shards: Sequence[ShardId], made: Sequence[Made]) -> packed.Manifest:
    """Write the labels and the manifest once all shards are written, in the order of `shards`.

    Raises:
      UserError: if too many examples are broken.
      OSError: if a file cannot be written.
    """
    out = paths.path(job.out)
    splits = {}
    for name in job.splits:
        results = [one for at, one in zip(shards, made, strict=True) if at.split == name]
        source = _opened(job.source, job.splits[name])
        _require_few_broken(source, sum(shard.examples for shard, _ in results))
        labels = [of for _, of in results if of is not None]
        if len(labels) == len(results):
            _write_labels(out / f'{name}.labels.npy', np.concatenate(labels))
        splits[name] = tuple(shard for shard, _ in results)
    manifest = packed.Manifest(job.source, job.options, source.info, splits)
    paths.write_text_atomic(out / packed.MANIFEST, manifest.to_json())
    (out / PLAN).unlink(missing_ok=True)
    return manifest


def claim(job: Job) -> None:
    """Make the folder, or continue with one that this job has begun.

    Raises:
      UserError: if it holds other files.
    """
    out = paths.path(job.out)
    plan = json.dumps(dataclasses.asdict(job) | {'out': ''}, sort_keys=True)
    if (out / packed.MANIFEST).exists():
        raise UserError(f'{out} is packed already: choose another folder or remove it')
    begun = paths.read_text(out / PLAN)
    if begun is None and out.exists() and any(out.iterdir()):
        raise UserError(f'{out} holds other files: choose an empty or a new folder')
    if begun is not None and begun != plan:
        raise UserError(
            f'{out} was begun with other options, {begun}: give these, or choose another folder'
        )
    paths.make_folder(out)
    paths.write_text_atomic(out / PLAN, plan)


@contextlib.contextmanager
def _mapper(workers: int) -> Iterator[Callable[..., Iterable[Made]]]:
    """`map` in this process, or in others that each open the source."""
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
                    'a process of --workers was killed, perhaps for lack of memory: give fewer, '
                    'and the same command continues'
                ) from error
            raise


def write_shard(job: Job, at: ShardId) -> Made:
    """Write a shard unless it exists; return it with its labels, None if an example has none.

    Raises:
      OSError: if it cannot be written.
      UserError: if too many examples are broken, or a bucket cannot be reached.
    """
    target = paths.path(job.out) / at.name
    if not paths.is_remote(target):
        file = pathlib.Path(target)
        if not file.exists():
            _write(job, at, file)
        return describe_shard(file)
    with tempfile.TemporaryDirectory() as folder, paths.reaching(target):
        file = pathlib.Path(folder, at.name)
        if target.exists():
            _copy(target, file)
        else:
            _write(job, at, file)
            _copy(file, target)
        return describe_shard(file)


def _copy(source: paths.Path, target: paths.Path) -> None:
    with source.open('rb') as reader, target.open('wb') as writer:
        shutil.copyfileobj(reader, writer, 16 << 20)


def _write(job: Job, at: ShardId, file: pathlib.Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    source = _opened(job.source, job.splits[at.split])
    partial = file.with_name(f'.{file.name}.partial')
    writer = ArrayRecordWriter(str(partial), 'group_size:1')
    first = at.number * job.per_shard
    broken = 0
    for index in range(first, min(first + job.per_shard, len(source))):
        try:
            writer.write(packed.encode(packed_example(source, index, job)))
        except BrokenRecord as reason:
            log.warning('left out: %s', reason)
            broken += 1
            _require_few_broken(source, len(source) - broken)
    writer.close()
    paths.sync(partial)
    partial.replace(file)
    paths.sync(file.parent)


@functools.lru_cache(maxsize=4)
def _opened(name: str, split: str) -> sources.Subset:
    return sources.open_source(name, split)


def packed_example(source: sources.Subset, index: int, job: Job) -> Record:
    """A record whose image is a file: the source's own, or a smaller JPEG.

    Raises:
      BrokenRecord: if it cannot be decoded.
      UserError: if an image with objects is to be reduced.
    """
    record = source.encoded(index)
    name = source.record_name(index)
    pixels = images.decoded(record, name).get('image')
    if pixels is None or not job.shorter_side or min(pixels.shape[:2]) <= job.shorter_side:
        return record
    if found := [key for key in record if key in OBJECTS]:
        raise UserError(f'{name}: --shorter-side would leave {found[0]!r} behind; do without it')
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[-1] not in (1, 3):
        raise UserError(
            f'{name}: --shorter-side takes gray or RGB images of bytes, and this one has the shape '
            f'{pixels.shape} and {pixels.dtype}; do without it'
        )
    return record | {'image': reduce_image(pixels, job.shorter_side, job.quality)}


def reduce_image(pixels: np.ndarray, side: int, quality: int) -> bytes:
    """A JPEG of the image, resized by Lanczos's filter to a shorter side of `side` pixels.

    Args:
      pixels: uint8 [H, W, 1] or [H, W, 3].
      side: side of the result, in pixels.
      quality: quality of the JPEG, 1 to 100.
    """
    height, width = pixels.shape[:2]
    scale = side / min(height, width)
    size = max(side, round(width * scale)), max(side, round(height * scale))
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    file = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(file, 'JPEG', quality=quality)
    return file.getvalue()


def describe_shard(file: pathlib.Path) -> Made:
    """An existing shard, and its labels.

    Raises:
      UserError: if it cannot be read.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(file))
        count = reader.num_records()
        labels = [packed.decode(reader.read([i])[0]).get('label') for i in range(count)]
    except Exception as error:  # of many kinds, none of them documented
        raise UserError(f'{file} cannot be read ({error}): remove it and pack again') from error
    whole = [type(label) is int for label in labels]
    odd = [i for i, label in enumerate(labels) if not (whole[i] or label is None)]
    if any(whole) and odd:
        raise UserError(
            f'{file} record {odd[0]}: its label, {str(labels[odd[0]])[:40]}, is not an integer: '
            'correct the source, remove the file and pack again'
        )
    shard = packed.Shard(file.name, count, file.stat().st_size, paths.sha256(file))
    return shard, np.array(labels) if all(whole) else None


def _require_few_broken(source: sources.Subset, packed_examples: int) -> None:
    broken = len(source) - packed_examples
    if broken > source.broken_limit:
        raise UserError(
            f'{source.title}: {broken} of {len(source)} records are broken, more than the '
            f'{source.broken_limit} that are tolerated: repair or remove them'
        )


def _write_labels(file: paths.Path, labels: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, labels.astype(np.int64))
    paths.write_atomic(file, content.getvalue())


def pack_with_beam(job: Job, shards: Sequence[ShardId], options: str) -> packed.Manifest:
    """Write every missing shard on several machines by Apache Beam, and then the manifest.

    Every machine has to reach the source and the folder to write to.

    Args:
      job: source, target and options.
      shards: every shard of the job.
      options: options of Beam, such as `--runner=DataflowRunner --project=P`.

    Raises:
      UserError: as `pack`, or if Beam or one of its workers fails.
    """
    with extras.needed_by('pack --beam', 'beam'):
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    claim(job)
    try:
        with beam.Pipeline(options=PipelineOptions(shlex.split(options))) as pipeline:
            (
                pipeline
                | 'shards' >> beam.Create(list(enumerate(shards)))
                | beam.Reshuffle()
                | 'write' >> beam.Map(functools.partial(write_numbered_shard, job))
                | beam.combiners.ToList()
                | 'finish' >> beam.Map(functools.partial(finish_with_beam, job, tuple(shards)))
            )
    except Exception as error:  # of many kinds, by runner
        reason = paths.first_line(error).partition(' [while running')[0]
        raise UserError(f'--beam: {reason}') from error
    out = paths.path(job.out)
    return packed.read_manifest(out, lambda name: (out / name).read_bytes(), job.out)


def write_numbered_shard(job: Job, numbered: tuple[int, Sequence[Any]]) -> tuple[int, Made]:
    """Write a shard on a worker; return its number and the shard."""
    number, at = numbered
    return number, write_shard(job, ShardId(*at))


def finish_with_beam(
    job: Job,
    shards: Sequence[ShardId],
    made: Sequence[tuple[int, Made]],
) -> None:
    """Write the manifest of shards that arrive in any order."""
    by_number = dict(made)
    finish(job, shards, [by_number[number] for number in range(len(shards))])
