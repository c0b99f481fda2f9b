"""The exception for a user's mistake, exit codes, resolving and printing of names, secrets."""

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
from collections.abc import Iterable, Iterator
from typing import Any

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # as shells call the end by SIGINT
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command, started again, continues
# Terminals obey these instead of showing them: control characters except tab and newline, and
# changes of the writing direction. Lone surrogates (file names that are no UTF-8) have no encoding.
_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')
HIDDEN = '***'
URLS = 'VIT_JAX_URLS'  # of the environment: URLs in full, separated by spaces
_URL = re.compile(r'[A-Za-z][A-Za-z\d+.-]*://\S+')
# A database's password may hold a slash, and its user is shown; on the web either may be a secret.
_LOGIN = re.compile(
    r'(?P<user>(?:postgres|mysql|mariadb|mssql|oracle|redis|mongo)[\w+.-]*://[^\s/:@]*:)[^\s@]*@'
    r'|(?P<web>://)[^\s/?#]+@'
)
_FIELD = re.compile(
    r"""([?&;#][\w.%-]*(?:pass|pwd|token|secret|sig|credential|key|auth)[\w.%-]*=)[^&;#\s'"<>]+""",
    re.IGNORECASE,
)
_TOKEN = re.compile(r'\bhf_\w{20,}|(?<=Bearer )[^\s\'"]+')
_VARIABLES = (
    *('HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'WANDB_API_KEY', 'PGPASSWORD'),
    *('AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN'),
    *('MLFLOW_TRACKING_PASSWORD', 'MLFLOW_TRACKING_TOKEN'),
)


class UserError(Exception):
    """A user's mistake: one line that says what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2. Names from files are shown
    as by `one_line`, since they may hold whatever a terminal obeys, and without their secrets.
    """

    def __init__(self, message: str = '') -> None:
        super().__init__(one_line(without_secrets(message)))


class Left(UserError):
    """A call of `sys.exit` with any exit code, in code that a command calls."""

    exit_code = EXIT_FAILED

    @classmethod
    def from_exit(cls, error: SystemExit) -> Left:
        """The error for a caught `sys.exit()`; it names the file and line of the call."""
        *_, last = traceback.extract_tb(error.__traceback__)
        return cls(
            f'{last.filename}, line {last.lineno}: sys.exit({error.code!r}) was called before '
            'there was a result; code that a command calls has to raise an exception instead'
        )


class Finished(SystemExit):
    """The end of a command that has printed its help; the only exit that is not an error."""


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Turn `sys.exit()` by the code inside into an error.

    A source, transform or evaluator that calls it would end a run with the code of a complete one.

    Raises:
      Left: names the file and line.
    """
    try:
        yield
    except Finished:
        raise
    except SystemExit as error:
        raise Left.from_exit(error) from error


class Unfit(OSError):
    """A file that is not opened: a FIFO or a device, or one that is larger than any of its kind."""


def nearest(what: str, name: str, choices: Iterable[str]) -> str:
    """The message for an unknown `name`: the closest of `choices` first, then all of them."""
    valid = sorted(choices)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f'; did you mean {close[0]!r}?' if close else ''
    return f'unknown {what} {name!r}{hint} ' + (
        f'(valid: {", ".join(valid)})' if valid else '(there is none)'
    )


def count(text: str, least: int = 0) -> int:
    """The type of a flag that takes a whole number; raises ArgumentTypeError for any other text."""
    if not re.fullmatch(r'-?\d+', text):
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number')
    if (number := int(text)) < least:
        raise argparse.ArgumentTypeError(f'must be at least {least}, not {number}')
    return number


def positive(text: str) -> int:
    """As `count`, from 1 on."""
    return count(text, 1)


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
    """Raises UserError unless `value` of `field` is one of `choices`."""
    if value not in choices:
        raise UserError(nearest(field, value, choices))


def check_multiple(field: str, value: int, of: str, unit: int) -> None:
    """Raises UserError unless `value` of `field` is a multiple of `unit`, which `of` gives."""
    if value % unit:
        raise UserError(f'{field} {value} is not a multiple of {of} {unit}')


def resolve(package: str, name: str, attribute: str) -> Any:
    """The class that a config names.

    Args:
      package: the package of plain names, for example `vit_jax.models`.
      name: see `resolve_module`.
      attribute: the module's attribute, for example `Model`.

    Raises:
      UserError: if there is no such module, or it lacks the attribute.
    """
    kind = f'{package.rsplit(".", 1)[-1].rstrip("s")} name'
    module = resolve_module(package, name, kind)
    if not hasattr(module, attribute):
        raise UserError(f'{kind} {name!r}: module {module.__name__!r} has no {attribute!r}')
    return getattr(module, attribute)


def resolve_module(package: str, name: str, kind: str) -> types.ModuleType:
    """The module that a name stands for.

    Args:
      package: the package of plain names, for example `vit_jax.models`.
      name: a module of that package (`vit`), or a dotted module path of the
        user's own (`my_lab.models.foo`).
      kind: of the name, for the message: 'model name'.

    Raises:
      UserError: if there is no such module.
    """
    path = name if '.' in name else f'{package}.{name}'
    if '.' not in name and name not in (known := modules(package)):
        raise UserError(nearest(kind, name, known))
    try:
        found = importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise UserError(f'{kind} {name!r}: no module {path!r} can be imported; check PYTHONPATH')
    return importlib.import_module(path)


def modules(package: str) -> list[str]:
    """The public modules of a package in alphabetical order, without `base`."""
    paths = importlib.import_module(package).__path__
    names = [m.name for m in pkgutil.iter_modules(paths)]
    return sorted(n for n in names if n != 'base' and not n.startswith('_'))


def visible(text: str) -> str:
    r"""Text with its control characters escaped, so that a terminal shows and does not obey them.

    ESC becomes `\u001b`, as in JSON, so that JSON strings keep their value. Idempotent.
    """
    return _CONTROL.sub(lambda match: f'\\u{ord(match[0]):04x}', text)


def one_line(text: str) -> str:
    r"""Visible text with every newline written as `\n`."""
    return visible(text).replace('\n', '\\n')


def without_secrets(text: str) -> str:
    """Text with `***` for the credentials in its URLs, and for those of the environment.

    They are passwords, and values of fields of a query such as `token`, `X-Amz-Signature` and
    `sig`. Idempotent.
    """
    if '://' in text:
        text = _LOGIN.sub(lambda match: f'{match["user"] or match["web"]}{HIDDEN}@', text)
        text = _FIELD.sub(rf'\1{HIDDEN}', text)
    for name in _VARIABLES:
        if len(secret := os.environ.get(name, '').strip()) >= 8:
            text = text.replace(secret, HIDDEN)
    return _TOKEN.sub(HIDDEN, text)


def hide(value: Any) -> Any:
    """A copy of strings, lists and dicts in which URLs are without their secrets.

    `in_full` gives the URLs back, in this process and those that it starts. What is stored and
    printed has them only as they are here.
    """
    if isinstance(value, dict):
        return {name: hide(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(hide, value))
    if not isinstance(value, str) or (match := _URL.search(value)) is None:
        return value
    if (hidden := without_secrets(value)) != value and HIDDEN not in match[0]:
        known = os.environ.get(URLS, '').split()
        os.environ[URLS] = ' '.join(dict.fromkeys([match[0], *known]))
    return hidden


def in_full(url: str) -> str:
    """A URL that `hide` has made, or that is stored, with its secrets.

    Raises:
      UserError: if neither this process nor $VIT_JAX_URLS has them.
    """
    if HIDDEN not in url or '://' not in url:
        return url
    for known in os.environ.get(URLS, '').split():
        hidden = without_secrets(known)
        if hidden == url or hidden.startswith(f'{url}:'):  # a part of a file
            return known.removesuffix(hidden.removeprefix(url))
    raise UserError(
        f'{url}: its credentials are kept nowhere: give the URL in full again, or set {URLS} to it'
    )
