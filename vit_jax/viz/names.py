"""Names of metrics and config keys in words, for axes and titles."""

from __future__ import annotations

import re
from collections.abc import Sequence

WORDS = {
    'ap': 'AP',
    'ap50': 'AP50',
    'ap75': 'AP75',
    'ar': 'AR',
    'bleu': 'BLEU',
    'chrf': 'chrF',
    'dim': 'size',
    'knn': 'kNN',
    'lr': 'learning rate',
    'mlp': 'MLP',
    'pq': 'PQ',
    'psnr': 'PSNR',
    'rq': 'RQ',
    'sec': 's',
    'sq': 'SQ',
}
# Units of metrics; metrics of one unit share an axis.
UNITS = ('accuracy', 'loss', 'perplexity', 'bleu', 'chrf', 'psnr', 'shot', 'ap', 'ar', 'pq')


def words(name: str) -> str:
    """`weight_decay` -> `Weight decay`, `images_per_sec` -> `Images/s`, `1_8` -> `1–8`."""
    text = re.sub(r'(?<=\d)_(?=\d)', '–', name).replace('_', ' ').strip()
    text = ' '.join(WORDS.get(word.lower(), word) for word in text.split()).replace(' per ', '/')
    return text if text[:3] in ('chr', 'kNN') else text[:1].upper() + text[1:]


def title(metric: str) -> str:
    """`val/perplexity` -> `Perplexity (val)`."""
    prefix, _, key = metric.rpartition('/')
    return f'{words(key)} ({prefix})' if prefix else words(key)


def unit(metric: str) -> str:
    """The unit of a metric: `test_bleu/bleu_1_8` -> `bleu`; its own name if none is known."""
    key = metric.rpartition('/')[2].lower()
    found = [part.rstrip('0123456789') for part in key.split('_')]
    return next((part for part in reversed(found) if part in UNITS), key)


def of_keys(keys: Sequence[str]) -> list[str]:
    """Short names of config keys: their last parts, or the whole keys where these collide."""
    last = [key.rpartition('.')[2] for key in keys]
    return [words(x) if last.count(x) == 1 else key for key, x in zip(keys, last, strict=True)]
