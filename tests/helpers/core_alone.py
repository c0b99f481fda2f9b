"""Runs commands in an environment of the core alone: what only extras bring cannot be imported.

    python tests/helpers/core_alone.py < {"blocked": [MODULE], "commands": [[WORD]]}

It prints the exit code and the output of each command as JSON: [[CODE, STDOUT, STDERR]].
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import io
import json
import sys
import traceback


class CoreFinder(importlib.machinery.PathFinder):
    """Finds modules on the path, except those in `blocked`."""

    blocked: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition('.')[0] in cls.blocked:
            return None
        return super().find_spec(fullname, path, target)


def extra_modules() -> list[str]:
    """The modules that are installed, but not with the core and what it requires."""
    core = _closure(['vit_jax'])
    found = importlib.metadata.packages_distributions().items()
    return sorted(name for name, owners in found if not core & set(map(_canonical, owners)))


def _closure(names: list[str]) -> set[str]:
    """Distributions and all that they require, without extras that nobody asks for."""
    from packaging.requirements import Requirement

    found, waiting = set(), [Requirement(name) for name in names]
    while waiting:
        one = waiting.pop()
        key = (_canonical(one.name), frozenset(one.extras))
        if key in found:
            continue
        found.add(key)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for text in importlib.metadata.requires(one.name) or ():
                asked = Requirement(text)
                extras = ['', *one.extras]
                if asked.marker is None or any(asked.marker.evaluate({'extra': e}) for e in extras):
                    waiting.append(asked)
    return {name for name, _ in found}


def _canonical(name: str) -> str:
    return name.lower().replace('_', '-').replace('.', '-')


def run(words: list[str]) -> tuple[int, str, str]:
    """Run one command in this process."""
    from vit_jax import __main__ as cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            code = -1
            err.write(traceback.format_exc())
    return code, out.getvalue(), err.getvalue()


if __name__ == '__main__':
    asked = json.load(sys.stdin)
    CoreFinder.blocked = frozenset(asked['blocked'])
    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = CoreFinder
    print(json.dumps([run(words) for words in asked['commands']]))
