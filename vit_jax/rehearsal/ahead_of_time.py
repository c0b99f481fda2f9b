"""Compile the programs of a run for chips that this machine lacks, and report their memory.

`profiling.compile_for` starts `python -m vit_jax.rehearsal.ahead_of_time`: only this process loads
libtpu, and it can be killed after scheduling. It exits with its parent, and removes the request's
folder.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from vit_jax.config.load import from_dict
from vit_jax.config.run import MAX_STEPS, Sam
from vit_jax.data.batches import Shape
from vit_jax.errors import UserError
from vit_jax.profiling import task_flops, topology
from vit_jax.profiling.compile_for import ERROR, FACTS, REQUEST, RESULT
from vit_jax.profiling.cost import DataFacts, data_facts
from vit_jax.runtime import process, sharding
from vit_jax.step import TrainState
from vit_jax.trainer.program import Program, make_program

STEPS = ('train', 'eval', 'predict')
PROGRAM = ('-P', '-m', __name__)  # arguments of Python, before the folder of a request


def program(facts: DataFacts, devices: Sequence[jax.Device]) -> tuple[Program, str]:
    """Build the program that `train` would run on these devices.

    Returns:
      The program, and the reason for which `train` would refuse the length of the run, or ''. With
      another batch size, a run may be shorter than its cooldown; the step and its memory are the
      same.

    Raises:
      UserError: as `trainer.build.build`, or for a layout that is not `jit`.
    """
    layout = sharding.make_layout(devices, facts.run.parallel)
    if not isinstance(layout, sharding.Jit):
        raise UserError('config.parallel.strategy=pmap cannot be compiled ahead; use jit')
    make = functools.partial(make_program, facts.run, facts.kinds, layout)
    try:
        return make(facts.times), ''
    except UserError as refusal:
        longest = dataclasses.replace(facts.times, total_steps=MAX_STEPS)
        return make(longest), str(refusal)


def lower(compiled_run: Program, kind: Shape, step: str = 'train') -> Any:
    """Lower the step for one kind of batches, with every argument placed as in a run.

    Args:
      compiled_run: Result of `program`.
      kind: Kind of batches.
      step: One of STEPS; all have as many rows as training.

    Raises:
      UserError: for predictions of a task that has none.
    """
    rows = (kind.rows,)
    arrays = {k: jax.ShapeDtypeStruct(rows + s.shape, s.dtype) for k, s in kind.arrays.items()}
    batch = sharding.abstract_batch(compiled_run.layout, arrays)
    if step == 'train':
        train_step: Any = compiled_run.train_step
        return train_step.lower(compiled_run.target, batch)
    steps = compiled_run.eval_steps
    compiled: Any = steps.predict if step == 'predict' else steps.evaluate
    if compiled is None:
        raise UserError('--predict: the task of the config makes no predictions')
    return compiled.lower(compiled_run.target.variables, batch)


def collect_facts(compiled_run: Program, facts: DataFacts, refusal: str) -> dict[str, Any]:
    """Collect the facts that do not depend on the compiler, as JSON values."""
    params = jax.tree.leaves(compiled_run.abstract_state.params)
    return {
        'parameters': sum(leaf.size for leaf in params),
        'steps': facts.steps,
        'refusal': refusal,
        'batch_size': facts.run.batch_size,
        'kinds': [
            {
                'rows': kind.rows,
                'share': kind.share,
                'shapes': {k: list(s.shape) for k, s in kind.spec.items()},
                'flops': {
                    name: kind.rows * n
                    for name, n in _model_flops(facts.run.step.sam, compiled_run, kind).items()
                },
            }
            for kind in facts.kinds
        ],
        'state': {
            name: sum(map(_bytes_on_a_chip, jax.tree.leaves(tree)))
            for name, tree in _parts(compiled_run.target).items()
        },
        'unit': compiled_run.layout.num_shards * facts.run.step.accum_steps,
        'mesh': dict(compiled_run.layout.mesh.shape),
        'devices': compiled_run.hardware,
    }


def _model_flops(sam: Sam, compiled_run: Program, kind: Shape) -> dict[str, int]:
    """Count the model FLOPs of each of STEPS for one example."""
    train = task_flops.step_flops(sam, compiled_run.model, compiled_run.task, kind.spec)
    forward = task_flops.evaluation_flops(compiled_run.model, compiled_run.task, kind.spec)
    return {'train': train, 'eval': forward, 'predict': forward}


def _parts(state: TrainState) -> dict[str, Any]:
    """Return the parts of a state whose bytes are printed; all averages are one part."""
    names = ('params', 'opt_state', 'ema', 'collections', 'frozen')
    return {name: getattr(state, name) for name in names} | {'ema': (state.ema, state.other_emas)}


def _bytes_on_a_chip(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def main(request: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Compile the requested step; write the facts and then its memory into a folder.

    Args:
      request: `config`, `topology`, `step`, `kind` (which of the batches, from the end), and
        `examples` and `image_size`, see `cost.price`.
      folder: Folder for the compiler's output.
    """
    facts = data_facts(from_dict(request['config']), request['examples'], request['image_size'])
    devices = topology.devices(topology.parse_topology(request['topology']))
    compiled_run, refusal = program(facts, devices)
    (folder / FACTS).write_text(json.dumps(collect_facts(compiled_run, facts, refusal)))
    lowered = lower(compiled_run, facts.kinds[request['kind']], request['step'])
    memory = lowered.compile().memory_analysis()
    fields = ('argument', 'output', 'alias', 'temp', 'generated_code')
    sizes = {name: getattr(memory, f'{name}_size_in_bytes') for name in fields}
    (folder / RESULT).write_text(json.dumps(sizes))


if __name__ == '__main__':
    target = pathlib.Path(sys.argv[1])
    process.end_with_parent(lambda: shutil.rmtree(target, ignore_errors=True))
    try:
        main(json.loads((target / REQUEST).read_text()), target)
    except (UserError, jax.errors.JaxRuntimeError) as e:
        kind = 'user' if isinstance(e, UserError) else 'compiler'
        (target / ERROR).write_text(json.dumps({'kind': kind, 'message': str(e)}))
        sys.exit(2)
