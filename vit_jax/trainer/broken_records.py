"""Records that cannot be read, counted over all processes, workers and restarts."""

from __future__ import annotations

from vit_jax.data.dataset import Dataset
from vit_jax.runtime import processes
from vit_jax.trainer.build import Training


def share(data: Dataset) -> None:
    """Let every process know which records the others have found broken.

    Raises:
      UserError: on every process, if all together are too many.
    """
    for found in processes.gather(list(data.source.news().items())):
        data.source.note(dict(found))


def counts(training: Training) -> dict[str, float]:
    """The numbers of broken records, for the data that have any."""
    opened = {'train': training.data, **{k: e.data for k, e in training.evaluations.items()}}
    counts = {name: len(data.source.broken) for name, data in opened.items()}
    return {f'{name}/broken_records': float(count) for name, count in counts.items() if count}
