"""Shell completion of `vit-jax` by argcomplete, from the parsers of `--help`."""

from __future__ import annotations

import dataclasses
import importlib
import os
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import argcomplete
from argcomplete import lexers, shell_integration
from argcomplete.completers import FilesCompleter

from vit_jax.commands._parser import Parser, find_parser
from vit_jax.errors import check_choice

PROGRAM = 'vit-jax'
SHELLS = ('bash', 'zsh')
OVERRIDE = '--config.'
# zsh refuses `compdef` before its completion is set up.
ZSH_SETUP = '(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n'


def script(shell: str) -> str:
    """Generate the script that completes `vit-jax` in a shell; it does not start Python itself.

    Raises:
      UserError: The shell is not one of SHELLS.
    """
    check_choice('shell', shell, SHELLS)
    text = shell_integration.shellcode([PROGRAM], shell=shell)
    if shell == 'zsh':
        first, newline, body = text.partition('\n')
        text = f'{first}{newline}{ZSH_SETUP}{body}'
    return text


def complete(commands: Sequence[str]) -> None:
    """Print the completions of the line that the shell passes, and end the process."""
    line = os.environ['COMP_LINE'][: int(os.environ['COMP_POINT'])]
    args = lexers.split_line(line)[3][1:]
    command = args[0] if args and args[0] in commands else ''
    actions = list(_subcommands(command)) if command else []
    action = args[1] if args[1:] and args[1] in actions else ''
    depth = bool(command) + bool(action)
    os.environ['_ARGCOMPLETE'] = str(1 + depth)  # number of words before the flags
    if not command:
        parser = _choice_parser('command', commands, ('--version', '--completion'))
    elif actions and not action:
        parser = _choice_parser('action', actions)
    else:
        parser = find_parser(command, action)
    for argument in parser.shown_actions():
        if argument.metavar == 'CONFIG':
            argument.completer = complete_config  # type: ignore[attr-defined]
    Finder()(parser)


def _subcommands(command: str) -> Sequence[str]:
    return tuple(getattr(importlib.import_module(f'vit_jax.commands.{command}'), 'ACTIONS', ()))


def _choice_parser(name: str, values: Sequence[str], flags: Sequence[str] = ()) -> Parser:
    """Make a parser of one word."""
    parser = Parser('', None)
    parser.add_argument(name, choices=values)
    for flag in flags:
        parser.add_argument(flag, action='store_true')
    return parser


class Finder(argcomplete.CompletionFinder):
    """Finder that also completes the keys of a config, which are not flags of a parser."""

    def _get_completions(
        self, comp_words: list[str], cword_prefix: str, cword_prequote: str, last: Any
    ) -> list[str]:
        if not cword_prefix.startswith(OVERRIDE) or '=' in cword_prefix:
            return super()._get_completions(comp_words, cword_prefix, cword_prequote, last)
        return [key for key in override_flags() if key.startswith(cword_prefix)]


def override_flags() -> list[str]:
    """List `--config.KEY=` for every key of `config.run`, without keys of models and tasks."""
    from vit_jax.config import run

    return [f'{OVERRIDE}{key}=' for key in _list_keys(run.Run)]


def _list_keys(section: Any) -> Iterator[str]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from (f'{field.name}.{key}' for key in _list_keys(hints[field.name]))
        else:
            yield field.name


def complete_config(prefix: str, **_: Any) -> list[str]:
    """Complete the recipes of the package, and files."""
    from vit_jax.config.recipes import FOLDER

    names = [file.relative_to(FOLDER).with_suffix('').as_posix() for file in FOLDER.glob('*/*.py')]
    return [n for n in sorted(names) if n.startswith(prefix)] + FilesCompleter()(prefix)
