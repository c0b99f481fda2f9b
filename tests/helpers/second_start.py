"""A classification task that works in the first process that uses it, and in no other."""

import os
import pathlib

from vit_jax.errors import UserError
from vit_jax.tasks import classify

MARKER = 'SECOND_START_MARKER'  # an environment variable: the file that the first process makes
REASON = 'this task starts once'


class Task(classify.Task):
    def __post_init__(self):
        marker = pathlib.Path(os.environ[MARKER])
        if marker.exists() and marker.read_text() != str(os.getpid()):
            raise UserError(REASON)
        marker.write_text(str(os.getpid()))
