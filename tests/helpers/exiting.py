"""The digits, whose source leaves: by `sys.exit` (`helpers.exiting:exit`) or StopIteration."""

import sys
import threading

from vit_jax.data.sources import digits


class Source(digits.Source):
    def __init__(self, path, split):
        super().__init__('', split)
        self._how = path

    def __getitem__(self, index):
        # What opens data reads in the main thread of the command.
        if threading.current_thread() is not threading.main_thread():
            if self._how == 'exit':
                sys.exit()
            next(iter(()))
        return super().__getitem__(index)
