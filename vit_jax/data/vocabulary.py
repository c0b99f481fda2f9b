"""Vocabularies: SentencePiece models, tokenizers of checkpoints, or bytes.

Kudo and Richardson 2018, "SentencePiece: A simple and language independent subword tokenizer".
Vocabularies trained here begin with the same four ids, which encoder-decoders need; models of
images and texts accept any. A run copies its vocabulary to `vocab.model` in its folder, so that
later commands need no other file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from vit_jax import extras
from vit_jax.errors import UserError, check_choice, nearest
from vit_jax.storage import paths, run_folder

PAD, BOS, EOS, UNK = STANDARD_IDS = tuple(range(4))
KINDS = ('unigram', 'bpe')
NORMALIZATIONS = ('nmt_nfkc', 'nfkc', 'nmt_nfkc_cf', 'nfkc_cf', 'identity')
BYTES = 'bytes'  # used in place of a file name


class Tokenizer(Protocol):
    """Conversion of text to ids and back, by a `Vocabulary` or a source of ids."""

    @property
    def special(self) -> tuple[int, ...]:
        """Ids of padding, beginning, end and unknown; -1 for a missing one."""
        ...

    def __len__(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as ids, int32 [n], without an end."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode the ids before the first end, without padding and beginnings."""
        ...

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the piece of each id, as shown on the axes of attention maps."""
        ...


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A SentencePiece vocabulary, defined by the bytes of its model."""

    model: bytes

    def __len__(self) -> int:
        return self._processor.vocab_size()

    @functools.cached_property
    def special(self) -> tuple[int, ...]:
        """Ids of padding, beginning, end and unknown; -1 for a missing one."""
        names = ('pad', 'bos', 'eos', 'unk')
        return tuple(getattr(self._processor, f'{name}_id')() for name in names)

    @property
    def digest(self) -> str:
        """SHA-256 of the model."""
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as ids, int32 [n], without an end."""
        return np.array(self._processor.encode(text), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode the ids before the first end, without padding and beginnings."""
        return self._processor.decode(
            replace_unknown(strip_special(ids, self.special), len(self), self.special)
        )

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the piece of each id, as shown on the axes of attention maps."""
        return [
            self._processor.id_to_piece(i) for i in replace_unknown(ids, len(self), self.special)
        ]

    @functools.cached_property
    def _processor(self) -> Any:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=self.model)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model,)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as ids, after four special ids, as in ByT5, arXiv:2105.13626."""

    special: ClassVar[tuple[int, ...]] = STANDARD_IDS

    def __len__(self) -> int:
        return UNK + 1 + 256

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as ids, int32 [n], without an end."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + UNK + 1

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode the ids before the first end; bytes that are not text become U+FFFD."""
        values = [i - UNK - 1 for i in replace_unknown(strip_special(ids), len(self)) if i > UNK]
        return bytes(values).decode(errors='replace')

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the character of each id; bytes beyond ASCII are shown in Latin-1."""
        special = ('<pad>', '<s>', '</s>', '<unk>')
        return [
            special[i] if i <= UNK else chr(i - UNK - 1) for i in replace_unknown(ids, len(self))
        ]


def strip_special(
    ids: Sequence[int] | np.ndarray, special: Sequence[int] = STANDARD_IDS
) -> list[int]:
    """Return the ids before the first end, without padding and beginnings."""
    pad, bos, eos, _ = special
    sequence = [int(i) for i in ids]
    sequence = sequence[: sequence.index(eos)] if eos in sequence else sequence
    return [i for i in sequence if i not in (pad, bos)]


def replace_unknown(
    ids: Sequence[int] | np.ndarray, size: int, special: Sequence[int] = STANDARD_IDS
) -> list[int]:
    """Replace ids from `size` up, which a larger model may predict, by the unknown id."""
    return [int(i) if i < size else special[3] for i in ids]


def require_standard_ids(vocab: Tokenizer) -> None:
    """Raise ValueError unless the special ids are the ones that encoder-decoders need."""
    if vocab.special != STANDARD_IDS:
        names = ('pad', 'bos', 'eos', 'unk')
        have = ', '.join(f'{name} {i}' for name, i in zip(names, vocab.special, strict=True))
        raise ValueError(
            f'the vocabulary has {have} instead of pad 0, bos 1, eos 2, unk 3; train one with '
            "'python -m vit_jax vocab'"
        )


def require_ids(vocab: Tokenizer | None, model: Any, title: str) -> None:
    """Check that a model of `vit_jax.models` expects the special ids of the texts.

    Args:
      vocab: Vocabulary of the texts; None if unknown.
      model: Linen module.
      title: Place, for the message.

    Raises:
      UserError: if texts end with a different id, or the model generates text with different
        special ids.
    """
    if vocab is None:
        return
    eos, end = model.end_of_text, vocab.special[2]
    if eos is not None and eos != end:
        raise UserError(
            f'{title}: model.eos={eos} is the token whose output embeds a text, but the vocabulary '
            f"ends texts with {end}; use the model's vocabulary, or set config.model.eos={end} to "
            'train'
        )
    if model.generates_text:
        try:
            require_standard_ids(vocab)
        except ValueError as error:
            raise UserError(f'{title}: {error}') from None


def require_same(vocab: Vocabulary | None, folder: pathlib.Path) -> None:
    """Raise UserError if the run in `folder` has a different vocabulary than `vocab`."""
    stored = folder / run_folder.VOCAB
    if stored.is_file() and (vocab is None or stored.read_bytes() != vocab.model):
        raise UserError(
            f'{stored} differs from config.data.vocab; set this key to {stored}, or choose another '
            '--workdir'
        )


