"""`python -m vit_jax COMMAND`: one line a command; only the one that runs is imported."""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys
from collections.abc import Sequence

from vit_jax.errors import UserError, nearest
from vit_jax.runtime import memory

COMMANDS = pathlib.Path(__file__).parent / 'commands'


def commands() -> dict[str, str]:
    """Every command and its line, read off the files without importing them."""
    files = sorted(p for p in COMMANDS.glob('*.py') if not p.stem.startswith('_'))
    return {
        p.stem: (ast.get_docstring(ast.parse(p.read_text())) or '').split('\n')[0] for p in files
    }


def usage() -> str:
    """The list of commands."""
    lines = [f'  {name:<12}{line}' for name, line in commands().items()]
    return '\n'.join(['usage: python -m vit_jax COMMAND [--help | flags]', '', *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 2 a user's mistake, 3 diverged, 75 preempted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ('-h', '--help'):
        print(usage())
        return 0
    name, *rest = words
    try:
        if name not in commands():
            raise UserError(nearest('command', name, commands()))
        if argv is None:
            memory.keep_freed_memory()
        return importlib.import_module(f'vit_jax.commands.{name}').main(rest)
    except UserError as e:
        print(f'error: {e}', file=sys.stderr)
        return getattr(e, 'exit_code', 2)


if __name__ == '__main__':
    sys.exit(main())
