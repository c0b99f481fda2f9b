"""Vocabularies by their files: SentencePiece models, or the tokenizer.json of checkpoints."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax import extras
from vit_jax.data.vocabulary import Bytes, Tokenizer, Vocabulary, content, known
from vit_jax.errors import UserError
from vit_jax.storage import paths as storage

BYTES = 'bytes'  # in place of a file


class TokenizerJson(Vocabulary):
    """A tokenizer of the package tokenizers, defined by the bytes of its tokenizer.json.

    Texts get its beginning, if it has one.
    """

    def __len__(self) -> int:
        return self._processor.get_vocab_size()

    @functools.cached_property
    def special(self) -> tuple[int, ...]:
        """The ids of padding, beginning, end and unknown; -1 for one that there is not."""
        around = self._processor.encode('').ids
        said = storage.parse_json(self.model)
        unknown = self._id((said.get('model') or {}).get('unk_token'))
        padding = (said.get('padding') or {}).get('pad_id', self._id('<pad>'))
        begin, end = (around[0] if len(around) > 1 else -1), (around[-1] if around else -1)
        return padding, begin, end, unknown

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [n], without an end.

        Raises:
          UserError: if the tokenizer cannot, as by a pattern that takes too long.
        """
        with storage.intact(f'the text {text[:40]!r} by its tokenizer.json', 'choose another'):
            ids = self._processor.encode(text).ids
        return np.array(ids[:-1], np.int32)  # the end is the last one

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids before the first end; padding and beginnings have none."""
        return self._processor.decode(known(content(ids, self.special), len(self), self.special))

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The piece of each id, as the axes of attention maps show them."""
        kept = known(ids, len(self), self.special)
        return [(self._processor.id_to_token(i) if i >= 0 else None) or '<unk>' for i in kept]

    def _id(self, token: Any) -> int:
        """The id of a token; -1 if there is none."""
        found = self._processor.token_to_id(token) if isinstance(token, str) else None
        return -1 if found is None else found

    @functools.cached_property
    def _processor(self) -> Any:
        import tokenizers

        made = tokenizers.Tokenizer.from_str(self.model.decode())
        made.no_padding()  # lengths are those of the transform `tokenize`
        made.no_truncation()
        return made


def load(path: str | pathlib.Path) -> Tokenizer:
    """Load the vocabulary in a file, or that of 'bytes', which needs none.

    Args:
      path: a SentencePiece model, or a tokenizer.json.

    Raises:
      UserError: if it is missing or neither of these, or if texts have no end by it.
    """
    if path == BYTES:
        return Bytes()
    try:
        model = storage.read_bytes(storage.path(path))
    except OSError as error:
        raise UserError(
            f"vocabulary {str(path)!r}: {error.strerror}; make one by 'python -m vit_jax vocab'"
        ) from error
    if model[:1] == b'{':
        return _json(model, str(path))
    vocab = Vocabulary(model)
    try:
        special = vocab.special
    except RuntimeError as error:
        raise UserError(f'vocabulary {str(path)!r}: no SentencePiece model') from error
    if special[2] < 0:
        raise UserError(f'vocabulary {str(path)!r}: it has no id for the end of a text')
    return vocab


def _json(model: bytes, name: str) -> TokenizerJson:
    """The tokenizer in the bytes of a tokenizer.json; `name` is its file's, for messages."""
    with extras.needed_by(f'vocabulary {name!r}:', 'hub'):
        import tokenizers  # noqa: F401
    vocab = TokenizerJson(model)
    with storage.intact(f'vocabulary {name!r}: it is no tokenizer.json, or', 'get it again'):
        end = vocab.special[2]
    if end < 0:
        raise UserError(f'vocabulary {name!r}: it has no id for the end of a text')
    return vocab
