"""Vocabularies: SentencePiece models, tokenizers of checkpoints, or bytes.

Kudo and Richardson 2018, "SentencePiece: A simple and language independent subword tokenizer".
Vocabularies made here begin with the same four ids, which encoder-decoders need; models of images
and texts take any. A run keeps its vocabulary in its folder as `vocab.model`, so that later
commands need no other file.
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
from vit_jax.errors import UserError, nearest
from vit_jax.storage import paths, run_folder

PAD, BOS, EOS, UNK = OWN_IDS = tuple(range(4))
KINDS = ('unigram', 'bpe')
BYTES = 'bytes'  # instead of a file's name


class Tokenizer(Protocol):
    """Conversion of text into ids and back, by a `Vocabulary` or by a source of ids."""

    @property
    def special(self) -> tuple[int, ...]:
        """The ids of padding, beginning, end and unknown; -1 for a missing one."""
        ...

    def __len__(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [n], without an end."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids before the first end; padding and beginnings have none."""
        ...

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The piece of each id, as the axes of attention maps show them."""
        ...


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary, defined by the bytes of its SentencePiece model."""

    model: bytes

    def __len__(self) -> int:
        return self._processor.vocab_size()

    @functools.cached_property
    def special(self) -> tuple[int, ...]:
        """The ids of padding, beginning, end and unknown; -1 for a missing one."""
        names = ('pad', 'bos', 'eos', 'unk')
        return tuple(getattr(self._processor, f'{name}_id')() for name in names)

    @property
    def digest(self) -> str:
        """The sha256 of the model."""
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [n], without an end."""
        return np.array(self._processor.encode(text), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids before the first end; padding and beginnings have none."""
        return self._processor.decode(known(content(ids, self.special), len(self), self.special))

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The piece of each id, as the axes of attention maps show them."""
        return [self._processor.id_to_piece(i) for i in known(ids, len(self), self.special)]

    @functools.cached_property
    def _processor(self) -> Any:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=self.model)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model,)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The bytes of UTF-8 as ids, after the four special ones, as in ByT5, arXiv:2105.13626."""

    special: ClassVar[tuple[int, ...]] = OWN_IDS

    def __len__(self) -> int:
        return UNK + 1 + 256

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [n], without an end."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + UNK + 1

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids before the first end; bytes that are not text become U+FFFD."""
        values = [i - UNK - 1 for i in known(content(ids), len(self)) if i > UNK]
        return bytes(values).decode(errors='replace')

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The character of each id; bytes other than ASCII are shown in Latin-1."""
        special = ('<pad>', '<s>', '</s>', '<unk>')
        return [special[i] if i <= UNK else chr(i - UNK - 1) for i in known(ids, len(self))]


def content(ids: Sequence[int] | np.ndarray, special: Sequence[int] = OWN_IDS) -> list[int]:
    """The ids before the first end, without padding and beginnings."""
    pad, bos, eos, _ = special
    words = [int(i) for i in ids]
    words = words[: words.index(eos)] if eos in words else words
    return [i for i in words if i not in (pad, bos)]


def known(
    ids: Sequence[int] | np.ndarray, size: int, special: Sequence[int] = OWN_IDS
) -> list[int]:
    """The ids, with unknown for ids from `size` up, which a larger model may predict."""
    return [int(i) if i < size else special[3] for i in ids]


def require_own_ids(vocab: Tokenizer) -> None:
    """Raise ValueError unless the special ids are the ones that encoder-decoders need."""
    if vocab.special != OWN_IDS:
        names = ('pad', 'bos', 'eos', 'unk')
        have = ', '.join(f'{name} {i}' for name, i in zip(names, vocab.special, strict=True))
        raise ValueError(
            f'the vocabulary has {have} instead of pad 0, bos 1, eos 2, unk 3; make one by '
            "'python -m vit_jax vocab'"
        )


def require_ids(vocab: Tokenizer | None, model: Any, where: str) -> None:
    """Check that a model of `vit_jax.models` expects the special ids that texts have.

    Args:
      vocab: encodes the texts; None if it is unknown.
      model: the Linen module.
      where: for the message.

    Raises:
      UserError: if texts end otherwise, or the model generates text and has other special ids.
    """
    if vocab is None:
        return
    eos, end = model.end_of_text, vocab.special[2]
    if eos is not None and eos != end:
        raise UserError(
            f'{where}: model.eos={eos} is the id whose token becomes the embedding of a text, and '
            f'the vocabulary ends texts with {end}: take the vocabulary of the model, or set '
            f'config.model.eos={end} to train'
        )
    if model.generates_text:
        try:
            require_own_ids(vocab)
        except ValueError as error:
            raise UserError(f'{where}: {error}') from None


