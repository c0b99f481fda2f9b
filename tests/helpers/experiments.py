"""The configs of experiments/."""

from __future__ import annotations

import functools
import pathlib

from ml_collections import ConfigDict

from vit_jax.config import load, recipes, schema
from vit_jax.signatures import parameters

ROOT = pathlib.Path(__file__).resolve().parents[2]
# From the root, as the documents name them.
PATHS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / 'experiments').rglob('*.py')
    if 'def get_config(' in path.read_text()
)


def examples(path: pathlib.Path, function: str) -> list[str]:
    """Arguments of a recipe: every choice of each one, and `smoke`.

    Only `smoke` if the model comes from a checkpoint that the user names.
    """
    module = recipes.load_module(str(path), 'test')
    make = getattr(module, function)
    found = ['smoke']
    if follows_checkpoint(path):
        return found
    for name, p in parameters(make).items():
        choices = (False, True) if isinstance(p.default, bool) else recipes.choices_of(p)
        found += [f'{name}={choice}' for choice in choices if choice != p.default]
    return found


def follows_checkpoint(path: pathlib.Path) -> bool:
    """Whether a recipe of a config takes its model from a checkpoint that the user names."""
    module = recipes.load_module(str(path), 'test')
    if not hasattr(module, 'get_config'):
        return False
    return schema.follows_checkpoint(module.get_config())


def one_of_each_kind(*first: str) -> list[str]:
    """Enough configs that every model and evaluator of the smoke sizes is in one.

    Both count once for each task.

    Args:
      first: configs that are taken first; the others follow by their number of evaluators.
    """
    kinds = {path: _kinds(path) for path in PATHS}
    found, seen = [], set()
    for path in [*first, *sorted(PATHS, key=lambda path: -len(kinds[path]))]:
        if not kinds[path] <= seen:
            found.append(path)
            seen |= kinds[path]
    return found


@functools.cache
def smoke(path: str) -> ConfigDict:
    """A config of a smoke size; do not change it."""
    return load.load(f'{ROOT / path}:smoke')


def _kinds(path: str) -> set[tuple[str, ...]]:
    config = smoke(path)
    model, task = config.model.name, config.task.name
    evaluators = (entry.get('evaluator', '') for entry in config.evals.values())
    return {(model, task), *((task, name) for name in evaluators)}
