"""Shell completion of `vit-jax` by argcomplete, from the parsers of `--help`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import pathlib
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
KEYS = pathlib.Path(__file__).parents[1] / 'config' / 'keys.json'  # see _config_keys
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
        if argument.metavar in ('CONFIG', 'FILE[:ARG]'):
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
        keys = [key for key in override_flags(comp_words) if key.startswith(cword_prefix)]
        self._display_completions |= dict.fromkeys(keys, '')  # zsh would show None
        return keys


def override_flags(args: Sequence[str] = ()) -> list[str]:
    """List `--config.KEY=` for every key of the trainer, and of the model and task of a config.

    Args:
      args: Command line, which may name a recipe, and override the names of its model and task.
    """
    from vit_jax.config import run

    keys = list(_list_keys(run.Run))
    recipes = [tree for word in args if (tree := _parse_recipe(word.partition(':')[0]))]
    table = json.loads(KEYS.read_text())
    for section, by_name in table.items():
        flag = f'{OVERRIDE}{section}.name='
        names = [word.removeprefix(flag) for word in args if word.startswith(flag)][-1:]
        names = names or [n for tree in recipes for n in _find_names(tree, section) if n in by_name]
        keys += [f'{section}.{key}' for name in names for key in by_name.get(name, ())]
    return [f'{OVERRIDE}{key}=' for key in dict.fromkeys(keys)]


def _list_keys(section: Any) -> Iterator[str]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        key = field.metadata.get('key', field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            yield from (f'{key}.{inner}' for inner in _list_keys(hints[field.name]))
        elif key != 'options':  # keys that the section's model, task or optimizer declares
            yield key


def _parse_recipe(name: str) -> ast.Module | None:
    """Parse the file of a recipe, which may import JAX and so is not executed; None without one."""
    from vit_jax.config.recipes import experiment_file

    try:
        path = pathlib.Path(name)
        file = path if path.suffix == '.py' and path.is_file() else experiment_file(name)
        return None if file is None else ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return None


def _find_names(recipe: ast.Module, section: str) -> set[str]:
    """Find what may be the names of a recipe's model or task."""
    nodes = list(ast.walk(recipe))
    pairs = [(node.arg, node.value) for node in nodes if isinstance(node, ast.keyword)]
    for node in nodes:
        if isinstance(node, ast.Dict):
            keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
            pairs += zip(keys, node.values, strict=True)  # type: ignore[arg-type]
    constants = [c for key, value in pairs if key == 'name' for c in ast.walk(value)]
    names = {str(c.value) for c in constants if isinstance(c, ast.Constant)}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return names | {n.name for i in imports if i.module == f'vit_jax.{section}s' for n in i.names}


def complete_config(prefix: str, **_: Any) -> list[str]:
    """Complete the recipes of the package, files, and the arguments of either."""
    from vit_jax.config.recipes import FOLDER

    name, colon, text = prefix.partition(':')
    if colon and (recipe := _parse_recipe(name)):
        *earlier, last = text.split(',')
        before = prefix.removesuffix(last)
        return [f'{before}{w}' for w in _arguments(recipe, earlier, last) if w.startswith(last)]
    names = [file.relative_to(FOLDER).with_suffix('').as_posix() for file in FOLDER.glob('*/*.py')]
    return [n for n in sorted(names) if n.startswith(prefix)] + FilesCompleter()(prefix)


def _arguments(recipe: ast.Module, earlier: Sequence[str], last: str) -> list[str]:
    """List the arguments of a recipe or, after `NAME=`, its choices, without those given."""
    functions = [node for node in recipe.body if isinstance(node, ast.FunctionDef)]
    make = [f.args for f in functions if f.name in ('get_config', 'get_sweep')]
    completions = ['smoke'] if any(f.name in ('smoke', 'smoke_sweep') for f in functions) else []
    for number, argument in enumerate(make[0].args if make else ()):
        name, choices = argument.arg, _choices(recipe, argument)
        completions += choices if number == 0 and not earlier else []
        completions += (
            [f'{name}={c}' for c in choices] if last.startswith(f'{name}=') else [f'{name}=']
        )
    names = {word.partition('=')[0] for word in earlier}
    return [word for word in dict.fromkeys(completions) if word.partition('=')[0] not in names]


def _choices(recipe: ast.Module, argument: ast.arg) -> list[str]:
    """List the choices of an argument with an annotation `Literal[...]`, or its name."""
    node = argument.annotation
    if isinstance(node, ast.Name):
        values = {
            target.id: statement.value
            for statement in recipe.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        node = values.get(node.id, node)
    if not (isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith('Literal')):
        return []
    constants = (c for c in ast.walk(node.slice) if isinstance(c, ast.Constant))
    return [str(c.value) for c in constants]
