"""Shared parts of commands: parsers with one-line errors, output files and tables."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from vit_jax.errors import (
    CommandFinished,
    UserError,
    nearest,
    positive_number,
)

FIT = 'fit'
STDOUT = '-'  # value of `--json` without a file
# Help texts that several commands share.
RUNS_HELP = 'run folders, finished or not, or folders of them'
PICTURE_HELP = 'picture to write: PNG, SVG or PDF (default: %(default)s)'
STORAGE_HELP = 'storage: sqlite:///FILE, journal:FILE or an SQL server (default: in the folder)'
DEVICE_HELP = 'device kind, by its JAX name (default: %(default)s)'
MFU_HELP = 'model FLOPs utilization, a share of the peak (default: %(default)s)'

# {former name: flag}; former names still work.
RENAMED = {'--output': '--out'}


def program() -> str:
    """Name the program as it was called."""
    name = pathlib.Path(sys.argv[0]).name
    return 'vit-jax' if name.startswith('vit-jax') else 'python -m vit_jax'


class HelpShown(CommandFinished):
    """Exception after `--help` was shown.

    Attributes:
      parser: Parser of the command.
    """

    def __init__(self, parser: Parser):
        super().__init__(0)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises UserError instead of printing its usage and exiting.

    Args:
      command: Words after `vit_jax`.
      description: Text shown by `--help`.
    """

    def __init__(self, command: str, description: str | None):
        super().__init__(prog=f'{program()} {command}', description=description, allow_abbrev=False)
        self.command = command

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        args = self._current_names(args)
        self._require_flags(args)
        # Intermixed: flags may come between a subject and the arguments that follow it.
        parsed, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            self.error(f'unexpected {unknown[0]!r}')
        for module in dict.fromkeys(getattr(parsed, 'allow', ())):
            print(f'--allow {module}: stored configs may name its code', file=sys.stderr)
        return parsed

    def _current_names(self, args: Sequence[str]) -> list[str]:
        """Replace former names of flags in the command line by current ones."""
        renamed, end = list(args), args.index('--') if '--' in args else len(args)
        for i, word in enumerate(renamed[:end]):
            flag, equals, value = word.partition('=')
            new = RENAMED.get(flag, flag)
            if flag not in self._option_string_actions and new in self._option_string_actions:
                renamed[i] = f'{new}{equals}{value}'
        return renamed

    def _require_flags(self, args: Sequence[str]) -> None:
        """Report an unknown flag before a missing one: it may be the missing flag, misspelled."""
        # argparse does not have a public list of flags.
        valid = [flag for flag in self._option_string_actions if flag.startswith('--')]
        before_end = list(itertools.takewhile(lambda word: word != '--', args))
        for word, following in zip(before_end, [*before_end[1:], ''], strict=False):
            flag, equals, value = word.partition('=')
            if flag.startswith('--') and ' ' not in flag and flag not in valid:
                value = value if equals else following
                self.error(_suggest_config_key(flag, value, valid) or nearest('flag', flag, valid))

    def shown_actions(self) -> list[argparse.Action]:
        """List the arguments that `--help` shows, except itself."""
        # argparse does not have a public list of arguments or of their texts.
        return [a for a in self._actions if a.help != argparse.SUPPRESS and a.dest != 'help']

    def flags(self) -> Iterator[tuple[str, str]]:
        """Yield the notation and the help text of each argument, positional ones first."""
        help_formatter = self._get_formatter()
        for action in sorted(self.shown_actions(), key=lambda a: bool(a.option_strings)):
            text = ' '.join(help_formatter._expand_help(action).split())
            yield help_formatter._format_action_invocation(action).removesuffix(' []'), text

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown(self)

    def error(self, message: str) -> NoReturn:
        raise UserError(f'{self.command}: {message} (see {self.prog} --help)')


def _suggest_config_key(flag: str, value: str, valid: Sequence[str]) -> str:
    """Suggest a key for a flag that other trainers have; empty if unknown or without `--config`."""
    from vit_jax.config.words import find_hint

    hint = find_hint(flag, value) if '--config' in valid else ''
    return f'unknown flag {flag!r}; did you mean {hint}?' if hint else ''


def has_flag(argv: Sequence[str], flags: Sequence[str]) -> bool:
    """Return whether a command line has one of the flags."""
    before_end = itertools.takewhile(lambda word: word != '--', argv)
    return any(word.partition('=')[0] in flags for word in before_end)


