"""A small study, as the tests of sweeps make one; needs Optuna to do so."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from vit_jax.sweeps.space import Sweep

if TYPE_CHECKING:
    from vit_jax.sweeps.study import Study

METRIC = 'test/accuracy'


def make(folder: pathlib.Path, storage: str = 'journal', **fields: Any) -> Study:
    """The study `name` of the runs in `folder`.

    Args:
      folder: of the runs.
      storage: 'journal' or 'sqlite', a file in the folder, or a URL.
      **fields: of the sweep.
    """
    from vit_jax.sweeps import study

    files = {'journal': '', 'sqlite': f'sqlite:///{folder}/sweep.db'}
    sweep = Sweep(config='experiments/vit/digits.py:smoke', metric=METRIC, **fields)
    return study.create(sweep, 'name', files.get(storage, storage), folder)


def ids(study: Study, trial: int) -> tuple[int, int]:
    """What a storage calls a study and one of its trials, which is given by its number."""
    of_study = study.storage.get_study_id_from_name(study.name)
    return of_study, study.storage.get_trial_id_from_study_id_trial_number(of_study, trial)
