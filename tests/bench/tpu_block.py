"""Compile a training step of a Transformer block for a TPU, by XLA's attention and by the kernel.

    python tests/bench/tpu_block.py xla 128
    python tests/bench/tpu_block.py pallas 128 v6e:1x1
    python tests/bench/tpu_block.py pallas 128 v5e:1x1 float32
    python tests/bench/tpu_block.py pallas 128 v5e:1x1 bfloat16 decoder
    python tests/bench/tpu_block.py pallas 4 v5e:1x1 bfloat16 detr 0.1

The block is one of BLOCKS, that of ViT-B/16 by default. `float32` is the residual stream, what the
block gets and gives. The last number is the rate at which weights are dropped, 0 by default.

Prints the block's roofline, its traffic, its temporaries and the compiler's estimate of cycles, and
then the cycles of the kernel, which that estimate leaves out: instructions of its machine code,
each as often as its loops run it, without waiting for memory. Takes minutes; no TPU is needed.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import sys
import tempfile
from typing import NamedTuple

from vit_jax.profiling import topology


class Sizes(NamedTuple):
    """Of a block."""

    tokens: int
    width: int
    heads: int
    hidden: int


# Of ViT-B/16, of the base Transformer with sentences of 64 tokens, and of the encoder of DETR with
# an image of 800 x 1088 pixels.
BLOCKS = {
    'vit': Sizes(197, 768, 12, 3072),
    'encoder': Sizes(64, 512, 8, 2048),
    'decoder': Sizes(64, 512, 8, 2048),
    'detr': Sizes(850, 256, 8, 2048),
}
DUMP = 'VIT_JAX_BENCH_DUMP'
FLAGS = (
    '--xla_jf_dump_to={} --xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*'
)
INSTRUCTION = re.compile(r'^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]+)?: (>*)', re.M)


def block(
    name: str, attention: str, batch: int, slice_: topology.Topology, residual: str, rate: float
) -> None:
    import jax
    import jax.numpy as jnp

    from vit_jax.nn.attention_choice import Devices, runs_on
    from vit_jax.profiling import roofline, scheduled_hlo

    device = topology.devices(slice_)[0]
    tokens, width, *_ = BLOCKS[name]
    apply, init = functions(name, attention, rate)
    x = jax.ShapeDtypeStruct((batch, tokens, width), jnp.dtype(residual))
    mask = jax.ShapeDtypeStruct((batch, 1, 1, tokens), jnp.bool_)
    inputs = (x, x) if name == 'decoder' else (x,)

    def train_step(params, inputs, mask, positions, seed, grad):
        key = jax.random.wrap_key_data(seed)
        with runs_on(Devices(device.device_kind)):
            function = functools.partial(apply, mask=mask, positions=positions, key=key)
            out, pull = jax.vjp(function, params, inputs)
        return out, pull(grad)

    params = jax.eval_shape(init, jax.random.key(0), inputs, mask, x)
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    compiled = compile_for(device, train_step, params, inputs, mask, x, seed, x)
    found = roofline.operations(scheduled_hlo.parse(compiled.as_text()))
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    print(
        f'{1e3 * roofline.bound(found, slice_.chip):.2f} ms at least, '
        f'{sum(op.count * op.bytes for op in found) / 1e9:.2f} GB moved, '
        f'{temporaries / 1e9:.2f} GB of temporaries, '
        f'{sum(op.count * op.cycles for op in found if op.cycles) / 1e6:.2f} Mcycles estimated'
    )


def functions(name: str, attention: str, rate: float):
    """A block of its inputs, mask, positions and key, and what makes its parameters."""
    import jax.numpy as jnp

    from vit_jax.nn.blocks import Block
    from vit_jax.nn.encoder_decoder import DecoderBlock, EncoderBlock, Memory

    classes = {'vit': Block, 'decoder': DecoderBlock}
    fields = {'causal': True} if name == 'decoder' else {}
    *_, heads, hidden = BLOCKS[name]
    model = classes.get(name, EncoderBlock)(
        heads,
        hidden,
        attention_dropout=rate,
        dtype=jnp.bfloat16,
        attention_by=attention,
        **fields,
    )

    def arguments(inputs, mask, positions):
        if name == 'vit':
            return *inputs, True
        if name == 'decoder':
            return inputs[0], Memory(inputs[1], mask), True
        return *inputs, mask, True, positions if name == 'detr' else None

    def apply(params, inputs, mask, positions, key):
        return model.apply(params, *arguments(inputs, mask, positions), rngs={'dropout': key})

    def init(key, *args):
        return model.init(key, *arguments(*args))

    return apply, init


def kernel(name: str, batch: int) -> None:
    from vit_jax.nn import attention_kernel

    tokens, width, heads, _ = BLOCKS[name]
    unrolled = attention_kernel.UNROLLED // attention_kernel._score_bytes(tokens, tokens)
    for way, most in (('forward', unrolled), ('backward', 0)):
        group, each = attention_kernel._group(width, heads, most), 0
        for path in pathlib.Path(os.environ[DUMP]).glob(f'*{way}_kernel*[0-9]-final_bundles.txt'):
            depths = [len(depth) for depth in INSTRUCTION.findall(path.read_text())]
            each += depths.count(1) + width // group * sum(depth > 1 for depth in depths)
        print(f'{way}: {each} cycles of kernels an example, {batch * each / 1e6:.2f} Mcycles')


def compile_for(device, function, *shapes):
    import jax

    placed = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=placed), shapes)
    return jax.jit(function).lower(*args).compile()


def main(
    attention: str,
    batch: str,
    name: str = 'v5e:1x1',
    residual: str = 'bfloat16',
    of: str = 'vit',
    rate: str = '0',
) -> None:
    slice_ = topology.parse(name)
    block(of, attention, int(batch), slice_, residual, float(rate))
    if attention == 'pallas':
        kernel(of, int(batch))


if __name__ == '__main__':
    if DUMP in os.environ:
        main(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            variables = topology.environment() | {DUMP: folder}
            if sys.argv[1] == 'pallas':
                variables['LIBTPU_INIT_ARGS'] = FLAGS.format(folder)
            code = os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.argv], variables)
        sys.exit(code)
