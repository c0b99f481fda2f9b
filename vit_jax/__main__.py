"""`python -m vit_jax COMMAND`: one line a command; only the one that runs is imported."""

from __future__ import annotations

import os
import sys

# `python -m` puts the working directory first, where a file could stand in for any library.
if __name__ == '__main__' and not sys.flags.safe_path:
    try:
        if sys.path[:1] == [os.getcwd()]:
            sys.path.append(sys.path.pop(0))
    except FileNotFoundError:
        pass  # it was deleted, and is not there

import ast
import contextlib
import errno
import importlib
import pathlib
import traceback
from collections.abc import Iterator, Sequence

from vit_jax import __version__
from vit_jax.errors import EXIT_FAILED, Unfit, UserError, hide, nearest, staying
from vit_jax.runtime import console, environment, process

# Of JAX, Python's threads, the kernel, the dynamic linker and C++.
EXHAUSTED = (
    *('RESOURCE_EXHAUSTED', "can't start new thread", 'annot allocate memory'),
    *('failed to map segment', 'bad_alloc'),
)
# What computes little also works where an accelerator is missing, broken or busy.
ON_CPU = ('compare', 'convert', 'goodput', 'inspect', 'list', 'pack', 'report', 'vocab')
COMMANDS = pathlib.Path(__file__).parent / 'commands'


def commands() -> list[str]:
    """Every command."""
    return sorted(p.stem for p in COMMANDS.glob('*.py') if not p.stem.startswith('_'))


def described() -> dict[str, str]:
    """Every command and its line, read off the files without importing them."""
    texts = {name: (COMMANDS / f'{name}.py').read_text() for name in commands()}
    return {
        name: (ast.get_docstring(ast.parse(text)) or '').split('\n')[0]
        for name, text in texts.items()
    }


def usage() -> str:
    """The list of commands."""
    lines = [f'  {name:<12}{line}' for name, line in described().items()]
    shells = '--version, and --completion bash|zsh, which prints a script for the shell to read'
    return '\n'.join(
        ['usage: python -m vit_jax COMMAND [--help | flags]', '', *lines, '', f'also {shells}']
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Exit codes: 0 done, 1 failed, 2 a user's mistake, 3 diverged, 75 preempted, 130 interrupted.
    """
    if argv is None:
        process.record_start()
        console.prepare()
    words = list(sys.argv[1:] if argv is None else argv)
    with console.escaped():
        try:
            code = run(words, whole_process=argv is None)
            sys.stdout.flush()
            return code
        except console.ReaderLeft as e:
            return e.exit_code
        except UserError as e:
            print(f'error: {e}', file=sys.stderr)
            return getattr(e, 'exit_code', 2)
        except BaseException as e:
            if process.interrupted(e):
                return process.report_interrupt(e)
            if not (line := beyond(e)):
                raise
            print(f'error: {line}', file=sys.stderr)
            return EXIT_FAILED


def run(words: Sequence[str], whole_process: bool) -> int:
    """Runs the command that the words name, and returns its exit code.

    Args:
      words: the command line.
      whole_process: whether this process has nothing else to do.
    """
    if not words or words[0] in ('-h', '--help'):
        print(usage())
        return 0
    if words[0] != 'launch':  # which hands its command on as it is
        words = [hide(word) if len(word.split()) == 1 else word for word in words]
    name, *rest = words
    if name == '--version':
        print(f'vit_jax {__version__}')
        return 0
    if name == '--completion':
        from vit_jax.commands import _parser

        print(_parser.completion_script(' '.join(rest), described()), end='')
        return 0
    if whole_process:
        process.remember_interrupts()
    if name not in commands():
        raise UserError(nearest('command', name, commands()))
    if whole_process:
        environment.keep_freed_memory()
        if name in ON_CPU:
            os.environ['JAX_PLATFORMS'] = 'cpu'
        # For child Pythons; the data workers get the path of this one.
        os.environ['PYTHONSAFEPATH'] = '1'
    with readable_names(), staying():
        return importlib.import_module(f'vit_jax.commands.{name}').main(rest)


def beyond(error: BaseException) -> str:
    """A line for an error that means a limit of the machine or of Python; empty for any other.

    Readers name the file that causes one, see `storage.paths.intact`; these come from elsewhere.
    """
    said, kind = ' '.join(str(error).split())[:300], type(error).__name__
    if isinstance(error, MemoryError) or any(words in said for words in EXHAUSTED):
        return (
            f'memory is exhausted ({said or kind}): give it more, or let it do less at once, as by '
            'a smaller batch or fewer workers'
        )
    if isinstance(error, RecursionError | OverflowError) or kind == 'PanicException':
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f'{kind}: {said} ({pathlib.Path(place.filename).name}:{place.lineno}): a number or a '
            'nesting in a file, a config or a flag is beyond all that can be'
        )
    return ''


@contextlib.contextmanager
def readable_names() -> Iterator[None]:
    """Turn names that no system can open into an error of one line.

    Raises:
      UserError: for a name that is too long, a FIFO, or a working directory that is gone.
    """
    try:
        os.getcwd()
    except FileNotFoundError as e:
        raise UserError('the working directory was deleted: change to another one') from e
    try:
        yield
    except OSError as e:
        if isinstance(e, Unfit):
            raise UserError(f'{e.filename}: {e.strerror}') from e
        if e.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(f'{str(e.filename)[:60]}...: the name is too long; shorten it') from e


if __name__ == '__main__':
    code = main()
    process.exit_if_threads_hang(code)
    sys.exit(code)
