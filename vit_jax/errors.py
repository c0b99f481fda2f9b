"""Users' mistakes: their exception, exit codes, types of flags, names, and hiding of secrets."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import os
import pkgutil
import re
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # as in shells, for an end by SIGINT
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command, started again, continues
# Terminals obey these instead of showing them: control characters except tab and newline, and
# changes of the writing direction. Lone surrogates (in file names not in UTF-8) have no encoding.
_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')
HIDDEN = '***'
URLS = 'VIT_JAX_URLS'  # environment variable: URLs with their secrets, separated by spaces
_URL = re.compile(r'[A-Za-z][A-Za-z\d+.-]*://\S+')
# A database's password may hold a slash, and its user is shown; on the web either may be a secret.
_DATABASE = r'(?:postgres|mysql|mariadb|mssql|oracle|redis|mongo)[\w+.-]*://'
_LOGIN = re.compile(
    rf'(?P<public>{_DATABASE}[^\s/:@]*@)'
    rf'|(?P<user>{_DATABASE}[^\s/:@]*:)[^\s@]*@'
    r'|(?P<web>://)[^\s/?#]+@'
)
# Not secret: the path of a file, and the methods of authentication that libpq accepts.
_FIELD = re.compile(
    r"""([?&;#](?!passfile=|ssl_?key=|require_auth=)"""
    r"""[\w.%-]*(?:pass|pwd|token|secret|sig|credential|key|auth)[\w.%-]*=)[^&;#\s'"<>]+""",
    re.IGNORECASE,
)
_TOKEN = re.compile(r'\bhf_\w{20,}|(?<=Bearer )[^\s\'"]+')
_VARIABLES = (
    *('HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'WANDB_API_KEY', 'PGPASSWORD'),
    *('AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN'),
    *('MLFLOW_TRACKING_PASSWORD', 'MLFLOW_TRACKING_TOKEN'),
)


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2. The message is shown as by
    `one_line`, since names from files may hold control characters, and without secrets.
    """

    def __init__(self, message: str = '') -> None:
        super().__init__(one_line(without_secrets(message)))


class Unavailable(UserError):
    """What time may mend, such as a server that does not answer: launchers start again."""

    exit_code = EXIT_FAILED


class ExitByUserCode(UserError):
    """A call of `sys.exit` with any exit code, in code that a command calls."""

    exit_code = EXIT_FAILED

    @classmethod
    def from_exit(cls, error: SystemExit) -> ExitByUserCode:
        """Return the error for a caught `sys.exit()`; it names the file and line of the call."""
        *_, last = traceback.extract_tb(error.__traceback__)
        return cls(
            f'{last.filename}, line {last.lineno}: sys.exit({error.code!r}) was called before '
            'there was a result; code that a command calls must raise an exception instead'
        )


class CommandFinished(SystemExit):
    """End of a command that has printed its help; the only exit that is not an error."""


@contextlib.contextmanager
def forbid_exit() -> Iterator[None]:
    """Turn `sys.exit()` by the code inside into an error.

    A source, transform or evaluator that calls it could end a run with the code of a complete one.

    Raises:
      ExitByUserCode: names the file and line.
    """
    try:
        yield
    except CommandFinished:
        raise
    except SystemExit as error:
        raise ExitByUserCode.from_exit(error) from error


class UnsuitableFile(OSError):
    """A file that is not opened: a FIFO, a device, or too large for its kind."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and those that it was raised from, or while they were handled."""
    visited: list[BaseException] = []
    while error is not None and error not in visited:
        yield error
        visited.append(error)
        error = error.__cause__ or error.__context__


def nearest(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return the message for an unknown `name`: the closest of `choices`, then all of them."""
    valid = sorted(choices)
    close = _closest(name, valid)
    hint = f'; did you mean {close!r}?' if close else ''
    return f'unknown {kind} {name!r}{hint} ' + (
        f'(valid: {", ".join(valid)})' if valid else '(there is none)'
    )


def _closest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that a name may be meant for; empty if none is similar.

    Case and the dashes of flags do not count: `adamW` is `adamw`. A part of the name may be the
    choice: `random_flip` is `flip`.
    """
    plain = {choice.lstrip('-').casefold(): choice for choice in choices}
    requested = name.lstrip('-').casefold()
    similar = difflib.get_close_matches(requested, plain, n=1, cutoff=0.8)
    parts = [part for part in re.split('[-_]', requested) if part in plain]
    close = similar or parts[-1:] or difflib.get_close_matches(requested, plain, n=1, cutoff=0.5)
    return plain[close[0]] if close else ''


def whole_number(text: str, least: int = 0) -> int:
    """Parse a flag that takes a whole number; raises ArgumentTypeError for any other text."""
    if not re.fullmatch(r'-?\d+', text):
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number')
    if (number := int(text)) < least:
        raise argparse.ArgumentTypeError(f'must be at least {least}, not {number}')
    return number


def positive_number(text: str) -> int:
    """Parse a whole number of at least 1."""
    return whole_number(text, 1)


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
    """Raise UserError unless `value` of `field` is one of `choices`."""
    if value not in choices:
        raise UserError(nearest(field, value, choices))


def check_multiple(field: str, value: int, of: str, unit: int) -> None:
    """Raise UserError unless `value` of `field` is a multiple of `unit`, the value of `of`."""
    if value % unit:
        raise UserError(f'{field} {value} is not a multiple of {of} {unit}')


def resolve(package: str, name: str, attribute: str) -> Any:
    """Import the class that a config names.

    Args:
      package: The package of plain names, for example `vit_jax.models`.
      name: See `resolve_module`.
      attribute: The module's attribute, for example `Model`.

    Raises:
      UserError: if there is no such module, or it lacks the attribute.
    """
    kind = f'{package.rsplit(".", 1)[-1].rstrip("s")} name'
    module = resolve_module(package, name, kind)
    if not hasattr(module, attribute):
        raise UserError(f'{kind} {name!r}: module {module.__name__!r} has no {attribute!r}')
    return getattr(module, attribute)


def resolve_module(package: str, name: str, kind: str) -> types.ModuleType:
    """Import the module that a name refers to.

    Args:
      package: The package of plain names, for example `vit_jax.models`.
      name: A module of that package (`vit`), or the dotted path of a user's own module
        (`my_lab.models.foo`).
      kind: Kind of the name, for the message: 'model name'.

    Raises:
      UserError: if there is no such module.
    """
    path = name if '.' in name else f'{package}.{name}'
    if '.' not in name and name not in (names := modules(package)):
        raise UserError(nearest(kind, name, names))
    try:
        exists = importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        exists = False
    if not exists:
        raise UserError(f'{kind} {name!r}: no module {path!r} can be imported; check PYTHONPATH')
    return importlib.import_module(path)


def resolve_function(name: str, key: str) -> Callable[..., Any]:
    """Import a function of the user's by its dotted name, such as `my_lab.losses.focal`.

    Args:
      name: Dotted name.
      key: Config key that names it, for the message.

    Raises:
      UserError: if there is no such module, or it has no such function.
    """
    module_name, _, attribute = name.rpartition('.')
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f'{key}={name!r}: {error}; check PYTHONPATH') from error
    if not callable(function := getattr(module, attribute, None)):
        raise UserError(f'{key}={name!r}: {module_name} has no function {attribute!r}')
    return function


def modules(package: str) -> list[str]:
    """Return the public modules of a package in alphabetical order, without `base`."""
    paths = importlib.import_module(package).__path__
    names = [m.name for m in pkgutil.iter_modules(paths)]
    return sorted(n for n in names if n != 'base' and not n.startswith('_'))


def visible(text: str) -> str:
    r"""Escape control characters, so that a terminal shows and does not obey them.

    ESC becomes `\u001b`, as in JSON, so that JSON strings keep their value. Idempotent.
    """
    return _CONTROL.sub(lambda match: f'\\u{ord(match[0]):04x}', text)


def one_line(text: str) -> str:
    r"""Escape control characters, and write every newline as `\n`."""
    return visible(text).replace('\n', '\\n')


def without_secrets(text: str) -> str:
    """Replace credentials in URLs and of the environment by `***`.

    They are passwords, and values of query fields such as `token`, `X-Amz-Signature` and `sig`.
    Idempotent.
    """
    if '://' in text:
        text = _LOGIN.sub(_hide_login, text)
        text = _FIELD.sub(rf'\1{HIDDEN}', text)
    for name in _VARIABLES:
        if len(secret := os.environ.get(name, '').strip()) >= 8:
            text = text.replace(secret, HIDDEN)
    return _TOKEN.sub(HIDDEN, text)


def _hide_login(match: re.Match[str]) -> str:
    return match['public'] or f'{match["user"] or match["web"]}{HIDDEN}@'


def hide_secrets(value: Any) -> Any:
    """Copy strings, lists and dicts with the secrets of their URLs hidden.

    `with_secrets` gives the URLs back, in this process and those that it starts. Files and output
    hold only the hidden form.
    """
    if isinstance(value, dict):
        return {name: hide_secrets(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(hide_secrets, value))
    if not isinstance(value, str) or (match := _URL.search(value)) is None:
        return value
    if (hidden := without_secrets(value)) != value and HIDDEN not in match[0]:
        secret_urls = os.environ.get(URLS, '').split()
        os.environ[URLS] = ' '.join(dict.fromkeys([match[0], *secret_urls]))
    return hidden


def with_secrets(url: str) -> str:
    """Return a hidden URL, for example a stored one, with its secrets.

    Raises:
      UserError: if neither this process nor $VIT_JAX_URLS has them.
    """
    if HIDDEN not in url or '://' not in url:
        return url
    for secret_url in os.environ.get(URLS, '').split():
        hidden = without_secrets(secret_url)
        if hidden == url or hidden.startswith(f'{url}:'):  # a part of a file
            return secret_url.removesuffix(hidden.removeprefix(url))
    raise UserError(
        f'{url}: its credentials are not stored: give the URL in full again, or set {URLS} to it'
    )
