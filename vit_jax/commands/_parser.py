"""Parsers of flags, whose errors are one line."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from vit_jax.errors import Finished, UserError, check_choice, nearest, one_line, positive

FIT = 'fit'


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises UserError instead of printing its usage and exiting.

    Args:
      command: its name, after `vit_jax`.
      description: shown by `--help`.
    """

    def __init__(self, command: str, description: str | None):
        super().__init__(prog=f'vit_jax {command}', description=description, allow_abbrev=False)

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        self._require_flags(args)
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f'unexpected {unknown[0]!r}')
        for module in dict.fromkeys(getattr(parsed, 'allow', ())):
            print(f'--allow {module}: a stored config may name code of it', file=sys.stderr)
        return parsed

    def _require_flags(self, args: Sequence[str]) -> None:
        """Name an unknown flag before what is missing, for it may be that, misspelled."""
        # argparse has no public list of the flags.
        valid = [flag for flag in self._option_string_actions if flag.startswith('--')]
        for word in itertools.takewhile(lambda word: word != '--', args):
            flag = word.partition('=')[0]
            if flag.startswith('--') and ' ' not in flag and flag not in valid:
                self.error(nearest('flag', flag, valid))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise Finished(status)

    def error(self, message: str) -> NoReturn:
        raise UserError(f'{self.prog}: {message} (see {self.prog} --help)')


def add_allow_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--allow`, which may be repeated, to a command that reads stored configs."""
    parser.add_argument(
        '--allow',
        action='append',
        type=module_name,
        default=[],
        metavar='MODULE',
        help='code of your own that a stored config may name, as my_lab; may be repeated',
    )


def module_name(text: str) -> str:
    """The text if it is the dotted name of a module; raises UserError if not."""
    if not re.fullmatch(r'[^\W\d]\w*(\.[^\W\d]\w*)*', text):
        raise UserError(f'--allow {text!r}: write the name of a module, as my_lab or my_lab.models')
    return text


def batch_size(text: str) -> int | str:
    """A number of examples, or FIT; raises ArgumentTypeError for anything else."""
    if text == FIT:
        return text
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'{error}; {FIT} is the largest that fits') from None


def check_output(path: str | os.PathLike[str], flag: str) -> None:
    """Raise UserError that names the flag if the file it gives could not be written.

    Called before the work, so that nothing is computed in vain.
    """
    from vit_jax.storage import paths, run_folder

    place = paths.path(path)
    reason = 'it is a folder' if place.is_dir() else run_folder.reserved(place)
    reason = reason or paths.obstacle(place.parent)
    if reason:
        raise UserError(f'{flag} {str(path)!r} cannot be written: {reason}')


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], flag: str) -> Iterator[None]:
    """Make the folder of a file; raise UserError that names its flag if it cannot be written."""
    from vit_jax.storage import paths, run_folder

    if reason := run_folder.reserved(path):
        raise UserError(f'{flag} {str(path)!r} cannot be written: {reason}')
    try:
        paths.make_folder(paths.path(path).parent)
        yield
    except OSError as e:
        raise UserError(f'{flag} {str(path)!r} cannot be written: {e.strerror}') from e


def overview(
    command: str, description: str | None, usage: str, parsers: Iterable[Parser]
) -> Parser:
    """A parser whose `--help` shows the usage of a command, and of its actions by their parsers."""
    shown = Parser(command, description)
    shown.usage = f'vit_jax {command} {usage}'
    shown.formatter_class = argparse.RawDescriptionHelpFormatter
    shown.epilog = ''.join(parser.format_usage() for parser in parsers)
    return shown


def align(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines with columns as wide as their widest cell, the first `left` of them flush left."""
    lines = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return '\n'.join('  '.join(line).rstrip() for line in padded)


BASH = """\
_vit_jax() {
  local cur="${COMP_WORDS[COMP_CWORD]}" i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    [ "${COMP_WORDS[i]}" = vit_jax ] && break
  done
  [ "$i" -lt "$COMP_CWORD" ] || return 0
  local command='' action=''
  [ $((i + 1)) -lt "$COMP_CWORD" ] && command="${COMP_WORDS[i + 1]}"
  [ $((i + 2)) -lt "$COMP_CWORD" ] && action="${COMP_WORDS[i + 2]}"
  COMPREPLY=($(compgen -W "$(_vit_jax_words "$command" "$action")" -- "$cur"))
}
complete -o default -o bashdefault -F _vit_jax python python3
"""
ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_vit_jax() {
  local i=${words[(i)vit_jax]} command='' action=''
  if (( i >= CURRENT )); then
    if (( $+functions[_python] )); then _python; else _files; fi
    return
  fi
  (( i + 1 < CURRENT )) && command=${words[i + 1]}
  (( i + 2 < CURRENT )) && action=${words[i + 2]}
  compadd -- ${=$(_vit_jax_words "$command" "$action")}
  _files
}
compdef _vit_jax python python3
"""
SHELLS = {'bash': BASH, 'zsh': ZSH}


def script(shell: str, commands: Iterable[str]) -> str:
    """The script with which a shell of SHELLS completes `python -m vit_jax ...`.

    Raises:
      UserError: for another shell.
    """
    check_choice('shell', shell, SHELLS)
    names, cases = sorted(commands), []
    for command in names:
        module = importlib.import_module(f'vit_jax.commands.{command}')
        actions = list(getattr(module, 'ACTIONS', ()))
        for action in actions:
            cases.append((f'{command}/{action}', flags(command, action)))
        cases.append((f'{command}/*', actions or flags(command)))
    cases.append(('*', [*names, '--help', '--version', '--completion']))
    lines = [f"    {place}) echo '{' '.join(w)}' ;;" for place, w in cases]
    function = ['_vit_jax_words() {', '  case "$1/$2" in', *lines, '  esac', '}', '']
    return '\n'.join(function) + SHELLS[shell]


def flags(*words: str) -> list[str]:
    """The flags in the `--help` of a command, or of one of its actions."""
    command, *rest = words
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        importlib.import_module(f'vit_jax.commands.{command}').main([*rest, '--help'])
    found = re.findall(r'^ +(?:-\w, )?(--[a-z][a-z-]*)', shown.getvalue(), re.MULTILINE)
    return list(dict.fromkeys(found))
