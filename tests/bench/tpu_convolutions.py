"""Compile a training step of BiT-R50x1 for a TPU, and say what its convolutions cost.

    python tests/bench/tpu_convolutions.py 256
    python tests/bench/tpu_convolutions.py 256 v6e:1x1

So many images of 224 pixels a chip, in bfloat16: value and gradients of the model. Prints which
dimensions of what convolutions read and write lie along the 128 lanes and along the sublanes of a
register, and the least time and the traffic of convolutions, of copies that do nothing but change a
layout, and of all else. Takes half a minute; no TPU is needed.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator

import compiler

from vit_jax.profiling import hlo, roofline, topology

# Letters of `dim_labels`.
NAMES = {'b': 'batch', 'f': 'channels', 'i': 'channels', 'o': 'output channels'}
LAYOUT = re.compile(r'%([\w.\-]+) = \w+\[[\d,]*\]\{([\d,]*)')
CONVOLUTION = re.compile(
    r'%([\w.\-]+) = .* convolution\(%([\w.\-]+), %([\w.\-]+)\).*dim_labels=(\w+)_(\w+)->(\w+)'
)
# Of a fusion that computes nothing.
MOVES = {'copy', 'transpose', 'reshape', *roofline.FREE}


def main(batch: str, name: str = 'v5e:1x1') -> None:
    slice_ = topology.parse_topology(name)
    text = compiler.compiled(slice_, batch=int(batch), name=name).module
    for direction, layouts in layouts_of(text).items():
        print(f'{direction}, input -> output: {dict(layouts.most_common())}')
    module = hlo.parse_module(text)
    found = collections.defaultdict(list)
    for instruction in module.entry:
        if instruction.opcode not in roofline.FREE and not instruction.opcode.endswith('-done'):
            op = roofline.operation(module, module.entry, instruction)
            found[kind(module, instruction)].append(op)
    for what, operations in sorted(found.items()):
        seconds = sum(op.seconds(slice_.chip) for op in operations)
        moved = sum(op.bytes for op in operations) / 1e9
        flops = sum(op.flops for op in operations) / 1e12
        print(
            f'{what}: {len(operations)} operations, {1e3 * seconds:.1f} ms at least, '
            f'{moved:.2f} GB, {flops:.2f} TFLOP'
        )


def lower(batch: int, name: str):
    import jax
    import jax.numpy as jnp

    from vit_jax.models import bit_resnet

    model = bit_resnet.Model(num_classes=1000, dtype='bfloat16', **bit_resnet.variant('R50x1'))
    images = jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32)
    grad = jax.ShapeDtypeStruct((batch, 1000), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)

    def train_step(params, images, grad):
        out, pull = jax.vjp(lambda params: model.apply(params, images)['logits'], params)
        return out, pull(grad.astype(out.dtype))

    args = compiler.placed(topology.parse_topology(name), (params, images, grad))
    return jax.jit(train_step).lower(*args)


def layouts_of(text: str) -> dict[str, collections.Counter[str]]:
    """How often which dimensions lie along lanes and sublanes, by direction."""
    order = {name: list(map(int, dims.split(','))) for name, dims in LAYOUT.findall(text) if dims}
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in text.splitlines():
        if match := CONVOLUTION.search(line):
            result, read, _, inputs, _, outputs = match.groups()
            ends = (registers(order[read], inputs), registers(order[result], outputs))
            found['backward' if 'transpose(' in line else 'forward'][' -> '.join(ends)] += 1
    return found


def registers(minor_to_major: list[int], labels: str) -> str:
    """What lies along the lanes, and what along the sublanes."""
    lanes, sublanes = (NAMES.get(labels[i], 'pixels') for i in minor_to_major[:2])
    return f'{lanes} by {sublanes}'


def kind(module: hlo.Module, instruction: hlo.Instruction) -> str:
    opcodes = set(_opcodes(module, instruction))
    if 'convolution' in opcodes:
        return 'convolutions'
    if instruction.opcode.startswith('copy') or not opcodes - MOVES - {'fusion'}:
        return 'copies'
    return 'all else'


def _opcodes(module: hlo.Module, instruction: hlo.Instruction) -> Iterator[str]:
    yield instruction.opcode
    for name in instruction.called:
        for inside in module.computations[name]:
            yield from _opcodes(module, inside)


if __name__ == '__main__':
    compiler.run(main, lower)
