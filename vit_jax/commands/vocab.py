"""Make a subword vocabulary of both sides of a text, or of the texts beside images."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from vit_jax.commands._parser import Parser, check_output, writing
from vit_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Writes a SentencePiece model, and prints the lengths of sentences in its pieces."""
    parser = Parser('vocab', __doc__)
    parser.add_argument(
        'source', help='text:pairs.tsv, text:train.en,train.de, or tfds:NAME of a translation'
    )
    parser.add_argument(
        '--field',
        action='append',
        metavar='NAME',
        help="a text of the records, as 'caption'; may be repeated (default: both sides of a pair)",
    )
    parser.add_argument('--split', default='train', help="'train', 'train[:100000]'")
    parser.add_argument('--size', type=int, default=8000, help='pieces, the four special ids too')
    parser.add_argument('--kind', default='unigram', help='unigram or bpe')
    parser.add_argument('--lower', action='store_true', help="for transforms='lower|tokenize'")
    parser.add_argument('--output', required=True, metavar='FILE', help='for config.data.vocab')
    args = parser.parse_args(argv)
    output = pathlib.Path(args.output).expanduser()
    if output.exists():
        raise UserError(f'{output} is already there: choose another name or remove it')
    check_output(output, '--output')
    from vit_jax.data import sources, vocabulary
    from vit_jax.data.transforms.text import SIDES
    from vit_jax.storage import paths as storage

    source = sources.open_source(args.source, args.split)
    fields = args.field or SIDES
    vocab = vocabulary.train(sentences(source, fields, args.lower), args.size, args.kind)
    count = pieces = longest = 0
    for sentence in sentences(source, fields, args.lower):
        length = len(vocab.encode(sentence)) + 1
        count, pieces, longest = count + 1, pieces + length, max(longest, length)
    with writing(output, '--output'):
        storage.write_atomic(output, vocab.model)
    print(
        f'{output}: {len(vocab):,} pieces of {count:,} sentences, which have {pieces / count:.1f} '
        f'on average and {longest} at most, the end included'
    )
    return 0


def sentences(source: Any, fields: Sequence[str], lower: bool) -> Iterator[str]:
    """The texts of every record, by the names of their fields.

    Raises:
      UserError: if a record has no such text.
    """
    for index in range(len(source)):
        record = source[index]
        for name in fields:
            if not isinstance(text := record.get(name), str):
                raise UserError(
                    f'{source.title}: a vocabulary is made of pairs of sentences, or of texts that '
                    f'--field names; the record has {", ".join(record)}'
                )
            yield text.lower() if lower else text
