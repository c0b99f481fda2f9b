"""The storage of a study: a journal, a SQLite file, or a database."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend

from vit_jax.errors import HIDDEN, UserError, in_full, without_secrets
from vit_jax.storage import paths

JOURNAL = 'journal:'
_KINDS = {
    'run': int,
    'folder': str,
    'attempt': dict | None,
    'error': str,
    'diverged': str,
    'promoted': int,
}


def absolute(storage: str) -> str:
    """The storage, with the path of a file made absolute."""
    for scheme in (JOURNAL, 'sqlite:///'):
        if storage.startswith(scheme):
            path = pathlib.Path(storage.removeprefix(scheme)).expanduser()
            return f'{scheme}{path.resolve()}'
    return storage


def without_password(storage: str) -> str:
    """The storage's URL without secrets, for a file; drivers find the password themselves."""
    if storage.startswith(JOURNAL):
        return storage
    try:
        url = sqlalchemy.make_url(storage)._replace(password=None)
    except (sqlalchemy.exc.ArgumentError, ValueError) as e:  # of a port that is no number
        raise _unopened(storage, e) from e
    secret = [name for name in url.query if HIDDEN in without_secrets(f'x://x?{name}=x')]
    return url.difference_update_query(secret).render_as_string(hide_password=False)


def open_storage(storage: str, new: bool = False) -> BaseStorage:
    """Open Optuna's storage; `new` allows creating a file.

    Raises:
      UserError: if it cannot be opened.
    """
    scheme = next((s for s in (JOURNAL, 'sqlite:///') if storage.startswith(s)), '')
    path = pathlib.Path(storage.removeprefix(scheme))
    if scheme and not new and not path.is_file():
        raise UserError(f'--storage {storage}: there is no such file')
    try:
        if scheme and path.exists():
            paths.open_file(path, paths.TABLE).close()
        if scheme and new:
            path.parent.mkdir(parents=True, exist_ok=True)
        if scheme == JOURNAL:
            return JournalStorage(JournalFileBackend(os.fspath(path)))
        storage = in_full(storage)
        # SQLite allows one writer at a time; the others wait.
        waiting = {'connect_args': {'timeout': 60}} if scheme else {}
        return get_storage(RDBStorage(storage, engine_kwargs=waiting))
    except ImportError as e:
        raise UserError(
            f'--storage needs {e.name or "a package"} ({paths.why(e)}): pip install '
            "'vit_jax[postgres]', or the driver of your database"
        ) from e
    except (sqlalchemy.exc.SQLAlchemyError, OSError, ValueError) as e:
        raise _unopened(storage, e) from e


def _unopened(storage: str, error: Exception) -> UserError:
    return UserError(
        f'--storage {storage} cannot be opened ({paths.why(error)}): write sqlite:///PATH, '
        'journal:PATH or postgresql+psycopg://HOST/DATABASE'
    )


@contextlib.contextmanager
def intact(what: str) -> Iterator[None]:
    """Raise UserError if the file or study cannot be read inside, or its contents are damaged."""
    damage = (
        *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError),
        *(TypeError, ValueError),
    )
    try:
        yield
    except (*damage, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.OptunaError) as e:
        reason = ' '.join(str(e).split())
        raise UserError(
            f'{what} cannot be read ({type(e).__name__}: {reason[:200]}): if it is damaged, bring '
            'it back from a copy or create the study again'
        ) from e


def require_sound(trial: optuna.trial.FrozenTrial) -> None:
    """Raise ValueError for a trial that no worker can have stored."""
    known = {name: value for name, value in trial.user_attrs.items() if name in _KINDS}
    wrong = [name for name, value in known.items() if not isinstance(value, _KINDS[name])]
    if not all(isinstance(step, int) for step in trial.intermediate_values):
        wrong.append('step')
    if trial.state == optuna.trial.TrialState.COMPLETE and len(trial.values or ()) != 1:
        wrong.append('value')
    if wrong:
        raise ValueError(f'trial {trial.number} has an impossible {wrong[0]}')