def add_subject(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    name: str,
    flags: Sequence[str],
    **options: Any,
) -> None:
    """Add a positional argument, unless the command line has a flag that replaces it.

    Args:
      parser: Parser to extend.
      argv: Command line.
      name: Attribute; None if one of the flags is given.
      flags: Flags that replace the argument.
      options: Keywords of `add_argument`.
    """
    if has_flag(argv, flags):
        parser.set_defaults(**{name: None})
    else:
        parser.add_argument(name, **options)


def add_json_flag(
    parser: argparse.ArgumentParser, more: str = '', former_file: bool = False
) -> None:
    """Add `--json`.

    Args:
      parser: Parser to extend.
      more: End of the help text.
      former_file: Whether the flag used to take a file, which `write_json` still writes.
    """
    text = f'print JSON instead of text{more}'
    if former_file:
        parser.add_argument('--json', nargs='?', const=STDOUT, metavar='', help=text)
    else:
        parser.add_argument('--json', action='store_true', help=text)


def add_square_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--image-size` to a command that reads a config."""
    parser.add_argument(
        '--image-size',
        type=positive_number,
        metavar='PIXELS',
        help="side of square images that replace the config's data",
    )


def write_json(record: Any, target: str | None) -> bool:
    """Print JSON for `--json`, or write it to the file of the former `--json FILE`.

    Args:
      record: JSON values.
      target: Value of the flag.

    Returns:
      Whether JSON was printed instead of a table.

    Raises:
      UserError: The file cannot be written.
    """
    text = json.dumps(record, indent=2, allow_nan=False) + '\n'
    if target == STDOUT:
        print(text, end='')
    elif target:
        write_file(target, text, '--json')
        print('--json FILE will be removed: write --json > FILE', file=sys.stderr)
    return target == STDOUT


def add_allow_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--allow` to a command that reads stored configs."""
    parser.add_argument(
        '--allow',
        action='append',
        type=module_name,
        default=[],
        metavar='MODULE',
        help='your package, such as my_lab, that stored configs may name; may be repeated',
    )


def module_name(text: str) -> str:
    """Return the text; raise UserError if it is not the dotted name of a module."""
    if not re.fullmatch(r'[^\W\d]\w*(\.[^\W\d]\w*)*', text):
        raise UserError(
            f'--allow {text!r}: write the name of a module, such as my_lab or my_lab.models'
        )
    return text


def batch_size_or_fit(text: str) -> int | str:
    """Return a number of examples, or FIT; raise ArgumentTypeError for anything else."""
    if text == FIT:
        return text
    try:
        return positive_number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'{error}; {FIT} is the largest that fits') from None


def overview(
    command: str, description: str | None, usage: str, parsers: Iterable[Parser]
) -> Parser:
    """Make a parser whose `--help` shows the usage of a command and of each of its actions.

    Args:
      command, description: See `Parser`.
      usage: Words after the command's name.
      parsers: Parsers of the actions.
    """
    parser = Parser(command, description)
    parser.usage = f'{parser.prog} {usage}'
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = ''.join(action.format_usage() for action in parsers)
    return parser


def check_output(
    path: str | os.PathLike[str], flag: str, inputs: Iterable[str | None] = ()
) -> None:
    """Raise UserError, which names the flag, if its file cannot be written, or is an input.

    Commands call it before they compute anything.

    Args:
      path: File to write.
      flag: Flag that names it.
      inputs: Arguments that name what the command reads: files, folders of images, sources such
        as 'table:FILE'; others are ignored.
    """
    from vit_jax.storage import paths, run_folder

    file = paths.path(path)
    reason = 'it is a folder' if file.is_dir() else run_folder.reason_reserved(file)
    if isinstance(file, pathlib.Path) and file.exists() and any(_reads(w, file) for w in inputs):
        reason = reason or 'the command reads it: choose another name'
    if reason := reason or paths.obstacle(file.parent):
        raise UserError(f'{flag} {str(path)!r} cannot be written: {reason}')


def _reads(word: str | None, file: pathlib.Path) -> bool:
    """Return whether an argument names a file, or a folder of images that contains it."""
    from vit_jax.data.sources.table import is_image

    names = {word, word.partition(':')[2]} - {''} if word else set()
    for path in map(os.path.expanduser, names):
        with contextlib.suppress(OSError, ValueError):  # the word is not a path
            if os.path.samefile(path, file):
                return True
            if is_image(file.name) and pathlib.Path(path).resolve() in file.resolve().parents:
                return True
    return False


def check_picture(path: str | pathlib.Path, flag: str, inputs: Iterable[str | None] = ()) -> None:
    """Raise UserError, which names the flag, for an unsupported format or an unwritable file.

    See `check_output` for the arguments.
    """
    from vit_jax.viz import figures

    figures.check_format(path, flag)
    check_output(path, flag, inputs)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], flag: str) -> Iterator[None]:
    """Make the folder of a file, and turn errors of writing into UserErrors that name its flag."""
    from vit_jax.storage import paths, run_folder

    if reason := run_folder.reason_reserved(path):
        raise UserError(f'{flag} {str(path)!r} cannot be written: {reason}')
    try:
        paths.make_folder(paths.path(path).parent)
        yield
    except OSError as e:
        raise UserError(f'{flag} {str(path)!r} cannot be written: {e.strerror}') from e


def write_file(path: str | pathlib.Path, text: str, flag: str) -> None:
    """Write a file and make its folder; raise UserError if that fails."""
    from vit_jax.storage.paths import write_text_atomic

    path = pathlib.Path(path)
    with writing(path, flag):
        write_text_atomic(path, text)


def save_figure(figure: Any, path: str | pathlib.Path, flag: str) -> Any:
    """Write a figure and return its path; raise UserError, which names the flag, if that fails."""
    from vit_jax.viz import figures

    with writing(path, flag):
        return figures.save(figure, path)


def is_folder(out: str) -> bool:
    """Return whether `--out` names a folder of images instead of one picture."""
    from vit_jax.storage import paths

    path = paths.path(out)
    return path.is_dir() or not path.suffix


def image_names(files: Sequence[str | pathlib.Path], samples: int | None = None) -> list[str]:
    """Return NAME.png for each file, or NAME_0.png, NAME_1.png, ... for its samples.

    Files with the same NAME keep their folders below the common folder, such as `a/NAME.png` and
    `b/NAME.png`; if this does not distinguish them, also their suffixes.
    """
    paths = [pathlib.Path(os.path.abspath(file)) for file in files]
    names = [path.stem for path in paths]
    if len(set(names)) < len(set(paths)):
        shared = os.path.commonpath([path.parent for path in paths])
        below = [path.relative_to(shared) for path in paths]
        names = [str(path.with_suffix('')) for path in below]
        if len(set(names)) < len(set(paths)):
            names = [str(path) for path in below]
    endings = [''] if samples is None else [f'_{i}' for i in range(samples)]
    return [f'{name}{ending}.png' for name in names for ending in endings]


def check_image_names(
    names: Sequence[str], files: Sequence[str | pathlib.Path], folder: str, flag: str
) -> None:
    """Raise UserError if `save_images` would overwrite an input file or one of its images."""
    inputs, outputs = {pathlib.Path(file).resolve() for file in files}, set()
    for name in names:
        path = (pathlib.Path(folder) / name).resolve()
        if path in inputs:
            raise UserError(
                f'{flag} {folder!r}: {name} would overwrite an input file: choose another folder'
            )
        if path in outputs:
            raise UserError(
                f'{flag} {folder!r}: {name} is the picture of two inputs: give each file once'
            )
        outputs.add(path)


def save_images(images: Iterable[Any], names: Sequence[str], folder: str, flag: str) -> Any:
    """Write images and return their folder.

    Args:
      images: Images uint8 [Y X 3]; a generator is consumed one image at a time.
      names: See `image_names`.
      folder: Folder, created if missing.
      flag: Flag that named the folder.

    Raises:
      UserError: An image cannot be written.
    """
    from PIL import Image

    from vit_jax.storage import paths

    target = paths.path(folder)
    with writing(folder, flag):
        for image, name in zip(images, names, strict=True):
            encoded = io.BytesIO()
            Image.fromarray(image).save(encoded, format='png')
            paths.make_folder((target / name).parent)
            paths.write_atomic(target / name, encoded.getvalue())
    return target


def align(lines: Sequence[Sequence[str]], left: int, last_left: bool = False) -> str:
    """Format a table; columns are as wide as their widest cells.

    Args:
      lines: Cells of each line.
      left: Number of columns that are flush left.
      last_left: Whether the last column is, too.
    """
    from vit_jax.runtime.console import Console, Table

    table = Table(*lines[0], left=left)
    if last_left:
        table.columns[-1].justify = 'left'
    for line in lines[1:]:
        table.add_row(*line)
    output = io.StringIO()
    Console(file=output, soft_wrap=True, color_system=None).print(table)
    return '\n'.join(line.rstrip() for line in output.getvalue().splitlines())


def find_parser(command: str, action: str = '') -> Parser:
    """Find the parser of a command, or of one of its actions, without a subject."""
    args = [action] * bool(action) + ['--help']
    module = importlib.import_module(f'vit_jax.commands.{command}')
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module.main(args)
    except HelpShown as e:
        return e.parser
    raise AssertionError(f'{command} {action} --help returned')
