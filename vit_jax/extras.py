"""Optional dependencies: the extras of this package, and errors where one is missing.

A module that a config can name, such as an evaluator, declares the extra that it needs, as by
`EXTRA = 'detection'`, which can be read where the extra is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterable, Iterator

from vit_jax.errors import UserError

# A package of each extra that a command may need.
PACKAGES = {
    'beam': 'apache_beam',
    'detection': 'pycocotools',
    'export': 'flatbuffers',
    'gcs': 'gcsfs',
    'hub': 'huggingface_hub',
    'mlflow': 'mlflow',
    'postgres': 'psycopg',
    's3': 's3fs',
    'sweep': 'optuna',
    'trackio': 'trackio',
    'translate': 'sacrebleu',
    'wandb': 'wandb',
}
# Extras that a command needs only for modules that its config names.
NAMED_BY_CONFIGS = {'detection', 'mlflow', 'trackio', 'translate', 'wandb'}
SCHEMES = {
    'gs': 'gcs',
    'hf': 'hub',
    's3': 's3',
    'postgresql': 'postgres',
    'postgresql+psycopg': 'postgres',
}
_URL = re.compile(rf'\b({"|".join(map(re.escape, SCHEMES))})://')


def install(*names: str) -> str:
    """Return the command that installs extras from a clone; no index has the package."""
    return f"pip install -e '.[{','.join(names)}]'"


def missing_error(feature: str, extra: str, package: str = '') -> UserError:
    """Return the error that `feature` needs an extra; `package` is the missing package."""
    return UserError(f'{feature} needs {package or PACKAGES[extra]}: {install(extra)}')


@contextlib.contextmanager
def needed_by(feature: str, extra: str) -> Iterator[None]:
    """Turn an ImportError in the block into a UserError that names the extra."""
    try:
        yield
    except ImportError as error:
        raise missing_error(feature, extra) from error


def is_installed(extra: str) -> bool:
    """Return whether the package of an extra can be imported, without importing it."""
    return importlib.util.find_spec(PACKAGES[extra]) is not None


def named_by_urls(texts: Iterable[str]) -> set[str]:
    """List extras that URL schemes of paths or flags need, such as `--workdir=gs://a/b`."""
    return {SCHEMES[scheme] for word in texts for scheme in _URL.findall(word)}
