"""Studies in a storage, with a folder that all workers share.

The storage contains the sweep, the base config, and the values, evaluations and resolved config of
every trial. The folder contains the runs, and the claims of workers: `claims/NUMBER/lock`.

Attributes of a trial in addition to Optuna's:
  folder, config  of its run
  attempt         number of attempts since the last save, and the step of that save
run             number of the trial whose run it continues, if it was queued again
  promoted        the number of rungs of ASHA that it may pass
  error           the reason of its failure
  diverged        the reason why it was stopped as diverged
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optuna
import sqlalchemy
from ml_collections import ConfigDict
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage

from vit_jax import extras
from vit_jax.config.load import from_json, override, to_json
from vit_jax.config.load import load as load_config
from vit_jax.config.origin import require_allowed
from vit_jax.errors import (
    HIDDEN,
    Unavailable,
    UserError,
    hide_secrets,
    nearest,
    with_secrets,
    without_secrets,
)
from vit_jax.storage import paths, run_folder
from vit_jax.sweeps import asha, search, space, storages
from vit_jax.trainer import early_stopping

ROOT = pathlib.Path('runs')
MARKER = 'sweep.json'
JOURNAL = 'journal:'
# Types of the attributes of a trial.
_KINDS = {
    'run': int,
    'folder': str,
    'attempt': dict | None,
    'error': str,
    'diverged': str,
    'promoted': int,
}

optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.getLogger('alembic').setLevel(logging.WARNING)
warnings.filterwarnings('ignore', category=optuna.exceptions.ExperimentalWarning)


@dataclasses.dataclass(frozen=True)
class Study:
    """An open study.

    Attributes:
      name: Name of the study.
      storage: Open storage.
      folder: Folder of its runs.
      sweep: Sweep that it runs.
      base: Config that its trials vary.
      allowed: User modules that configs of its trials may name; None for any, in a study that was
        just created from the user's file.
      first: Number in the name of the first run folder; 0 in studies of earlier versions.
    """

    name: str
    storage: BaseStorage
    folder: pathlib.Path
    sweep: space.Sweep
    base: ConfigDict
    allowed: Sequence[str] | None = None
    first: int = 1

    def trials(self, *states: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        """Return the trials in these states, or all, in order."""
        return self.load(0).get_trials(deepcopy=False, states=states or None)

    def load(self, seed: int) -> optuna.Study:
        """Optuna's study, with the search and the pruner of the sweep."""
        return optuna.load_study(
            study_name=self.name,
            storage=self.storage,
            sampler=search.make_sampler(self.sweep.search, seed, self.storage),
            pruner=search.make_pruner(self.sweep.pruner, self.sweep.pruner_options),
        )

    def run_folder(self, number: int) -> pathlib.Path:
        """Return the run folder of a trial, or of the one that it continues."""
        return self.folder / f'{number + self.first:04d}'

    def claim_folder(self, number: int) -> pathlib.Path:
        """Return the folder that a worker locks while it runs a trial."""
        return self.folder / 'claims' / str(number)

    def config(self, point: dict[str, Any]) -> ConfigDict:
        """Make the config of a trial; a branch starts from the run folder of its trunk.

        Raises:
          UserError: if it refuses these values, or names code that is not allowed.
        """
        return vary(self.base, asha.resolve_trunk(point, self.run_folder), self._check_names)

    def require_allowed(self) -> None:
        """Check the configs of all trials before any is claimed.

        Raises:
          UserError: if one names code that is not allowed.
        """
        for point in space.corners(self.sweep):
            self.config(point)

    def _check_names(self, config: ConfigDict) -> None:
        if self.allowed is not None:
            require_allowed(config, self.allowed, f'the study {self.name!r}')


def create(
    sweep: space.Sweep, name: str, storage: str = '', folder: str | pathlib.Path | None = None
) -> Study:
    """Make a study and queue all its trials.

    Args:
      sweep: Sweep to run.
      name: Name of the study.
      storage: `sqlite:///PATH`, `journal:PATH` or a URL of a database; by default a journal in
        the folder.
      folder: Folder of its runs; `runs/NAME` by default.

    Raises:
      UserError: if the study exists, or the config rejects the sweep's dimensions or values.
    """
    if not name.strip() or '/' in name or name in ('.', '..'):
        raise UserError(f'--study {name!r}: give a name without /, such as --study digits')
    folder = paths.absolute(folder or ROOT / name)
    if paths.is_remote(folder) and not storage:
        raise UserError(
            f'a study cannot be stored in {folder}: give --storage too, such as '
            'postgresql+psycopg://HOST/DATABASE'
        )
    base = load_base(sweep)
    run_folder.require_writable(folder)
    url = absolute(storage or f'{JOURNAL}{folder / "journal.log"}')
    marker = {'study': name, 'storage': without_password(url), 'token': uuid.uuid4().hex}
    _require_free(folder, marker)
    study = Study(name, open_storage(url, new=True), folder, sweep, base)
    _fill(study, marker)
    return study


