"""Packing on several machines, as a pipeline of Apache Beam; the shards are those of `packing`."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from typing import Any

from vit_jax import extras
from vit_jax.data import packed, packing
from vit_jax.errors import UserError
from vit_jax.storage import paths


def pack(job: packing.Job, shards: Sequence[packing.At], options: str) -> packed.Manifest:
    """Write every shard that is not there yet, and then the manifest.

    Every machine has to reach the source and the folder to write to.

    Args:
      job: source, target and options.
      shards: all of the job's.
      options: of Beam, as `--runner=DataflowRunner --project=P`.

    Raises:
      UserError: as `packing.pack`, or if Beam or one of its workers fails.
    """
    with extras.needed_by('pack --beam', 'beam'):
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    packing.claim(job)
    try:
        with beam.Pipeline(options=PipelineOptions(shlex.split(options))) as pipeline:
            (
                pipeline
                | 'shards' >> beam.Create(list(enumerate(shards)))
                | beam.Reshuffle()
                | 'write' >> beam.Map(functools.partial(write, job))
                | beam.combiners.ToList()
                | 'finish' >> beam.Map(functools.partial(finish, job, tuple(shards)))
            )
    except Exception as error:  # of many kinds, by runner
        reason = paths.why(error).partition(' [while running')[0]
        raise UserError(f'--beam: {reason}') from error
    out = paths.path(job.out)
    return packed.read_manifest(out, lambda name: (out / name).read_bytes(), job.out)


def write(job: packing.Job, numbered: tuple[int, Sequence[Any]]) -> tuple[int, packing.Made]:
    """Write a shard on a worker; return its number with it."""
    number, at = numbered
    return number, packing.write_shard(job, packing.At(*at))


def finish(
    job: packing.Job,
    shards: Sequence[packing.At],
    made: Sequence[tuple[int, packing.Made]],
) -> None:
    """Write the manifest of shards that came in any order."""
    by_number = dict(made)
    packing.finish(job, shards, [by_number[number] for number in range(len(shards))])
