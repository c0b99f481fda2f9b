"""Compile the decoding of the Transformer of WMT14 for a TPU, and say what a token costs.

    python tests/bench/tpu_decode.py greedy 32
    python tests/bench/tpu_decode.py beam 32 v5e:1x1 big

So many sentences of 64 tokens, in bfloat16, with room for 64 of the target, and 37,000 pieces. The
loop over tokens is looked up in the scheduled program: which of its operations write keys and
values, of one position or all of them, and what moves. Takes ten seconds; no TPU is needed.
"""

from __future__ import annotations

import collections
import dataclasses

import compiler

from vit_jax.profiling import hlo, roofline, topology

LENGTH, PIECES = 64, 37_000


def main(search: str, batch: str, name: str = 'v5e:1x1', size: str = 'base') -> None:
    slice_ = topology.parse_topology(name)
    compiled = compiler.compiled(slice_, search=search, batch=int(batch), name=name, size=size)
    module = hlo.parse_module(compiled.module)
    loops = [i for c in module.computations.values() for i in c if i.opcode == 'while']
    loop = max(loops, key=lambda i: len(i.arrays))
    body = module.computations[loop.called[0]]
    report(module, body, loop, slice_)
    whole = roofline.bound(roofline.operations(module), slice_.chip)
    print(f'all before the loop, and one token: {1e3 * whole:.2f} ms at least')


def lower(search: str, batch: int, name: str, size: str):
    import jax
    import jax.numpy as jnp

    from vit_jax.models import seq2seq
    from vit_jax.tasks.translate import Task

    model = seq2seq.Model(vocab_size=PIECES, dtype='bfloat16', **seq2seq.variant(size))
    task = Task(search=search, extra_len=0)
    tokens = jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)

    def eval_step(variables, source):
        def apply(*args, **kwargs):
            return model.apply(variables, *args, **kwargs)

        return task.predict(apply, {'source': source})

    args = compiler.placed(topology.parse_topology(name), (variables, tokens))
    return jax.jit(eval_step).lower(*args)


def report(module, body, loop, slice_: topology.Topology) -> None:
    """What the loop does to its largest arrays, the keys and values, and what a token costs."""
    carried = collections.Counter((a.dtype, a.shape) for a in loop.arrays if len(a.shape) >= 4)
    size = {(a.dtype, a.shape): a.size for a in loop.arrays}
    for (dtype, shape), count in carried.items():
        written = collections.Counter(
            how(module, i) for i in body for a in i.arrays if (a.dtype, a.shape) == (dtype, shape)
        )
        written.pop('', None)
        each = size[dtype, shape] / 1e6
        ways = ', '.join(f'{n} x {word}' for word, n in written.items()) or 'never written'
        print(f'{count} arrays {dtype}{list(shape)} of {each:.1f} MB in the loop: {ways}')
    found = roofline.operations(dataclasses.replace(module, entry=body))
    moved = sum(op.count * op.bytes for op in found) / 1e6
    gflop = sum(op.count * op.flops for op in found) / 1e9
    least = 1e3 * roofline.bound(found, slice_.chip)
    print(
        f'a token: {least:.3f} ms at least, {moved:.0f} MB moved, {gflop:.2f} GFLOP, '
        f'{len(found)} operations'
    )


def how(module, instruction) -> str:
    """In which way an instruction makes its result; empty for names of what is there."""
    if instruction.opcode in roofline.FREE:
        return ''
    if not instruction.called:
        return instruction.opcode
    inside = module.computations[instruction.called[0]]
    opcodes = {i.opcode for i in inside}
    if 'dynamic-update-slice' in opcodes:
        return 'updated in place'
    return 'gathered' if opcodes & {'gather', 'dynamic-slice'} else f'{instruction.opcode} of all'


if __name__ == '__main__':
    compiler.run(main, lower)
