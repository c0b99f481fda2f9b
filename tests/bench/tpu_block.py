"""Training steps of one Transformer block, compiled for a TPU.

Each is value and gradients of a block in bfloat16 with float32 parameters. `tests/bench/tpu.py`
makes the table of them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
import tempfile
from typing import Any, NamedTuple

import compiler

from vit_jax.profiling import hlo, preflight, roofline, topology


class Sizes(NamedTuple):
    """Of a block."""

    tokens: int
    width: int
    heads: int
    hidden: int


# Of ViT-B/16, of the base Transformer with sentences of 64 tokens, of the encoder of DETR with an
# image of 800 x 1088 pixels or, as after a hyphen, of so many squared; likewise of ViT-L/16.
# `axial` are layers of ColTran with 64 lines of 64 pixels, `color` a block of the Colorizer's
# queries, `object` a block of DETR's decoder, `map` SigLIP's pooling.
BLOCKS = {
    'vit': Sizes(197, 768, 12, 3072),
    'encoder': Sizes(64, 512, 8, 2048),
    'decoder': Sizes(64, 512, 8, 2048),
    'detr': Sizes(850, 256, 8, 2048),
    'detr-1344': Sizes(1764, 256, 8, 2048),
    'vit-512': Sizes(1025, 1024, 16, 4096),
    'vit-896': Sizes(3137, 1024, 16, 4096),
    'axial-row': Sizes(64, 512, 4, 512),
    'axial-column': Sizes(64, 512, 4, 512),
    'axial-causal': Sizes(64, 512, 4, 512),
    'color': Sizes(196, 768, 12, 3072),
    'object': Sizes(850, 256, 8, 2048),
    'object-1344': Sizes(1764, 256, 8, 2048),
    'map': Sizes(256, 768, 12, 3072),
}
OBJECTS = 100  # queries of `object`
CROSS = ('decoder', 'axial-causal', 'color', 'object', 'object-1344')  # which have two inputs
FIELDS = {
    'decoder': {'causal': True},
    'axial-row': {'axis': 'row'},
    'axial-column': {'axis': 'column'},
    'axial-causal': {'axis': 'row', 'causal': True},
}
# The block of ViT put together from the layers of flax, as big_vision's is.
FLAX = 'flax'
KERNELS = (
    '--xla_jf_dump_to={} --xla_jf_dump_llo_text=true '
    '--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*'
)
INSTRUCTION = re.compile(r'^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]+)?: (>*)', re.M)


@dataclasses.dataclass(frozen=True)
class Step:
    """What is compiled.

    Attributes:
      block: of BLOCKS.
      attention: `xla`, `pallas` or FLAX.
      batch: examples on the chip.
      chip: the generation, as `v5e`.
      residual: type of what the block gets and gives.
      rate: at which weights of attention are dropped.
    """

    block: str
    attention: str
    batch: int
    chip: str = 'v5e'
    residual: str = 'bfloat16'
    rate: float = 0.0

    @property
    def kind(self) -> str:
        """Of the block, `vit` or another."""
        return self.block.partition('-')[0]

    @property
    def slice(self) -> topology.Topology:
        chip = topology.CHIPS[self.chip]
        return topology.Topology(chip, (1,) * chip.dims)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the compiler says of it.

    Attributes:
      seconds: at least.
      moved: bytes from and to HBM.
      temporaries: bytes.
      cycles: the compiler's estimate, of all but kernels, where it was waited for.
      kernel_cycles: instructions of the kernels' machine code, each as often as its loops run it,
        without waiting for memory; likewise.
    """

    seconds: float
    moved: int
    temporaries: int
    cycles: int | None = None
    kernel_cycles: int | None = None


def cost(step: Step, cycles: bool = False) -> Cost:
    """Compiles it; `cycles` waits for machine code, minutes."""
    with tempfile.TemporaryDirectory() as folder:
        dump = folder if cycles and step.attention == 'pallas' else ''
        compiled = compiler.compiled(step.slice, cycles, dump=dump, **dataclasses.asdict(step))
        in_kernels = _kernel_cycles(step, pathlib.Path(folder)) if dump else None
    module = hlo.parse_module(compiled.module)
    found = roofline.operations(module)
    return Cost(
        roofline.bound(found, step.slice.chip),
        sum(op.count * op.bytes for op in found),
        preflight.memory_parts(compiled.buffers, module).get(preflight.TEMPORARIES, 0),
        sum(op.count * op.cycles for op in found if op.cycles) if cycles else None,
        in_kernels,
    )