def _require_free(folder: paths.Path, marker: dict[str, str]) -> None:
    marker_fields = _read_marker(folder) or marker
    if any(marker_fields.get(key) != marker[key] for key in ('study', 'storage')):
        raise UserError(
            f'{folder} holds the runs of the study {marker_fields.get("study")!r} in '
            f'{marker_fields.get("storage")}: choose another --workdir'
        )


def load_base(sweep: space.Sweep) -> ConfigDict:
    """Load the config that the trials vary.

    Raises:
      UserError: if it refuses the dimensions or values, or lacks the metric.
    """
    base = load_config(sweep.config, space.overrides(sweep.overrides))
    check_sweep(sweep, base)
    return base


def check_sweep(sweep: space.Sweep, base: ConfigDict) -> None:
    """Raise UserError for mistakes that would make trials fail."""
    search.require_package(sweep.search)
    search.make_pruner(sweep.pruner, sweep.pruner_options)
    asha.require_trunks(sweep)
    early_stopping.check_metric(base, sweep.metric, 'sweep')
    for point in space.corners(sweep):
        vary(base, point)


def vary(
    base: ConfigDict,
    point: space.Point,
    check: Callable[[ConfigDict], None] = lambda config: None,
) -> ConfigDict:
    """Copy the config with changed values.

    Raises:
      UserError: if it refuses the values, or as `check_sweep`, see `config.load.override`.
    """
    copy = from_json(to_json(base))
    return override(copy, space.overrides(point), check)


def _fill(study: Study, marker: dict[str, str]) -> None:
    """Create Optuna's study and the folder of its runs.

    A token, written to the folder first and the storage last, marks both as complete.
    """
    name, storage = study.name, study.storage
    if name in optuna.get_all_study_names(storage):
        if 'token' in optuna.load_study(study_name=name, storage=storage).user_attrs:
            raise UserError(f'the study {name!r} exists: choose another --study')
        optuna.delete_study(study_name=name, storage=storage)
    direction = optuna.study.StudyDirection[study.sweep.direction.upper()]
    optuna_study = optuna.create_study(study_name=name, storage=storage, direction=direction)
    for point in study.sweep.queue():
        optuna_study.enqueue_trial(point)
    optuna_study.set_user_attr('sweep', hide_secrets(space.to_json(study.sweep)))
    optuna_study.set_user_attr('base', study.base.to_dict())
    optuna_study.set_user_attr('folder', str(study.folder))
    optuna_study.set_user_attr('first', study.first)
    paths.make_folder(study.folder)
    paths.write_text_atomic(study.folder / MARKER, json.dumps(marker, indent=2) + '\n')
    optuna_study.set_user_attr('token', marker['token'])


def open_study(
    name: str,
    storage: str = '',
    folder: str | pathlib.Path | None = None,
    allowed: Sequence[str] = (),
) -> Study:
    """Open a study that was created here or elsewhere.

    Args:
      name: Name of the study.
      storage: URL of its storage; by default the one recorded in its folder.
      folder: Folder of its runs, if its path differs on this machine.
      allowed: The user's own modules that the configs of its trials may name.

    Raises:
      UserError: if there is no such study, or its storage cannot be read.
    """
    path = paths.absolute(folder or ROOT / name)
    url = storage or _read_marker(path).get('storage', '')
    if not url:
        names = sorted(marker.parent.name for marker in ROOT.glob(f'*/{MARKER}'))
        raise UserError(f'{nearest("study", name, names)}; or give --storage or --workdir')
    with intact(f'--storage {url}'):
        storage_ = open_storage(absolute(url))
        names = optuna.get_all_study_names(storage_)
        if name not in names:
            raise UserError(nearest('study', name, names))
        attributes = optuna.load_study(study_name=name, storage=storage_).user_attrs
        if 'token' not in attributes:
            raise UserError(f'the study {name!r} was not created completely: create it again')
        base = from_json(json.dumps(attributes['base']))
        study_folder = path if folder else paths.absolute(attributes['folder'])
        sweep = space.from_json(attributes['sweep'])
        start_number = int(attributes.get('first', 0))
        study = Study(name, storage_, study_folder, sweep, base, tuple(allowed), start_number)
        for trial in study.trials():
            require_sound(trial)
    return study


def require_sound(trial: optuna.trial.FrozenTrial) -> None:
    """Raise ValueError for a trial that no worker can have stored."""
    dimensions = {name: value for name, value in trial.user_attrs.items() if name in _KINDS}
    faults = [name for name, value in dimensions.items() if not isinstance(value, _KINDS[name])]
    if not all(isinstance(step, int) for step in trial.intermediate_values):
        faults.append('step')
    if trial.state == optuna.trial.TrialState.COMPLETE and len(trial.values or ()) != 1:
        faults.append('value')
    if faults:
        raise ValueError(f'{trial_title(trial)} has an impossible {faults[0]}')


def require_shared_folder(study: Study) -> None:
    """Check that this worker has the shared folder with the claims and runs of all workers.

    Raises:
      UserError: if it does not.
    """
    token = study.load(0).user_attrs['token']
    if _read_marker(study.folder).get('token') != token:
        raise UserError(
            f'the folder {study.folder} of the study {study.name!r} is not here: all workers '
            'share one; mount it, and give --workdir where its path differs'
        )


