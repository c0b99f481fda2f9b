"""`synthetic:copy` and `synthetic:reverse`: sequences of digits to copy or to reverse.

Two tasks that a correct encoder-decoder learns in minutes, without any download.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from vit_jax.data.records import Record, SourceInfo, UnknownSplit
from vit_jax.data.vocabulary import EOS, STANDARD_IDS, UNK, replace_unknown, strip_special
from vit_jax.errors import UserError, nearest

TASKS = {'copy': slice(None), 'reverse': slice(None, None, -1)}
SIZES = {'train': 100_000, 'test': 1_000}
FIRST_DIGIT = UNK + 1
LENGTHS = (4, 12)  # shortest and longest sequence, in digits
# Named as in SentencePiece, which writes a space as U+2581.
PIECES = ('<pad>', '<s>', '</s>', '<unk>', *(f'\u2581{digit}' for digit in range(10)))


class Digits:
    """Sequences as text: digits with spaces between, '3 1 4'."""

    special: ClassVar[tuple[int, ...]] = STANDARD_IDS

    def __len__(self) -> int:
        return len(PIECES)

    def encode(self, text: str) -> np.ndarray:
        """Encode digits as ids, int32 [n], without an end.

        Raises:
          UserError: for any other word.
        """
        pieces = [f'\u2581{word}' for word in text.split()]
        for piece in pieces:
            if piece not in PIECES:
                raise UserError(
                    f'{piece[1:]!r} is not a digit; write digits from 0 to 9 with spaces between, '
                    "such as '3 1 4'"
                )
        return np.array([PIECES.index(piece) for piece in pieces], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode the digits before the first end."""
        return ' '.join(piece.removeprefix('\u2581') for piece in self.pieces(strip_special(ids)))

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the piece of each id."""
        return [PIECES[i] for i in replace_unknown(ids, len(self))]


class Source:
    """Pairs of ids, int32 [n], that end in `EOS`; digit d has the id `FIRST_DIGIT + d`.

    Record i is a function of the split and i; the vocabulary is ten digits and the special ids.
    """

    vocab = Digits()
    info = SourceInfo(0, (), vocab_size=len(vocab))

    def __init__(self, path: str, split: str):
        if path not in TASKS:
            raise UserError(f'source synthetic:{path}: ' + nearest('task', path, TASKS))
        if split not in SIZES:
            raise UnknownSplit.from_splits(f'source synthetic:{path}', split, SIZES)
        self._task, self._split = path, split

    def __len__(self) -> int:
        return SIZES[self._split]

    def __getitem__(self, index: int, /) -> Record:
        rng = np.random.default_rng((list(SIZES).index(self._split), index))
        digits = rng.integers(10, size=rng.integers(LENGTHS[0], LENGTHS[1] + 1))
        return {'source': _ids(digits), 'target': _ids(digits[TASKS[self._task]])}

    def labels(self) -> np.ndarray:
        raise UserError(f'source synthetic:{self._task}: sequences have no classes')

    def record_name(self, index: int, /) -> str:
        return f'synthetic:{self._task} {self._split} record {index}'


def _ids(digits: np.ndarray) -> np.ndarray:
    return np.append(digits + FIRST_DIGIT, EOS).astype(np.int32)
