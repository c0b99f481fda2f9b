"""Data as training and evaluation see them: batches of known shapes, counted, and remembered.

Batch k of training is a pure function of (seed, k). So resuming is `train_batches(k)`, and any
number of processes, workers and threads sees the same examples in the same order.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any, Protocol

from vit_jax.data import sources, vocabulary
from vit_jax.data.batches import Batch, Process, Shape, Spec
from vit_jax.data.buckets import Buckets
from vit_jax.data.fixed import FixedShapes
from vit_jax.data.read_ahead import STALL_SECONDS, Loading
from vit_jax.data.records import Record, SourceInfo
from vit_jax.data.sequences import SequenceSource
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError


class Dataset(Protocol):
    """The examples of a split as batches. What only training asks for is checked when it does.

    Attributes:
      source: the examples before the transforms, or the sequences after them.
      batch_size: of a global batch, in `unit` where sequences are counted by tokens, else examples.
    """

    source: Any
    batch_size: int

    @property
    def examples(self) -> Subset:
        """The examples before the transforms, which count the broken ones."""
        ...

    @property
    def info(self) -> SourceInfo:
        """What a model must know of the data."""
        ...

    @property
    def vocab(self) -> vocabulary.Tokenizer | None:
        """What makes ids of text; None where there is no text."""
        ...

    @property
    def unit(self) -> str:
        """What rates count: 'images', 'examples' or 'tokens'."""
        ...

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The kinds of training batches; the last one has the largest examples."""
        ...

    @property
    def spec(self) -> Spec:
        """The arrays of one of the largest examples, of training or evaluation."""
        ...

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width in pixels of the images of the largest batches; None without images."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the training data, a line each."""
        ...

    @property
    def num_examples(self) -> int:
        """Examples of an epoch of training."""
        ...

    @property
    def examples_per_step(self) -> float:
        """Examples of a training batch, on average."""
        ...

    def train_batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Shuffled batches without end, this process's rows {name: array [b, ...]}.

        A broken record is replaced by the next one that can be read. Sequences are int32
        [b, length of the bucket], filled up with 0, and come with `index`, their number in the
        source, and `mask`, 0 in the rows that fill the last batch. Padded images have `pixel_mask`.
        """
        ...

    def eval_batches(self) -> Iterator[Batch]:
        """Every example once, the same number of batches on every process.

        They have an `index`, int32 [b], and a `mask`, float32 [b]: 1 for an example, 0 for the
        padding of a batch and for broken records.
        """
        ...

    def count(self, batch: Batch) -> dict[str, int]:
        """How much there is in a global batch of training, of which this process has `batch`."""
        ...

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the data, so that a model can be used without them."""
        ...

    def text(self, index: int) -> Record:
        """The strings of an example that the transforms make ids of; empty if there are none."""
        ...

    def check(self, folder: pathlib.Path) -> None:
        """Raises UserError if the run in `folder` was made with other data files."""
        ...

    def save(self, folder: pathlib.Path) -> None:
        """Puts the files into a run folder that later commands need."""
        ...


def open_dataset(
    batch_size: int,
    seed: int = 0,
    multiple: int = 1,
    process: Process = Process(),  # noqa: B008  frozen
    *,
    source: str,
    split: str,
    classes: tuple[int, ...] | None = None,
    transforms: str = '',
    vocab: str | None = None,
    buckets: tuple[int, ...] | None = None,
    count: str = 'padded',
    sizes: tuple[tuple[int, int], ...] | None = None,
    workers: int = 0,
    threads: int | None = None,
    cache: bool = False,
    stall_seconds: float = STALL_SECONDS,
) -> Dataset:
    """The data of `config.data`, or of an entry of `config.evals`.

    Args:
      batch_size: examples of a global batch over all processes; with `buckets`, tokens.
      seed: of the order and the transforms of training.
      multiple: rows of an evaluation batch are a multiple of it.
      process: which of the processes that share every batch this is.
      source: its name, see `vit_jax.data.sources`.
      split: which examples of it, as 'train[:90%]'.
      classes: take only these, numbered from 0 on in this order.
      transforms: what happens to each example, as 'inception_crop(224)|flip'.
      vocab: the file of a subword vocabulary, which makes ids of text.
      buckets: lengths in tokens that sequences are padded to.
      count: which tokens `batch_size` counts in training: 'padded', all slots of one side, or
        'target', those of the target without padding.
      sizes: heights and widths in pixels that images of different sizes are padded to.
      workers: reading processes; 0 reads in threads.
      threads: batches made at the same time; by default one a CPU core, at most 16.
      cache: keep decoded examples in memory.
      stall_seconds: fail if a batch takes longer; 0 never does.

    Raises:
      UserError: if there are no such data, or they do not make batches like that.
    """
    loaded = vocabulary.load(vocab) if vocab else None
    parsed = parse_transforms(transforms, loaded)
    examples = sources.open_source(source, split)
    if classes is not None:
        examples = examples.only_classes(classes)
    loading = Loading(workers, threads, stall_seconds)
    if not buckets:
        return FixedShapes(
            examples,
            parsed,
            batch_size,
            seed=seed,
            multiple=multiple,
            process=process,
            sizes=sizes or (),
            cache=cache,
            loading=loading,
        )
    if sizes:
        raise UserError('buckets are of sequences and sizes of images: give one of the two')
    sequences = SequenceSource(examples, parsed, buckets, cache)
    return Buckets(
        sequences,
        batch_size,
        count=count,
        seed=seed,
        multiple=multiple,
        process=process,
        loading=loading,
    )
