"""TensorBoard: an event file in the run folder for every start; `tensorboard --logdir runs`."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from vit_jax.array_types import UInt8
from vit_jax.errors import visible
from vit_jax.storage import paths, run_folder
from vit_jax.writers import base
from vit_jax.writers.base import RunStart, markdown


class Writer(base.Writer):
    """Write TensorBoard event files, flushed to the disk at every write.

    If a resumed run repeats steps, TensorBoard drops the earlier start's steps. Evaluations of the
    step after which it resumes are not written again.

    Args:
      run: Run whose folder gets the file.
    """

    _count = itertools.count()  # a process may open several in a second, read in this order

    def __init__(self, run: RunStart):
        host = f'{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(self._count):05}'
        self._run = run
        self._records = RecordWriter(paths.create(run.local / f'{run_folder.EVENTS}{host}'))
        self._add(0, file_version='brain.Event:2')
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # TensorBoard drops events with this step or a later one.
        self._add(run.start_step + 1, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write {name: value} of a step; raise OSError if that fails."""
        if step <= self._run.start_step:
            values = self._run.unwritten(step, values)
        value = summary_pb2.Summary.Value
        summaries = [value(tag=visible(k), simple_value=v) for k, v in values.items()]
        self._add(step, summary=summary_pb2.Summary(value=summaries))

    def image(self, step: int, name: str, pixels: UInt8[np.ndarray, 'Y X 3']) -> None:
        """Write a picture of a step; raise OSError if that fails."""
        png, (height, width, _) = io.BytesIO(), pixels.shape
        Image.fromarray(pixels).save(png, format='png')
        picture = summary_pb2.Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=png.getvalue()
        )
        values = [summary_pb2.Summary.Value(tag=visible(name), image=picture)]
        self._add(step, summary=summary_pb2.Summary(value=values))

    def texts(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Write a table of a step; raise OSError if that fails."""
        self._add(step, summary=text_pb(visible(name), markdown(rows)))

    def _add(self, step: int, **content: Any) -> None:
        event = event_pb2.Event(wall_time=time.time(), step=step, **content)
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()
