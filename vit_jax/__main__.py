"""`python -m vit_jax COMMAND`: run a command, importing only its module."""

from __future__ import annotations

import os
import sys

# `python -m` puts the working directory first, where a file could shadow any library.
if __name__ == '__main__' and not sys.flags.safe_path:
    try:
        if sys.path[:1] == [os.getcwd()]:
            sys.path.append(sys.path.pop(0))
    except FileNotFoundError:
        pass  # the working directory was deleted

import ast
import contextlib
import errno
import importlib
import pathlib
import traceback
from collections.abc import Iterator, Sequence

from vit_jax import __version__
from vit_jax.errors import (
    EXIT_FAILED,
    UnsuitableFile,
    UserError,
    forbid_exit,
    hide_secrets,
    nearest,
)
from vit_jax.runtime import console, environment, memory, process

# Commands that compute little also run if an accelerator is missing, broken or busy.
ON_CPU = ('compare', 'convert', 'goodput', 'inspect', 'list', 'pack', 'report', 'vocab')
COMMANDS = pathlib.Path(__file__).parent / 'commands'


def commands() -> list[str]:
    """List the names of all commands, sorted."""
    return sorted(p.stem for p in COMMANDS.glob('*.py') if not p.stem.startswith('_'))


def command_lines() -> dict[str, str]:
    """Read the first line of each command's docstring without importing its module."""
    texts = {name: (COMMANDS / f'{name}.py').read_text() for name in commands()}
    return {
        name: (ast.get_docstring(ast.parse(text)) or '').split('\n')[0]
        for name, text in texts.items()
    }


def usage() -> str:
    """Write the help text: usage and commands."""
    lines = [f'  {name:<12}{line}' for name, line in command_lines().items()]
    shells = '--version, and --completion bash|zsh, which prints a script for the shell to read'
    return '\n'.join(
        ['usage: python -m vit_jax COMMAND [--help | flags]', '', *lines, '', f'also {shells}']
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Exit codes: 0 done, 1 failed, 2 a user's mistake, 3 diverged, 75 preempted, 130 interrupted.
    """
    if argv is None and '_ARGCOMPLETE' in os.environ:
        from vit_jax.commands import _completion

        _completion.complete(commands())
    if argv is None:
        process.record_start()
        console.prepare()
    args = list(sys.argv[1:] if argv is None else argv)
    with console.escape_output():
        try:
            code = run(args, whole_process=argv is None)
            sys.stdout.flush()
            return code
        except console.ReaderLeft as e:
            return e.exit_code
        except UserError as e:
            print(f'error: {e}', file=sys.stderr)
            return getattr(e, 'exit_code', 2)
        except BaseException as e:
            if process.was_interrupted(e):
                return process.report_interrupt(e)
            if not (line := limit_error(e)):
                raise
            print(f'error: {line}', file=sys.stderr)
            return EXIT_FAILED


def run(args: Sequence[str], whole_process: bool) -> int:
    """Run the command of a command line and return its exit code.

    Args:
      args: Command line.
      whole_process: Whether this process does nothing else.

    Raises:
      UserError: The command is unknown.
    """
    if not args or args[0] in ('-h', '--help'):
        print(usage())
        return 0
    if args[0] != 'launch':  # it passes its command on unchanged
        args = [hide_secrets(word) if len(word.split()) == 1 else word for word in args]
    name, *flags = args
    if name == '--version':
        print(f'vit_jax {__version__}')
        return 0
    if name == '--completion':
        from vit_jax.commands import _completion

        print(_completion.script(' '.join(flags)), end='')
        return 0
    if whole_process:
        process.remember_interrupts()
    if name not in commands():
        raise UserError(nearest('command', name, commands()))
    if whole_process:
        environment.keep_freed_memory()
        if name in ON_CPU:
            os.environ['JAX_PLATFORMS'] = 'cpu'
        # For child Pythons; data workers inherit the path of this one.
        os.environ['PYTHONSAFEPATH'] = '1'
    with readable_names(), forbid_exit():
        return importlib.import_module(f'vit_jax.commands.{name}').main(flags)


def limit_error(error: BaseException) -> str:
    """Describe an error at a limit of the machine or of Python in a line; empty for other errors.

    Errors of reading files name the file, see `storage.paths.intact`; these have other origins.
    """
    text, kind = ' '.join(str(error).split())[:300], type(error).__name__
    if memory.is_exhausted(error) or any(pattern in text for pattern in memory.EXHAUSTED):
        return (
            f'memory is exhausted ({memory.sizes(str(error)) or text or kind}): provide more '
            'memory, or use less, for example by a smaller batch or fewer workers'
        )
    if isinstance(error, RecursionError | OverflowError) or kind == 'PanicException':
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f'{kind}: {text} ({pathlib.Path(frame.filename).name}:{frame.lineno}): a number in a '
            'file, a config or a flag is too large, or its nesting too deep'
        )
    return ''


@contextlib.contextmanager
def readable_names() -> Iterator[None]:
    """Turn errors of names that cannot be opened into one line.

    Raises:
      UserError: A name is too long or names a FIFO, or the working directory was deleted.
    """
    try:
        os.getcwd()
    except FileNotFoundError as e:
        raise UserError('the working directory was deleted: change to another one') from e
    try:
        yield
    except OSError as e:
        if isinstance(e, UnsuitableFile):
            raise UserError(f'{e.filename}: {e.strerror}') from e
        if e.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(f'{str(e.filename)[:60]}...: the name is too long; shorten it') from e


if __name__ == '__main__':
    code = main()
    process.exit_if_threads_hang(code)
    sys.exit(code)
