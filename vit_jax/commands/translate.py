"""Translate text with a trained model, line by line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vit_jax.commands._model import add_run_flags, run_options
from vit_jax.commands._parser import Parser, add_json_flag, check_output, writing
from vit_jax.errors import UserError, positive_number

if TYPE_CHECKING:
    from vit_jax.inference.text import Sentence, SentenceReader, Translation
    from vit_jax.ops.search import Search
    from vit_jax.tasks.base import Task

STDIN = '-'
# {method: the flags that only this method has}
METHOD_FLAGS = {
    'beam': ('beams', 'alpha', 'n_best'),
    'sample': ('temperature', 'top_k', 'top_p', 'seed'),
}


def main(argv: Sequence[str]) -> int:
    """Print a translation of every line, or write them to a file."""
    parser = make_parser(argv)
    args = parser.parse_args(argv)
    check_flags(parser, args)
    lines = [*args.sentence] if args.file is None else read_lines(args.file)
    if args.sentence == [STDIN]:
        lines = read_lines(STDIN)
    from vit_jax.inference.load import open_run
    from vit_jax.inference.text import Translator, sentence_reader
    from vit_jax.runtime import compile_cache, mesh
    from vit_jax.storage.paths import write_text_atomic

    compile_cache.enable()
    mesh.usable_devices()
    run = open_run(args.workdir, **run_options(args))
    reader = sentence_reader(run)
    search = choose_search(run.task, args)
    sentences = read_sentences(reader, lines)
    warn_of_truncated(sentences)
    translate = Translator(run, reader, search, args.batch_size, args.seed or 0)
    translations = progress(translate(sentences), len(lines), hidden=shows_text(args))
    texts = (
        format_line(args, number, lines[number], result)
        for number, result in enumerate(translations)
    )
    if args.out is None:
        for text in texts:
            print(text, flush=True)
        return 0
    output = ''.join(f'{text}\n' for text in texts)
    with writing(args.out, '--out'):
        write_text_atomic(args.out, output)
    print(f'{args.out}: {len(lines):,} lines translated')
    return 0


def make_parser(argv: Sequence[str]) -> Parser:
    """Make the parser of the flags."""
    parser = Parser('translate', __doc__)
    add_run_flags(parser, argv)
    add = parser.add_argument
    add('sentence', nargs='*', help=f"sentences; '{STDIN}' reads standard input")
    add('--file', help='UTF-8 file with one sentence per line')
    add('--out', metavar='FILE', help='file to write')
    add('--beams', type=int, help="number of beams (default: the run's)")
    add('--alpha', type=float, help="length penalty (default: the run's)")
    add('--greedy', action='store_true', help='take the most probable token at each step')
    add('--sample', action='store_true', help='sample tokens')
    add('--temperature', type=float, help='temperature of sampling (default: 1)')
    add('--top-k', type=int, help='number of most probable tokens to sample from')
    add('--top-p', type=float, help='probability of the nucleus to sample from')
    add('--seed', type=int, help='random seed of sampling (default: 0)')
    add(
        '--n-best',
        type=positive_number,
        metavar='N',
        help='translations per sentence, printed with line numbers (default: 1)',
    )
    add('--scores', action='store_true', help='print scores before the text')
    add_json_flag(parser, ', an object per line')
    add('--batch-size', type=positive_number, default=32, help='sentences per batch (default: 32)')
    return parser


def check_flags(parser: Parser, args: argparse.Namespace) -> None:
    """Raise UserError for flags that exclude each other, or an unwritable output."""
    if bool(args.sentence) == (args.file is not None):
        parser.error(f"give sentences, --file FILE, or '{STDIN}' for standard input")
    if args.greedy and args.sample:
        parser.error('give one of --greedy and --sample')
    method = method_name(args)
    for other, names in METHOD_FLAGS.items():
        for name in names:
            if other != method and getattr(args, name) is not None:
                flag = name.replace('_', '-')
                parser.error(f'--{flag} applies to {other}{"" if other == "sample" else " search"}')
    if args.out is not None:
        check_output(args.out, '--out', [args.file])


def method_name(args: argparse.Namespace) -> str:
    """Name the search that the flags select."""
    return 'greedy' if args.greedy else 'sample' if args.sample else 'beam'


def choose_search(task: Task, args: argparse.Namespace) -> Search:
    """Change the search of the run's task by the flags.

    Raises:
      UserError: There are more translations than beams, or `Search` refuses an option.
    """
    names = [
        name for names in METHOD_FLAGS.values() for name in names if name not in ('n_best', 'seed')
    ]
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    search = dataclasses.replace(task.decoding, method=method_name(args), **changes)
    if args.n_best is None or search.method != 'beam':
        return search
    if args.n_best > search.beams:
        raise UserError(f'--n-best {args.n_best}: there are {search.beams} beams; raise --beams')
    return dataclasses.replace(search, stop='best' if args.n_best == 1 else 'all')


def read_lines(path: str) -> list[str]:
    """Read the lines of a UTF-8 file or of standard input; only line feeds end a line.

    Raises:
      UserError: The file cannot be read.
    """
    from vit_jax.storage import paths

    name = 'standard input' if path == STDIN else path
    try:
        data = sys.stdin.buffer.read() if path == STDIN else paths.read_bytes(path, paths.TEXT)
    except OSError as error:
        raise UserError(f'--file {path}: {error.strerror}') from error
    try:
        text = data.decode().removeprefix('\ufeff')
    except UnicodeDecodeError as error:
        line = data.count(b'\n', 0, error.start) + 1
        raise UserError(f'{name} line {line}: not UTF-8 ({error.reason}); convert it') from error
    return [line.removesuffix('\r') for line in text.removesuffix('\n').split('\n')] if text else []


def read_sentences(reader: SentenceReader, lines: Sequence[str]) -> list[Sentence]:
    """Tokenize the lines; raise UserError with the line number for a word without an id."""
    sentences = []
    for number, line in enumerate(lines, 1):
        try:
            sentences.append(reader.read(line))
        except UserError as error:
            raise UserError(f'line {number}: {error}') from error
    return sentences


def warn_of_truncated(sentences: Sequence[Sentence]) -> None:
    """Warn of lines that are too long, and show their untranslated ends."""
    for number, sentence in enumerate(sentences, 1):
        if cut := sentence.cut:
            excerpt = cut if len(cut) <= 60 else f'{cut[:60]}...'
            print(
                f'warning: line {number} is truncated to {len(sentence.ids) - 1} tokens, the '
                f'longest length in training; left out: {excerpt!r}',
                file=sys.stderr,
            )


def shows_text(args: argparse.Namespace) -> bool:
    """Return whether translations are printed to a terminal, where a progress bar would disturb."""
    return args.out is None and sys.stdout.isatty()


def progress(
    translations: Iterable[list[Translation]], total: int, hidden: bool
) -> Iterator[list[Translation]]:
    """Yield the translations, with a progress bar on standard error if that is a terminal."""
    from rich.progress import track

    from vit_jax.runtime.console import Console

    console = Console(stderr=True)
    disabled = hidden or not console.is_terminal
    yield from track(translations, 'lines', total, console=console, disable=disabled)


def format_line(
    args: argparse.Namespace, number: int, line: str, results: list[Translation]
) -> str:
    """Format a line of output: [number] [score] text, separated by tabs; or a JSON object."""
    best_results = results[: args.n_best or 1]
    if args.json:
        translations = [
            {'text': t.text, 'score': t.score, 'tokens': t.tokens} for t in best_results
        ]
        record = {'line': number + 1, 'source': line, 'translations': translations}
        return json.dumps(record, ensure_ascii=False)
    rows = []
    for translation in best_results:
        before = [str(number + 1)] if args.n_best is not None else []
        score = [f'{translation.score:.4f}'] if args.scores else []
        rows.append('\t'.join([*before, *score, translation.text]))
    return '\n'.join(rows)