def require_kept(folder: pathlib.Path, digest: str | None, config_file: str | None) -> None:
    """Raise UserError if a run's vocabulary differs from its checkpoint's.

    Args:
      folder: Run folder with a copy of the vocabulary.
      digest: Digest in the checkpoint, or None.
      config_file: File named in the run's config, which is read if the copy is lost.
    """
    stored = folder / run_folder.VOCAB
    file = stored if stored.is_file() or not config_file else paths.path(config_file)
    if digest and file.is_file() and Vocabulary(file.read_bytes()).digest != digest:
        raise UserError(
            f'{file} is not the vocabulary that the run was trained with; restore {stored} from a '
            'copy'
        )


def train(
    sentences: Iterable[str],
    size: int,
    kind: str = 'unigram',
    normalization: str = NORMALIZATIONS[0],
) -> Vocabulary:
    """Learn `size` pieces, including every character of the text.

    Args:
      sentences: Sentences in all languages that share the vocabulary.
      size: Number of pieces, including the four special ids.
      kind: `unigram` (Kudo 2018) or `bpe` (Sennrich et al. 2016).
      normalization: SentencePiece's rule for spellings of the same character: `nmt_nfkc` turns
        full-width punctuation, as in Chinese, into ASCII; `identity` keeps the text as it is.

    Raises:
      UserError: for an unknown kind or rule, or a size that the text does not allow.
    """
    import sentencepiece

    if kind not in KINDS:
        raise UserError('vocabulary: ' + nearest('kind', kind, KINDS))
    check_choice('normalization', normalization, NORMALIZATIONS)
    if size <= (special := len({PAD, BOS, EOS, UNK})):
        raise UserError(f'a vocabulary of {size} pieces: {special} are special ids; raise the size')
    model_file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model_file,
            vocab_size=size,
            model_type=kind,
            normalization_rule_name=normalization,
            character_coverage=1.0,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            num_threads=1,  # more threads change the order of sums, and thereby the model
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(f'a vocabulary of {size} pieces: {_strip_location(error)}') from error
    return Vocabulary(model_file.getvalue())


def _strip_location(error: RuntimeError) -> str:
    """Return SentencePiece's message without the location in its code."""
    return str(error).rpartition('] ')[2].strip().rstrip('.') or 'the text does not allow it'


class TokenizerJson(Vocabulary):
    """A tokenizer of the `tokenizers` package, defined by the bytes of its tokenizer.json.

    Texts begin with its beginning id, if it has one.
    """

    def __len__(self) -> int:
        return self._processor.get_vocab_size()

    @functools.cached_property
    def special(self) -> tuple[int, ...]:
        """Ids of padding, beginning, end and unknown; -1 for a missing one."""
        empty_text = self._processor.encode('').ids
        settings = paths.parse_json(self.model)
        unknown = self._id((settings.get('model') or {}).get('unk_token'))
        padding = (settings.get('padding') or {}).get('pad_id', self._id('<pad>'))
        begin, end = (
            (empty_text[0] if len(empty_text) > 1 else -1),
            (empty_text[-1] if empty_text else -1),
        )
        return padding, begin, end, unknown

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` as ids, int32 [n], without an end.

        Raises:
          UserError: if the tokenizer fails, for example on a pattern that takes too long.
        """
        with paths.intact(f'the text {text[:40]!r} by its tokenizer.json', 'choose another'):
            ids = self._processor.encode(text).ids
        return np.array(ids[:-1], np.int32)  # without the end

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode the ids before the first end, without padding and beginnings."""
        return self._processor.decode(
            replace_unknown(strip_special(ids, self.special), len(self), self.special)
        )

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the piece of each id, as shown on the axes of attention maps."""
        valid_ids = replace_unknown(ids, len(self), self.special)
        return [(self._processor.id_to_token(i) if i >= 0 else None) or '<unk>' for i in valid_ids]

    def _id(self, token: Any) -> int:
        """Return the id of a token; -1 if it does not exist."""
        number = self._processor.token_to_id(token) if isinstance(token, str) else None
        return -1 if number is None else number

    @functools.cached_property
    def _processor(self) -> Any:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(self.model.decode())
        tokenizer.no_padding()  # the transform `tokenize` sets the length
        tokenizer.no_truncation()
        return tokenizer


def load_vocabulary(path: str | pathlib.Path) -> Tokenizer:
    """Load a vocabulary from a file, or 'bytes', which needs no file.

    Args:
      path: SentencePiece model, or tokenizer.json.

    Raises:
      UserError: if the file is missing or neither of these, or has no end-of-text id.
    """
    if path == BYTES:
        return Bytes()
    try:
        model = paths.read_bytes(paths.path(path))
    except OSError as error:
        raise UserError(
            f"vocabulary {str(path)!r}: {error.strerror}; train one with 'python -m vit_jax vocab'"
        ) from error
    if model[:1] == b'{':
        return _load_json(model, str(path))
    vocab = Vocabulary(model)
    try:
        special = vocab.special
    except RuntimeError as error:
        raise UserError(f'vocabulary {str(path)!r}: not a SentencePiece model') from error
    if special[2] < 0:
        raise UserError(f'vocabulary {str(path)!r} has no end-of-text id')
    return vocab


def _load_json(model: bytes, name: str) -> TokenizerJson:
    """Load a tokenizer from the bytes of a tokenizer.json; `name` is the file, for messages."""
    with extras.needed_by(f'vocabulary {name!r}:', 'hub'):
        import tokenizers  # noqa: F401
    vocab = TokenizerJson(model)
    with paths.intact(f'vocabulary {name!r}: it is not a tokenizer.json, or', 'get it again'):
        end = vocab.special[2]
    if end < 0:
        raise UserError(f'vocabulary {name!r} has no end-of-text id')
    return vocab
