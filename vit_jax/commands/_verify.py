"""Verification of the saved steps of a run."""

from __future__ import annotations

import json

from vit_jax.checkpoints import manifest
from vit_jax.commands._parser import align
from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.storage import paths, run_folder, step_folder


def verify(workdir: str, as_json: bool) -> int:
    """Compare every file of every kept step with its digest, and print a line a step.

    Returns:
      The exit code: 1 if a step is damaged, or has lost the marks of a finished one.

    Raises:
      UserError: if nothing was saved there.
    """
    root = paths.path(workdir) / run_folder.CHECKPOINTS
    faults = {step: fault(root / str(step)) for step in step_folder.numbered(root)}
    if not faults:
        raise UserError(f'{root} holds no saved step')
    if as_json:
        print(json.dumps({'steps': faults}))
    else:
        lines = [('step', 'state')]
        lines += [(str(step), reason or 'intact') for step, reason in faults.items()]
        print(align(lines, left=2))
    return EXIT_FAILED if any(faults.values()) else 0


def fault(directory: paths.Path) -> str:
    """The fault of a step, in one line; empty if it is intact."""
    try:
        manifest.verify(directory)
    except step_folder.Damaged as error:
        return f'damaged: {error}'
    except step_folder.Unfinished as error:
        return f'unfinished: {error}'
    return ''