def _read_marker(folder: pathlib.Path) -> dict[str, str]:
    text = paths.read_text(folder / MARKER, errors='replace')
    with intact(str(folder / MARKER)):
        return {name: str(value) for name, value in paths.parse_json(text or '{}').items()}


def retry(study: Study) -> int:
    """Queue failed trials again, to continue in their run folders; return how many."""
    by_run = {run_number(trial): trial for trial in study.trials()}  # the last one of each run
    failed = [n for n, trial in by_run.items() if trial.state == optuna.trial.TrialState.FAIL]
    for number in failed:
        study.load(0).enqueue_trial(by_run[number].params, user_attrs={'run': number})
    return len(failed)


def run_number(trial: optuna.trial.FrozenTrial | optuna.Trial) -> int:
    """Return the number of the trial's run, which a repeated trial shares with the failed one."""
    return trial.user_attrs.get('run', trial.number)


def trial_title(trial: optuna.trial.FrozenTrial | optuna.Trial) -> str:
    """Name a trial for people, who count from 1."""
    return f'trial {trial.number + 1}'


def state_name(trial: optuna.trial.FrozenTrial) -> str:
    """Return the state of a trial in a word; Optuna calls a diverged trial pruned."""
    return 'diverged' if 'diverged' in trial.user_attrs else trial.state.name.lower()


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
            return JournalStorage(storages.Journal(os.fspath(path)))
        storage = with_secrets(storage)
        if not scheme:
            checked = {'pool_pre_ping': True}
            return get_storage(storages.ServerStorage(storage, engine_kwargs=checked))
        # SQLite allows one writer at a time; the others wait.
        waiting = {'connect_args': {'timeout': 60}}
        return get_storage(RDBStorage(storage, engine_kwargs=waiting))
    except ImportError as e:
        raise UserError(
            f'--storage needs {e.name or "a package"} ({paths.first_line(e)}): '
            f'{extras.install("postgres")}, or the driver of your database'
        ) from e
    except (sqlalchemy.exc.OperationalError, sqlalchemy.exc.TimeoutError) as e:
        if storages.time_may_mend(e):
            raise Unavailable(
                f'--storage {storage} does not answer ({paths.first_line(e)}): once its server '
                'does, start the same command again'
            ) from e
        raise _open_error(storage, e) from e
    except RuntimeError as e:  # of Optuna, for the tables of another version
        raise UserError(
            f'--storage {storage} is not of this version of Optuna, {optuna.__version__} '
            f'({paths.reason(e)}): upgrade the storage or the package, or create the '
            'study elsewhere'
        ) from e
    except (sqlalchemy.exc.SQLAlchemyError, OSError, ValueError) as e:
        raise _open_error(storage, e) from e


def _open_error(storage: str, error: Exception) -> UserError:
    return UserError(
        f'--storage {storage} cannot be opened ({paths.first_line(error)}): write sqlite:///PATH, '
        'journal:PATH or postgresql+psycopg://HOST/DATABASE'
    )


def absolute(storage: str) -> str:
    """Return the storage, with the path of a file made absolute."""
    for scheme in (JOURNAL, 'sqlite:///'):
        if storage.startswith(scheme):
            path = pathlib.Path(storage.removeprefix(scheme)).expanduser()
            return f'{scheme}{path.resolve()}'
    return storage


def without_password(storage: str) -> str:
    """Return the storage's URL without secrets, for a file; drivers find the password.

    Raises:
      UserError: if it is not a URL.
    """
    if storage.startswith(JOURNAL):
        return storage
    try:
        # The text of a hidden secret must never reach a file that is read back.
        url = sqlalchemy.make_url(with_secrets(storage))._replace(password=None)
    except (sqlalchemy.exc.ArgumentError, ValueError) as e:  # for an invalid port
        raise _open_error(storage, e) from e
    secret = [name for name in url.query if HIDDEN in without_secrets(f'x://x?{name}=x')]
    return url.difference_update_query(secret).render_as_string(hide_password=False)


@contextlib.contextmanager
def intact(source: str) -> Iterator[None]:
    """Turn errors of a damaged file or study, and of its storage, into one-line errors.

    Raises:
      paths.WriteError: if the disk of the storage is full, or refuses to write for another reason.
      Unavailable: for another error of the storage itself, which may pass.
      UserError: if the file or study is damaged.
    """
    damage = (
        *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError),
        *(TypeError, ValueError),
    )
    try:
        yield
    except (OSError, *damage, sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.OptunaError) as e:
        if full := storages.disk_reason(e):
            raise paths.WriteError(
                f'{source} cannot be written to ({full}): once its disk has room, start the same '
                'command again'
            ) from e
        if isinstance(e, optuna.exceptions.StorageInternalError):
            raise Unavailable(
                f'{source} could not be changed ({paths.reason(e.__cause__ or e)}): start the same '
                'command again'
            ) from e
        reason = ' '.join(str(e).split())
        raise UserError(
            f'{source} cannot be read ({type(e).__name__}: {reason[:200]}): if it is damaged, '
            'restore a copy or create the study again'
        ) from e
