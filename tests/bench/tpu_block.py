"""Compile a training step of a ViT-B/16 block for a TPU, by XLA's attention and by the kernel.

    python tests/bench/tpu_block.py xla 128
    python tests/bench/tpu_block.py pallas 128 v6e:1x1
    python tests/bench/tpu_block.py pallas 128 v5e:1x1 float32

The last with its residual stream, what it gets and gives, in float32.

Prints the block's roofline, its traffic, its temporaries and the compiler's estimate of cycles, and
then the cycles of the kernel, which that estimate leaves out: instructions of its machine code,
each as often as its loops run it, without waiting for memory. Takes minutes; no TPU is needed.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import tempfile

from vit_jax.profiling import topology

TOKENS, WIDTH, HEADS, HIDDEN = 197, 768, 12, 3072
DUMP = 'VIT_JAX_BENCH_DUMP'
FLAGS = (
    '--xla_jf_dump_to={} --xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*'
)
INSTRUCTION = re.compile(r'^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]+)?: (>*)', re.M)


def block(attention: str, batch: int, slice_: topology.Topology, residual: str) -> None:
    import jax
    import jax.numpy as jnp

    from vit_jax.nn.attention_choice import Devices, runs_on
    from vit_jax.nn.blocks import Block
    from vit_jax.profiling import roofline, scheduled_hlo

    device = topology.devices(slice_)[0]
    model = Block(HEADS, HIDDEN, dtype=jnp.bfloat16, attention_by=attention)
    x = jax.ShapeDtypeStruct((batch, TOKENS, WIDTH), jnp.dtype(residual))

    def train_step(params, x, grad):
        with runs_on(Devices(device.device_kind)):
            out, pull = jax.vjp(lambda params, x: model.apply(params, x, True), params, x)
        return out, pull(grad)

    params = jax.eval_shape(model.init, jax.random.key(0), x)
    compiled = compile_for(device, train_step, params, x, x)
    found = roofline.operations(scheduled_hlo.parse(compiled.as_text()))
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    print(
        f'{1e3 * roofline.bound(found, slice_.chip):.2f} ms at least, '
        f'{sum(op.count * op.bytes for op in found) / 1e9:.2f} GB moved, '
        f'{temporaries / 1e9:.2f} GB of temporaries, '
        f'{sum(op.count * op.cycles for op in found if op.cycles) / 1e6:.2f} Mcycles estimated'
    )


def kernel(batch: int) -> None:
    from vit_jax.nn import attention_kernel

    unrolled = attention_kernel.UNROLLED // attention_kernel._score_bytes(TOKENS)
    for name, most in (('forward', unrolled), ('backward', 0)):
        group = attention_kernel._group(WIDTH, HEADS, most)
        (path,) = pathlib.Path(os.environ[DUMP]).glob(f'*{name}_kernel*[0-9]-final_bundles.txt')
        depths = [len(depth) for depth in INSTRUCTION.findall(path.read_text())]
        each = depths.count(1) + WIDTH // group * sum(depth > 1 for depth in depths)
        print(f'{name} kernel: {each} cycles an image, {batch * each / 1e6:.2f} Mcycles')


def compile_for(device, function, *shapes):
    import jax

    placed = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=placed), shapes)
    return jax.jit(function).lower(*args).compile()


def main(attention: str, batch: str, name: str = 'v5e:1x1', residual: str = 'bfloat16') -> None:
    slice_ = topology.parse(name)
    block(attention, int(batch), slice_, residual)
    if attention == 'pallas':
        kernel(int(batch))


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
