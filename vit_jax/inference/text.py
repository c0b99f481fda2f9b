"""Translation of a user's sentences by the model of a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.data import sources, vocabulary
from vit_jax.data.records import example_rng
from vit_jax.data.transforms import Transforms, parse_transforms
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.errors import UserError
from vit_jax.interop.trained import TrainedModel
from vit_jax.ops.search import Search, decode
from vit_jax.runtime import mesh
from vit_jax.step import stream_keys

SORT_WINDOW = 4096  # number of sentences that are sorted by length at a time


class Sentence(NamedTuple):
    """A line of text as ids for the model.

    Attributes:
      ids: int32 [n], with the end token; empty for a blank line.
      cut: Truncated end of a line longer than any in training; else empty.
    """

    ids: np.ndarray
    cut: str


class Translation(NamedTuple):
    """A hypothesis as text.

    Attributes:
      text: Without special tokens.
      score: Score of the search: a log-probability, normalized by length for a beam.
      tokens: Ids, with the end token if there is one.
    """

    text: str
    score: float
    tokens: list[int]


@dataclasses.dataclass(frozen=True)
class SentenceReader:
    """Tokenizer of sentences that works like a run's evaluation data.

    Attributes:
      transforms: Transforms of the first evaluation, including the tokenizer.
      bounds: Lengths in tokens that batches are padded to, in ascending order.
    """

    transforms: Transforms
    bounds: tuple[int, ...]

    @property
    def vocab(self) -> Tokenizer:
        assert self.transforms.vocab is not None
        return self.transforms.vocab

    def read(self, line: str, side: str = 'source') -> Sentence:
        """Return the ids of a line as the given side of a pair.

        Raises:
          UserError: if a word has no id and the tokenizer is not a `Vocabulary`.
        """
        if not line.strip():
            return Sentence(np.zeros(0, np.int32), '')
        record: dict[str, Any] = {'source': line, 'target': line}
        rng = example_rng(0, 0)
        for transform in self.transforms.steps:
            text, record = record[side], transform(record, rng)
        token_ids, length = self.vocab.encode(text), min(len(record[side]), self.bounds[-1]) - 1
        ids = np.append(token_ids[:length], np.int32(vocabulary.EOS))
        return Sentence(ids, self.vocab.decode(token_ids[length:]))

    def read_whole(self, line: str, side: str = 'source') -> np.ndarray:
        """Return the ids [n] of a line; raise UserError like `read`, or if empty or too long."""
        ids, cut = self.read(line, side)
        if not len(ids):
            raise UserError(f'the {side} sentence is empty')
        if cut:
            raise UserError(
                f'the {side} sentence is longer than the {len(ids) - 1} tokens of the training '
                f'data: leave out {cut!r}'
            )
        return ids


def sentence_reader(run: TrainedModel) -> SentenceReader:
    """Return the reader for a run's model; it does not need the data.

    Raises:
      UserError: if the run does not translate text.
    """
    bounds = run.data.buckets or run.settings.data.buckets
    if not run.model.translates:
        raise UserError(f'{run.path}: model {run.settings.model.name!r} does not translate')
    vocab = run.vocab or sources.own_vocab(run.data.source)
    if vocab is None or not bounds:
        raise UserError(f'{run.path}: the model of this run was not trained on text')
    steps = [run.data.transforms, '' if run.vocab else 'tokenize']
    return SentenceReader(parse_transforms('|'.join(filter(None, steps)), vocab), tuple(bounds))


@dataclasses.dataclass(frozen=True)
class Translator:
    """Translator of sentences in batches of few shapes.

    Attributes:
      run: A trained encoder-decoder.
      reader: Reader of the run.
      search: The decoding method.
      batch_size: Number of sentences in a batch.
      seed: Seed of samples, which depend only on it, the line's number and the sentence.
    """

    run: TrainedModel
    reader: SentenceReader
    search: Search
    batch_size: int = 32
    seed: int = 0

    def __call__(self, sentences: Sequence[Sentence]) -> Iterator[list[Translation]]:
        """Yield the translations of each sentence in order, the best first; none if it is empty."""
        for start in range(0, len(sentences), SORT_WINDOW):
            translations: dict[int, list[Translation]] = {}
            window = range(start, min(start + SORT_WINDOW, len(sentences)))
            for length, numbers, rows in self.batches(sentences, window):
                translations.update(self._translate(sentences, length, numbers, rows))
            yield from (translations.get(number, []) for number in window)

    def batches(
        self, sentences: Sequence[Sentence], window: range
    ) -> Iterator[tuple[int, list[int], int]]:
        """Yield batches as (length, sentence numbers, rows), with few row counts per length."""
        low = 0
        for high in self.reader.bounds:
            members = [i for i in window if low < len(sentences[i].ids) <= high]
            rows = min(self.batch_size, 1 << max(len(members) - 1, 0).bit_length())
            for start in range(0, len(members), rows):
                yield high, members[start : start + rows], rows
            low = high

    def _translate(
        self, sentences: Sequence[Sentence], length: int, numbers: list[int], rows: int
    ) -> Iterator[tuple[int, list[Translation]]]:
        source = np.full((rows, length), vocabulary.PAD, np.int32)
        for row, number in enumerate(numbers):
            source[row, : len(sentences[number].ids)] = sentences[number].ids
        seeds = np.zeros(rows, np.uint32)
        seeds[: len(numbers)] = numbers
        decoded = jax.device_get(self._compiled(self.run.variables, source, seeds))
        for row, number in enumerate(numbers):
            columns = (decoded.tokens[row], decoded.lengths[row], decoded.scores[row])
            yield number, [self._text(*hypothesis) for hypothesis in zip(*columns, strict=True)]

    def _text(self, tokens: np.ndarray, length: np.ndarray, score: np.ndarray) -> Translation:
        ids = tokens[:length].tolist()
        return Translation(self.reader.vocab.decode(ids), float(score), ids)

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        def translate(variables: Any, source: jax.Array, seeds: jax.Array) -> Any:
            key = jax.random.key(self.seed)
            streams = stream_keys(key, self.run.task.rngs)
            apply = functools.partial(self.run.model.apply, variables, rngs=streams)
            keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, seeds)
            return decode(apply, source, self.search, keys)

        return mesh.compile_on_default_device(translate)


def default_translation(
    run: TrainedModel, reader: SentenceReader, source: np.ndarray
) -> np.ndarray:
    """Translate a source [n] by the search of the run's task; return the ids [m]."""
    translate = Translator(run, reader, run.task.decoding)
    (translations,) = translate([Sentence(source, '')])
    return np.array(translations[0].tokens, np.int32)
