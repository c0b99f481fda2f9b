"""The digits, which stall after some reads while there is a file `stall` in a folder.

Used as `helpers.stalling:FOLDER`; makes the file `stalled` there.
"""

import itertools
import pathlib
import time

from vit_jax.data.sources import digits

READS = 300  # before they stall


class Source(digits.Source):
    def __init__(self, path, split):
        super().__init__('', split)
        self._folder, self._reads = pathlib.Path(path), itertools.count(1)

    def __getitem__(self, index):
        is_late = next(self._reads) > READS
        while is_late and (self._folder / 'stall').exists():
            (self._folder / 'stalled').touch()
            time.sleep(0.05)
        return super().__getitem__(index)
