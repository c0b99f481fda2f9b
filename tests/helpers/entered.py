"""`python -m helpers.entered train|load FOLDER`: the functions of ours that a walk enters.

Prints a JSON object {walk: [[file, first line, name], ...]}. Functions that other threads enter
count, and so do the bodies of modules. Comprehensions and the bodies of classes belong to the
function or module that holds them.
"""

from __future__ import annotations

import inspect
import json
import pathlib
import sys
import threading
from types import CodeType, FrameType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = tuple(str(ROOT / room) + '/' for room in ('vit_jax', 'experiments'))
CONFIG = ROOT / 'experiments/vit/digits.py'
PAIRS = (4, 6, 8, 14, 16, 18)  # the first of two steps without a log, an evaluation or a save
WITHIN = ('<listcomp>', '<setcomp>', '<dictcomp>', '<genexpr>')


class Walk:
    """Records every function that is called, also by step."""

    def __init__(self) -> None:
        self.entered: set[CodeType] = set()
        self.by_step: list[set[CodeType]] = [set()]

    def __enter__(self) -> Walk:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != 'call':
            return
        code = frame.f_code
        if code.co_name == 'take_step' and code.co_filename.endswith('trainer/loop.py'):
            self.by_step.append(set())
        self.entered.add(code)
        self.by_step[-1].add(code)

    def steps(self) -> list[tuple[str, int, str]]:
        """The functions of two steps; the median of several pairs, for some of it is timed."""
        pairs = sorted((rows(self.by_step[i] | self.by_step[i + 1]) for i in PAIRS), key=len)
        return pairs[len(pairs) // 2]


def rows(codes: set[CodeType]) -> list[tuple[str, int, str]]:
    """The functions of this repository among them."""
    return sorted(
        (code.co_filename.removeprefix(f'{ROOT}/'), code.co_firstlineno, code.co_name)
        for code in codes
        if code.co_filename.startswith(ROOMS) and is_function(code)
    )


def is_function(code: CodeType) -> bool:
    """Whether it is a function or the body of a module."""
    if code.co_name == '<module>':
        return True
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in WITHIN


def main(walk: str, folder: str) -> None:
    if walk == 'train':
        with Walk() as found:
            from vit_jax import __main__

            words = ['train', '--config', f'{CONFIG}:smoke', '--workdir', folder]
            assert __main__.main(words) == 0
        print(json.dumps({'train': rows(found.entered), 'steps': found.steps()}))
        return
    import vit_jax

    vit_jax.load(folder)  # imports the families of checkpoints
    with Walk() as found:
        vit_jax.load(folder)
    print(json.dumps({'load': rows(found.entered)}))


if __name__ == '__main__':
    main(*sys.argv[1:])
