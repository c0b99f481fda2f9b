"""A study in its storage, and the folder that all its workers share.

The storage keeps the sweep, the base config, and the values, evaluations and resolved config of
every trial. The folder keeps the runs, and the claims of workers: `claims/NUMBER/lock`.

Attributes of a trial beside Optuna's own:
  folder, config  of its run
  attempt         number of attempts since the last save, and the step of that save
  run             the trial whose run it continues, if it was queued again
  promoted        the number of rungs of ASHA that it may pass
  error           the reason of its failure
  diverged        the reason why it was stopped as diverged
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from ml_collections import ConfigDict
from optuna.storages import BaseStorage

from vit_jax.config import load as config_lib
from vit_jax.config.allowed import require_allowed
from vit_jax.errors import UserError, hide, nearest
from vit_jax.storage import paths, run_folder
from vit_jax.sweeps import branches, search, space, storages
from vit_jax.trainer import metrics

ROOT = pathlib.Path('runs')
MARKER = 'sweep.json'

optuna.logging.set_verbosity(optuna.logging.WARNING)
logging.getLogger('alembic').setLevel(logging.WARNING)
warnings.filterwarnings('ignore', category=optuna.exceptions.ExperimentalWarning)


@dataclasses.dataclass(frozen=True)
class Study:
    """An open study.

    Attributes:
      name: of the study.
      storage: its open storage.
      folder: of its runs.
      sweep: the sweep that it runs.
      base: the config that its trials vary.
      allowed: modules of the user's own that the configs of its trials may name; None for any, for
        a study that was just created from a file that the user chose to run.
    """

    name: str
    storage: BaseStorage
    folder: pathlib.Path
    sweep: space.Sweep
    base: ConfigDict
    allowed: Sequence[str] | None = None

    def trials(self, *states: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        """The trials in these states, or all, in order."""
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
        """Run folder of a trial, or of the one that it continues."""
        return self.folder / f'{number:04d}'

    def claim_folder(self, number: int) -> pathlib.Path:
        """The folder that a worker locks while it is at work on a trial."""
        return self.folder / 'claims' / str(number)

    def config(self, point: dict[str, Any]) -> ConfigDict:
        """The config of a trial; a branch starts from the run folder of its trunk.

        Raises:
          UserError: if it cannot have these values, or names code that is not allowed.
        """
        return vary(self.base, branches.resolved(point, self.run_folder), self._check_names)

    def require_allowed(self) -> None:
        """Check the config of every trial before any is claimed.

        Raises:
          UserError: if one names code that is not allowed.
        """
        for point in space.corners(self.sweep):
            self.config(point)

    def _check_names(self, config: ConfigDict) -> None:
        if self.allowed is not None:
            require_allowed(config, self.allowed, f'the study {self.name!r}')


def vary(
    base: ConfigDict,
    point: space.Point,
    check: Callable[[ConfigDict], None] = lambda config: None,
) -> ConfigDict:
    """A copy of the config with other values.

    Raises:
      UserError: if it refuses the values, or as `check`, see `config.load.override`.
    """
    copy = config_lib.from_json(config_lib.to_json(base))
    return config_lib.override(copy, space.overrides(point), check)


def create(
    sweep: space.Sweep, name: str, storage: str = '', folder: str | pathlib.Path | None = None
) -> Study:
    """Make a study and queue all its trials.

    Args:
      sweep: the sweep to run.
      name: of the study.
      storage: `sqlite:///PATH`, `journal:PATH` or a URL of a database; by default a journal in
        the folder.
      folder: of its runs; `runs/NAME` by default.

    Raises:
      UserError: if the study exists, or the config refuses the sweep's dimensions or values.
    """
    if not name.strip() or '/' in name or name in ('.', '..'):
        raise UserError(f'--study {name!r}: give a name without /, as in --study digits')
    folder = paths.absolute(folder or ROOT / name)
    if paths.is_remote(folder) and not storage:
        raise UserError(
            f'the study cannot be kept in {folder}: give --storage too, as in '
            'postgresql+psycopg://HOST/DATABASE'
        )
    base = load_base(sweep)
    run_folder.require_writable(folder)
    url = storages.absolute(storage or f'{storages.JOURNAL}{folder / "journal.log"}')
    marker = {'study': name, 'storage': storages.without_password(url), 'token': uuid.uuid4().hex}
    _require_free(folder, marker)
    study = Study(name, storages.open_storage(url, new=True), folder, sweep, base)
    _fill(study, marker)
    return study


def _require_free(folder: paths.Path, marker: dict[str, str]) -> None:
    other = _read_marker(folder) or marker
    if any(other.get(key) != marker[key] for key in ('study', 'storage')):
        raise UserError(
            f'{folder} holds the runs of the study {other.get("study")!r} in '
            f'{other.get("storage")}: choose another --workdir'
        )


def load_base(sweep: space.Sweep) -> ConfigDict:
    """The config that the trials vary.

    Raises:
      UserError: if it refuses the dimensions or values, or lacks the metric.
    """
    base = config_lib.load(sweep.config, space.overrides(sweep.overrides))
    check(sweep, base)
    return base


def check(sweep: space.Sweep, base: ConfigDict) -> None:
    """Raise UserError for mistakes that would make trials fail."""
    search.require_package(sweep.search)
    search.make_pruner(sweep.pruner, sweep.pruner_options)
    branches.require_trunks(sweep)
    metrics.check(base, sweep.metric, 'sweep')
    for point in space.corners(sweep):
        vary(base, point)


def _fill(study: Study, marker: dict[str, str]) -> None:
    """Create Optuna's study and the folder of its runs.

    The token says that both are whole: the folder gets it first, the storage last.
    """
    name, storage = study.name, study.storage
    if name in optuna.get_all_study_names(storage):
        if 'token' in optuna.load_study(study_name=name, storage=storage).user_attrs:
            raise UserError(f'the study {name!r} exists: choose another --study')
        optuna.delete_study(study_name=name, storage=storage)
    direction = optuna.study.StudyDirection[study.sweep.direction.upper()]
    made = optuna.create_study(study_name=name, storage=storage, direction=direction)
    for point in study.sweep.queue():
        made.enqueue_trial(point)
    made.set_user_attr('sweep', hide(space.to_json(study.sweep)))
    made.set_user_attr('base', study.base.to_dict())
    made.set_user_attr('folder', str(study.folder))
    paths.make_folder(study.folder)
    paths.write_text_atomic(study.folder / MARKER, json.dumps(marker, indent=2) + '\n')
    made.set_user_attr('token', marker['token'])


def open_study(
    name: str,
    storage: str = '',
    folder: str | pathlib.Path | None = None,
    allowed: Sequence[str] = (),
) -> Study:
    """Open a study that was created here or elsewhere.

    Args:
      name: of the study.
      storage: its URL; by default the one recorded in its folder.
      folder: of its runs, if that is mounted at another place.
      allowed: modules of the user's own that the configs of its trials may name.

    Raises:
      UserError: if there is no such study, or its storage cannot be read.
    """
    path = paths.absolute(folder or ROOT / name)
    url = storage or _read_marker(path).get('storage', '')
    if not url:
        known = sorted(marker.parent.name for marker in ROOT.glob(f'*/{MARKER}'))
        raise UserError(f'{nearest("study", name, known)}; or give --storage or --workdir')
    with storages.intact(f'--storage {url}'):
        opened = storages.open_storage(storages.absolute(url))
        known = optuna.get_all_study_names(opened)
        if name not in known:
            raise UserError(nearest('study', name, known))
        attributes = optuna.load_study(study_name=name, storage=opened).user_attrs
        if 'token' not in attributes:
            raise UserError(f'the study {name!r} was created only in part: create it again')
        base = config_lib.from_json(json.dumps(attributes['base']))
        found = path if folder else paths.absolute(attributes['folder'])
        sweep = space.from_json(attributes['sweep'])
        study = Study(name, opened, found, sweep, base, tuple(allowed))
        for trial in study.trials():
            storages.require_sound(trial)
    return study


def retry(study: Study) -> int:
    """Queue failed trials again, to continue in their run folders; return their number."""
    by_run = {run_number(trial): trial for trial in study.trials()}  # the last one of each run
    failed = [n for n, trial in by_run.items() if trial.state == optuna.trial.TrialState.FAIL]
    for number in failed:
        study.load(0).enqueue_trial(by_run[number].params, user_attrs={'run': number})
    return len(failed)


def state_name(trial: optuna.trial.FrozenTrial) -> str:
    """The state of a trial in a word; Optuna's state of a diverged trial is pruned."""
    return 'diverged' if 'diverged' in trial.user_attrs else trial.state.name.lower()


def run_number(trial: optuna.trial.FrozenTrial | optuna.Trial) -> int:
    """Number of the trial's run: its own, or that of the failed trial that it repeats."""
    return trial.user_attrs.get('run', trial.number)


def require_shared_folder(study: Study) -> None:
    """Check that this worker sees the shared folder, with the claims and runs of all workers.

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
    with storages.intact(str(folder / MARKER)):
        return {name: str(value) for name, value in paths.parse_json(text or '{}').items()}
