"""Programs of a script, compiled for TPUs in processes of their own that touch no TPU."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

from vit_jax.errors import UserError
from vit_jax.profiling import topology
from vit_jax.profiling.compile_for import REQUEST, Compiled, compile_step
from vit_jax.runtime import process

COMPILE = '--compile'


def compiled(slice_: topology.Topology, cycles: bool = False, **request: Any) -> Compiled:
    """Compile the step that this script's `lower` returns for a request, for a slice."""
    request |= {'topology': slice_.name}
    return compile_step(request, (sys.argv[0], COMPILE), cycles=cycles)


def run(main: Callable[..., None], lower: Callable[..., Any]) -> None:
    """Runs a script.

    Args:
      main: takes the arguments of the command.
      lower: of a request, gives a lowered function `train_step` or `eval_step`; called in a process
        of its own.
    """
    if sys.argv[1:2] == [COMPILE]:
        folder = pathlib.Path(sys.argv[2])
        process.end_with_parent(lambda: shutil.rmtree(folder, ignore_errors=True))
        request = json.loads((folder / REQUEST).read_text())
        del request['topology']
        lower(**request).compile()
        return
    try:
        main(*sys.argv[1:])
    except UserError as e:
        sys.exit(f'error: {e}')


def placed(slice_: topology.Topology, shapes: Any) -> Any:
    """The shapes, on the first chip of a slice."""
    import jax

    sharding = jax.sharding.SingleDeviceSharding(topology.devices(slice_)[0])
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