def require_same(vocab: Vocabulary | None, folder: pathlib.Path) -> None:
    """Raise UserError if the run in `folder` keeps another vocabulary than `vocab`."""
    kept = folder / run_folder.VOCAB
    if kept.is_file() and (vocab is None or kept.read_bytes() != vocab.model):
        raise UserError(
            f'{kept} is another vocabulary than config.data.vocab: set it to {kept}, or choose '
            'another --workdir'
        )


def require_kept(folder: pathlib.Path, digest: str | None, named: str | None) -> None:
    """Raise UserError if a run has another vocabulary than its checkpoint.

    Args:
      folder: folder of the run, which keeps a copy.
      digest: in the checkpoint; None if it has none.
      named: the file in the run's config, which is read if the copy is lost.
    """
    kept = folder / run_folder.VOCAB
    file = kept if kept.is_file() or not named else paths.path(named)
    if digest and file.is_file() and Vocabulary(file.read_bytes()).digest != digest:
        raise UserError(
            f'{file} is not the vocabulary that the run was trained with: restore {kept} from a '
            'copy'
        )


def train(sentences: Iterable[str], size: int, kind: str = 'unigram') -> Vocabulary:
    """Learn `size` pieces, including every character of the text.

    Args:
      sentences: of all languages that share the vocabulary.
      size: number of pieces, including the four special ids.
      kind: `unigram` (Kudo 2018) or `bpe` (Sennrich et al. 2016).

    Raises:
      UserError: for another kind, or a size that the text does not allow.
    """
    import sentencepiece

    if kind not in KINDS:
        raise UserError('vocabulary: ' + nearest('kind', kind, KINDS))
    if size <= (special := len({PAD, BOS, EOS, UNK})):
        raise UserError(f'a vocabulary of {size} pieces: {special} are special ids; write more')
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=written,
            vocab_size=size,
            model_type=kind,
            character_coverage=1.0,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            num_threads=1,  # the order of sums, and with it the model, would depend on threads
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(f'a vocabulary of {size} pieces: {_reason(error)}') from error
    return Vocabulary(written.getvalue())


def _reason(error: RuntimeError) -> str:
    """SentencePiece's message without the location in its code."""
    return str(error).rpartition('] ')[2].strip().rstrip('.') or 'the text does not allow it'


class TokenizerJson(Vocabulary):
    """A tokenizer of the package tokenizers, defined by the bytes of its tokenizer.json.

    Texts begin with its id for the beginning, if it has one.
    """

    def __len__(self) -> int:
        return self._processor.get_vocab_size()

    @functools.cached_property
    def special(self) -> tuple[int, ...]:
        """The ids of padding, beginning, end and unknown; -1 for a missing one."""
        around = self._processor.encode('').ids
        said = paths.parse_json(self.model)
        unknown = self._id((said.get('model') or {}).get('unk_token'))
        padding = (said.get('padding') or {}).get('pad_id', self._id('<pad>'))
        begin, end = (around[0] if len(around) > 1 else -1), (around[-1] if around else -1)
        return padding, begin, end, unknown

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [n], without an end.

        Raises:
          UserError: if the tokenizer fails, for example by a pattern that takes too long.
        """
        with paths.intact(f'the text {text[:40]!r} by its tokenizer.json', 'choose another'):
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
    """Load the vocabulary in a file, or 'bytes', which needs no file.

    Args:
      path: a SentencePiece model, or a tokenizer.json.

    Raises:
      UserError: if the file is missing or neither of these, or has no id for the end of a text.
    """
    if path == BYTES:
        return Bytes()
    try:
        model = paths.read_bytes(paths.path(path))
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
        raise UserError(f'vocabulary {str(path)!r}: not a SentencePiece model') from error
    if special[2] < 0:
        raise UserError(f'vocabulary {str(path)!r}: it has no id for the end of a text')
    return vocab


def _json(model: bytes, name: str) -> TokenizerJson:
    """The tokenizer in the bytes of a tokenizer.json; `name` is its file's, for messages."""
    with extras.needed_by(f'vocabulary {name!r}:', 'hub'):
        import tokenizers  # noqa: F401
    vocab = TokenizerJson(model)
    with paths.intact(f'vocabulary {name!r}: it is not a tokenizer.json, or', 'get it again'):
        end = vocab.special[2]
    if end < 0:
        raise UserError(f'vocabulary {name!r}: it has no id for the end of a text')
    return vocab