def lower(dump: str, **fields: Any):
    """The lowered step; `dump` is a folder for the machine code of kernels, or empty."""
    if dump:
        os.environ['LIBTPU_INIT_ARGS'] = KERNELS.format(dump)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from vit_jax.runtime.mesh import trace_on

    step = Step(**fields)
    device = topology.devices(step.slice)[0]
    tokens, width, *_ = BLOCKS[step.block]
    apply, init = _functions(step)
    grid = (tokens, tokens) if step.kind == 'axial' else (tokens,)
    x = jax.ShapeDtypeStruct((step.batch, *grid, width), jnp.dtype(step.residual))
    mask = jax.ShapeDtypeStruct((step.batch, 1, 1, tokens), jnp.bool_)
    first = x.update(shape=(step.batch, OBJECTS, width)) if step.kind == 'object' else x
    inputs = (first, x) if step.block in CROSS else (first,)

    def train_step(params, inputs, mask, positions, seed, grad):
        key = jax.random.wrap_key_data(seed)
        function = functools.partial(apply, mask=mask, positions=positions, key=key)
        out, pull = jax.vjp(function, params, inputs)
        return out, pull(grad)

    params = jax.eval_shape(init, jax.random.key(0), inputs, mask, x)
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    out = x.update(shape=(step.batch, width)) if step.kind == 'map' else first
    shapes = (params, inputs, mask, x, seed, out)
    mesh = Mesh(np.array([device]), ('data',), axis_types=(AxisType.Auto,))
    return jax.jit(trace_on(mesh, train_step)).lower(*compiler.placed(step.slice, shapes))


def _functions(step: Step):
    """The block of its inputs, mask, positions and key, and what makes its parameters."""
    model = _flax_block(step) if step.attention == FLAX else _block(step)

    def arguments(inputs, mask, positions):
        from vit_jax.nn.axial import Context
        from vit_jax.nn.encoder_decoder import Memory

        if step.attention == FLAX or step.block in ('axial-row', 'axial-column'):
            return inputs
        if step.block == 'axial-causal':
            return inputs[0], Context(inputs[1])
        if step.kind in ('decoder', 'object'):
            return inputs[0], Memory(inputs[1], mask), True
        if step.kind == 'color':
            return *inputs, positions, True
        if step.kind in ('vit', 'map'):
            return *inputs, True
        return *inputs, mask, True, positions if step.kind == 'detr' else None

    def apply(params, inputs, mask, positions, key):
        return model.apply(params, *arguments(inputs, mask, positions), rngs={'dropout': key})

    def init(key, *args):
        return model.init(key, *arguments(*args))

    return apply, init


def _block(step: Step):
    import jax.numpy as jnp

    from vit_jax.models.colorizer import CrossBlock
    from vit_jax.nn.axial import AxialLayer
    from vit_jax.nn.blocks import Block, MapHead
    from vit_jax.nn.encoder_decoder import DecoderBlock, EncoderBlock

    classes = {
        **{'vit': Block, 'decoder': DecoderBlock, 'object': DecoderBlock},
        **{'axial': AxialLayer, 'color': CrossBlock, 'map': MapHead},
    }
    *_, heads, hidden = BLOCKS[step.block]
    fields = {'dtype': jnp.bfloat16, 'attention_by': step.attention} | FIELDS.get(step.block, {})
    if step.kind == 'map':
        fields.pop('attention_by')
    if step.rate:
        fields['attention_dropout'] = step.rate
    return classes.get(step.kind, EncoderBlock)(heads, hidden, **fields)


def _flax_block(step: Step):
    """Pre-norm: flax's attention, with a product each for queries, keys and values, and an MLP."""
    import flax.linen as nn
    import jax.numpy as jnp

    _, width, heads, hidden = BLOCKS[step.block]

    class FlaxBlock(nn.Module):
        @nn.compact
        def __call__(self, x):
            attention = nn.MultiHeadDotProductAttention(
                heads, dtype=jnp.bfloat16, deterministic=True
            )
            x = x + attention(nn.LayerNorm()(x))
            y = nn.Dense(hidden, dtype=jnp.bfloat16)(nn.LayerNorm()(x))
            return x + nn.Dense(width, dtype=jnp.bfloat16)(nn.gelu(y))

    return FlaxBlock()


def _kernel_cycles(step: Step, folder: pathlib.Path) -> int:
    from vit_jax.nn import attention_choice
    from vit_jax.nn.attention import AttentionSpec
    from vit_jax.nn.kernels.attention import UNROLLED
    from vit_jax.nn.kernels.heads import group_width, score_bytes
    from vit_jax.nn.kernels.interface import Pallas

    tokens, width, heads, _ = BLOCKS[step.block]
    call = AttentionSpec((step.batch, tokens, width), tokens, heads, 'bfloat16', rate=step.rate)
    kernel = attention_choice.choose('pallas', call, attention_choice.Target(step.slice.chip.kind))
    assert isinstance(kernel, Pallas)
    block = kernel.block
    unrolled = UNROLLED // score_bytes(tokens, tokens)
    each = 0
    for way, most in (('forward', unrolled), ('backward', 0)):
        group = group_width(width, heads, 0 if block else most)
        programs = width // group * -(-tokens // block) if block else 1
        for path in folder.glob(f'*{way}_kernel*[0-9]-final_bundles.txt'):
            depths = [len(depth) for depth in INSTRUCTION.findall(path.read_text())]
            deeper = sum(depth > 1 for depth in depths)
            each += programs * depths.count(1) + (0 if block else width // group * deeper)
    return each * step.batch
