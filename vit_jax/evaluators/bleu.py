"""BLEU and chrF of translations, by sacrebleu (Post 2018, arXiv:1804.08771).

BLEU (Papineni et al. 2002) is computed over the corpus on detokenized text, which sacrebleu splits
into words, so that results with different vocabularies are comparable: by `13a`, Chinese by `zh`,
Japanese by `ja-mecab`, and into characters where neither spaces nor a tool separate words. They are
not comparable with BLEU of text that was tokenized, or whose compounds were split, beforehand. chrF
follows Popović 2015.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from vit_jax.errors import UserError, check_choice
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.extras import needed_by
from vit_jax.ops.scripts import main_script

EXTRA = 'translate'
# sacrebleu's tokenizers by script, see `main_script`.
TOKENIZERS = {'spaced': '13a', 'chinese': 'zh', 'japanese': 'ja-mecab', 'unspaced': 'char'}
_log = logging.getLogger(__name__)


class Evaluator(base.Evaluator):
    """`bleu` and `chrf`, both 0 to 100, and optionally BLEU by source length.

    NaN if a predicted `score` is not finite.

    The references are the target texts before encoding. If all are lowercase, for example after the
    transform `lower`, the signature contains `case:lc`. Examples with the same `image_id`, if the
    data have it, are one image: it counts once, and all of their captions are its references.

    Args:
      edges: Number of words of the longest source in each class except the last; (10, 20) gives
        `bleu_1_10`, `bleu_11_20` and `bleu_21_up`. Classes without sentences are omitted.
      reference: Text field with the references: 'target' of a pair of sentences, 'caption' of an
        image.
      tokenize: Name of a tokenizer of sacrebleu, such as '13a', 'zh' or 'char'; 'auto' chooses one
        by the script of the references.
    """

    predictions = ('tokens',)

    def __init__(
        self, edges: tuple[int, ...] = (), reference: str = 'target', tokenize: str = 'auto'
    ):
        if list(edges) != sorted({e for e in edges if e > 0}):
            raise UserError(f'edges={edges}: must be increasing numbers of words, such as (10, 20)')
        self.edges, self.reference, self.tokenize = tuple(edges), reference, tokenize
        self._texts: Sequence[dict[str, str]] = ()
        self._vocab: Any = None
        self.start()

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Index the references; raise UserError without text, or without sacrebleu."""
        self._vocab = dataset.vocab
        self._texts = [dataset.text(i) for i in range(len(dataset.source))]
        if not any(self._texts):
            raise UserError(f'{dataset.source.title} is not text that config.data.vocab can encode')
        targets = [text.get(self.reference, '') for text in self._texts]
        self._lower = all(target == target.lower() for target in targets)
        self._images = [text.get('image_id', f'example {i}') for i, text in enumerate(self._texts)]
        self._references: dict[str, list[str]] = {}
        for image, target in zip(self._images, targets, strict=True):
            self._references.setdefault(image, []).append(target)
        self._tokenizer = self.tokenize
        if self.tokenize == 'auto':
            self._tokenizer = _choose_tokenizer(targets)
        metric = self._metric(references=self._streams(self._references))
        self.signature = str(metric.get_signature())

    def names(self) -> tuple[str, ...]:
        ends = (*map(str, self.edges), 'up') if self.edges else ()
        classes = zip((0, *self.edges), ends, strict=False)
        return 'bleu', 'chrf', *(f'bleu_{low + 1}_{end}' for low, end in classes)

    def start(self) -> None:
        self._translations: dict[int, str] = {}
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if the task does not predict `tokens`."""
        if 'tokens' not in predictions:
            raise UserError("BLEU needs 'tokens', but the task does not predict them")
        self._finite &= base.is_finite(predictions, 'score')
        for index, ids in zip(batch['index'].tolist(), predictions['tokens'], strict=True):
            self._translations[index] = self._vocab.decode(ids)

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        metrics, examples = _sacrebleu(), sorted(self._translations)
        chrf = metrics.CHRF(lowercase=self._lower)
        return {
            'bleu': self._bleu(examples),
            'chrf': chrf.corpus_score(*self._pairs(examples)).score,
            **{
                name: self._bleu(subset)
                for name, subset in self._by_length(examples).items()
                if subset
            },
        }

    def _bleu(self, examples: Sequence[int]) -> float:
        hypotheses, references = self._pairs(examples)
        return self._metric().corpus_score(hypotheses, references).score

    def _metric(self, **options: Any) -> Any:
        """Make sacrebleu's BLEU.

        Raises:
          UserError: if sacrebleu has no such tokenizer, or a package for it is missing.
        """
        bleu = _sacrebleu().BLEU
        check_choice('tokenize', self._tokenizer, bleu.TOKENIZERS)
        try:
            return bleu(lowercase=self._lower, tokenize=self._tokenizer, **options)
        except (ImportError, RuntimeError) as error:
            reason = str(error).strip().split('\n')[0]
            raise UserError(f'tokenize={self._tokenizer!r}: {reason}') from None

    def _pairs(self, examples: Sequence[int]) -> tuple[list[str], list[list[str | None]]]:
        """Return the translation of each image, and its references, see `_streams`."""
        translations = {self._images[i]: self._translations[i] for i in reversed(examples)}
        return list(translations.values()), self._streams(translations)

    def _streams(self, images: Iterable[str]) -> list[list[str | None]]:
        """Return the first references of all images, then the second ones and so on; None where an
        image has fewer.
        """
        rows = itertools.zip_longest(*(self._references[image] for image in images))
        return [list(row) for row in rows]

    def _by_length(self, examples: Sequence[int]) -> dict[str, list[int]]:
        """Group examples by source length."""
        if not self.edges:
            return {}
        length = {i: len(self._texts[i]['source'].split()) for i in examples}
        ends = [(f'{high}', high) for high in self.edges] + [('up', max(length.values()))]
        return {
            f'bleu_{low + 1}_{end}': [i for i in examples if low < length[i] <= high]
            for low, (end, high) in zip((0, *self.edges), ends, strict=True)
        }


def _choose_tokenizer(references: Iterable[str]) -> str:
    """Choose sacrebleu's tokenizer for the script of the references."""
    script = main_script(references)
    if script == 'japanese' and importlib.util.find_spec('MeCab') is None:
        _log.warning(
            'BLEU of Japanese is computed on characters, since MeCab is not installed; for words, '
            'install sacrebleu[ja]'
        )
        return 'char'
    return TOKENIZERS[script]


def _sacrebleu() -> Any:
    with needed_by('BLEU', EXTRA):
        from sacrebleu import metrics
    return metrics
