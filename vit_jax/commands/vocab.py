"""Train a subword vocabulary on both sides of a translation, or on the texts of images."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from vit_jax.commands._parser import Parser, check_output, writing
from vit_jax.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Write a SentencePiece model, and print the lengths of sentences in pieces.

    Raises:
      UserError: The output exists.
    """
    parser = Parser('vocab', __doc__)
    parser.add_argument(
        'source',
        help='source: text:pairs.tsv, text:train.en,train.de, or tfds:NAME with translations',
    )
    parser.add_argument(
        '--field',
        action='append',
        metavar='NAME',
        help="text field such as 'caption'; may be repeated (default: both sides of a pair)",
    )
    parser.add_argument(
        '--split',
        default='train',
        help="split of the source, such as 'train[:100000]' (default: train)",
    )
    parser.add_argument(
        '--size',
        type=int,
        default=8000,
        help='number of pieces, including four special ids (default: 8000)',
    )
    parser.add_argument('--kind', default='unigram', help='kind of model: unigram (default) or bpe')
    parser.add_argument(
        '--normalization',
        default='auto',
        help='normalization rule of characters: nmt_nfkc, nfkc, nmt_nfkc_cf, nfkc_cf or identity, '
        'which keeps full-width punctuation (default: identity for Chinese and Japanese, else '
        'nmt_nfkc)',
    )
    parser.add_argument(
        '--lower', action='store_true', help="lowercase, for transforms='lower|tokenize'"
    )
    parser.add_argument(
        '--out', required=True, metavar='FILE', help='file to write, for config.data.vocab'
    )
    args = parser.parse_args(argv)
    output = pathlib.Path(args.out).expanduser()
    if output.exists():
        raise UserError(f'{output} already exists: choose another name or remove it')
    check_output(output, '--out')
    from vit_jax.data import sources, vocabulary
    from vit_jax.data.transforms.text import SIDES
    from vit_jax.ops.scripts import main_script
    from vit_jax.storage import paths

    source = sources.open_source(args.source, args.split)
    fields = args.field or SIDES
    normalization = args.normalization
    if normalization == 'auto':
        is_wide = main_script(sentences(source, fields, args.lower)) in ('chinese', 'japanese')
        normalization = 'identity' if is_wide else 'nmt_nfkc'
    vocab = vocabulary.train(
        sentences(source, fields, args.lower), args.size, args.kind, normalization
    )
    count = pieces = longest = 0
    for sentence in sentences(source, fields, args.lower):
        length = len(vocab.encode(sentence)) + 1
        count, pieces, longest = count + 1, pieces + length, max(longest, length)
    with writing(output, '--out'):
        paths.write_atomic(output, vocab.model)
    print(
        f'{output}: {len(vocab):,} pieces from {count:,} sentences, which have '
        f'{pieces / count:.1f} on average and {longest} at most, including the end'
    )
    return 0


def sentences(source: Any, fields: Sequence[str], lower: bool) -> Iterator[str]:
    """Yield the named texts of every record.

    Raises:
      UserError: A record lacks one of the texts.
    """
    for index in range(len(source)):
        record = source[index]
        for name in fields:
            if not isinstance(text := record.get(name), str):
                raise UserError(
                    f'{source.title}: the record does not have the text {name!r}, only '
                    f'{", ".join(record)}: name its texts by --field'
                )
            yield text.lower() if lower else text
