"""Parser of scheduled HLO modules, from XLA's text to computations of instructions.

On GPUs, matmuls, convolutions and attention are calls of NVIDIA's libraries.

On TPUs a layout contains the tiling and the memory space of an array:
`f32[12,64]{1,0:T(8,128)S(1)}` is padded to 16 x 128 elements in VMEM, memory space 1. HBM is
space 0, which is omitted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$')
ARRAY = re.compile(r'([a-z]\w*)\[([\d,<= ]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?')
PARENTHESIS = re.compile(r'[()]')
COMMENT = re.compile(r'/\*.*?\*/')
REFERENCE = re.compile(r'%([\w.\-]+)')
CALLED = re.compile(r'\b(?:calls|to_apply|body)=%([\w.\-]+)')
BRANCHES = re.compile(r'(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+))')
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
ESTIMATED = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
CONTRACTED = re.compile(r'lhs_contracting_dims=\{([\d,]*)\}')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Of a call of cuBLAS; and of cuDNN's attention, the shape of the scores, [B, H, N, M].
LISTED_CONTRACTED = re.compile(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]')
SCORES = re.compile(r'"intermediate_tensor_shape": ?\{[^{]*?"dimensions": ?\[([^\]]*)\]')
KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
PART = re.compile(r'\b(condition|body)=%([\w.\-]+)')
INDEX = re.compile(r'index=(\d+)')


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a chip.

    Attributes:
      dtype: HLO's dtype, such as `bf16`.
      shape: Shape without padding.
      size: Bytes including the padding of tiles.
      space: Memory space; 0 is HBM.
    """

    dtype: str
    shape: tuple[int, ...]
    size: int
    space: int = 0

    @property
    def hbm(self) -> int:
        """Bytes in HBM; 0 in another space."""
        return 0 if self.space else self.size


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      name: Name without the percent sign.
      opcode: `fusion`, `copy-start`, ...
      arrays: Arrays of the result; for a tuple, all elements in order.
      operands: Names of the operands.
      text: Text of the operands in parentheses.
      attributes: Text after the operands.
      root: Whether it is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    attributes: str
    root: bool

    @property
    def called(self) -> list[str]:
        """Computations that it calls, or the branches of a conditional."""
        names = CALLED.findall(self.attributes)
        for group, name in BRANCHES.findall(self.attributes):
            names += REFERENCE.findall(group or name)
        return names

    @property
    def op_name(self) -> str:
        """JAX's name of the operation; empty for instructions that the compiler adds."""
        match = OP_NAME.search(self.attributes)
        return match[1].replace("\\'", "'") if match else ''

    @property
    def target(self) -> str:
        """Function of a custom call, such as `__cublas$lt$matmul`; empty for other operations."""
        match = TARGET.search(self.attributes)
        return match[1] if match else ''

    @property
    def cycles(self) -> int | None:
        """Compiler's estimate of cycles; None before code generation."""
        match = CYCLES.search(self.attributes)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, name: str) -> Instruction:
        return self.instructions[name]

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self if i.root)

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """Parameters in the order of a caller's operands."""
        return sorted((i for i in self if i.opcode == 'parameter'), key=lambda i: int(i.text))

    @functools.cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """Instructions that read each instruction's result."""
        readers: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self:
            for name in dict.fromkeys(instruction.operands):
                readers[name].append(instruction)
        return readers


@dataclasses.dataclass(frozen=True)
class Module:
    """Program of one chip."""

    computations: Mapping[str, Computation]
    entry: Computation


def parse_module(text: str) -> Module:
    """Parse the text of a module.

    Raises:
      ValueError: if it has no entry, or its end is missing.
    """
    computations: dict[str, Computation] = {}
    lines: dict[str, Instruction] = {}
    name, is_entry, entry = '', False, None
    for line in text.splitlines():
        if match := HEADER.match(line):
            name, is_entry, lines = match[2], bool(match[1]), {}
        elif line.startswith('}') and name:
            computations[name] = Computation(name, lines)
            entry = computations[name] if is_entry else entry
            name = ''
        elif name and ' = ' in line:
            instruction = _instruction(line)
            lines[instruction.name] = instruction
    if entry is None:
        raise ValueError('the module has no entry, or its end is missing')
    return Module(computations, entry)


def arrays(shape: str) -> tuple[Array, ...]:
    """Parse the arrays of a shape, which may be a tuple."""
    return tuple(_array(*match) for match in ARRAY.findall(shape))


def _instruction(line: str) -> Instruction:
    left, _, right = COMMENT.sub('', line).strip().partition(' = ')
    end = _close(right) + 1 if right.startswith('(') else right.index(' ')
    shape, call = right[:end], right[end:].lstrip()
    opcode, _, _ = call.partition('(')
    close = _close(call, len(opcode))
    text = call[len(opcode) + 1 : close]
    return Instruction(
        name=left.removeprefix('ROOT ').lstrip('%'),
        opcode=opcode,
        arrays=arrays(shape),
        operands=() if opcode in ('parameter', 'constant') else tuple(REFERENCE.findall(text)),
        text=text,
        attributes=call[close + 1 :],
        root=left.startswith('ROOT '),
    )


def _close(text: str, start: int = 0) -> int:
    """Find the parenthesis that closes the one at `start`."""
    depth = 0
    for match in PARENTHESIS.finditer(text, start):
        depth += 1 if match[0] == '(' else -1
        if not depth:
            return match.start()
    raise ValueError(f'a parenthesis is not closed: {text[:80]}')


@functools.cache
def _array(dtype: str, dims: str, order: str, layout: str) -> Array:
    shape = tuple(int(re.sub(r'\D', '', n)) for n in dims.split(',') if n)
    minor_to_major = [int(n) for n in order.split(',') if n]
    lengths = [shape[i] for i in reversed(minor_to_major)] if minor_to_major else list(shape)
    tile = re.search(r'T\(([\d,]+)\)', layout)
    sizes = [int(n) for n in tile[1].split(',')] if tile else []
    for i, size in enumerate(reversed(sizes), 1):
        if i <= len(lengths):
            lengths[-i] = -(-lengths[-i] // size) * size
        else:
            lengths.insert(0, size)
    space = re.search(r'S\((\d+)\)', layout)
    size = math.ceil(math.prod(lengths) * _bits(dtype) / 8)
    return Array(dtype, shape, size, int(space[1]) if space else 0)


def _bits(dtype: str) -> int:
    """Return the bits of an element; 0 for types without data."""
    if dtype == 'pred':
        return 8
    match = re.match(r'(?:bf|f|s|u|c)(\d+)', dtype)
    return int(match[1]) if match else 0


def instruction_flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Count the FLOPs of an instruction and of every computation that it calls."""
    if instruction.opcode == 'convolution':
        return _convolution(computation, instruction)
    if instruction.opcode == 'dot':
        match = CONTRACTED.search(instruction.attributes)
        lhs = computation[instruction.operands[0]].arrays[0].shape
        terms = math.prod(lhs[int(i)] for i in (match[1] if match else '').split(',') if i)
        return 2 * math.prod(instruction.arrays[0].shape) * terms
    if instruction.opcode == 'custom-call':
        return _custom_call(computation, instruction)
    return sum(
        instruction_flops(module, called, inner)
        for called in map(module.computations.__getitem__, instruction.called)
        for inner in called
    )


def _custom_call(computation: Computation, instruction: Instruction) -> int:
    """Count the FLOPs of a kernel that declares them, cuBLAS or cuDNN; 0 for other calls."""
    attributes = instruction.attributes
    if match := ESTIMATED.search(attributes):
        return int(match[1])
    library, _, function = instruction.target.partition('$')
    shapes = [computation[name].arrays[0].shape for name in instruction.operands]
    if library == '__cublas':
        dims = _parse_list(LISTED_CONTRACTED, attributes)
        return 2 * math.prod(instruction.arrays[0].shape) * math.prod(shapes[0][i] for i in dims)
    if library == '__cudnn' and function.startswith('fmha'):
        matmuls = 5 if 'Backward' in function else 2  # the backward pass recomputes the scores
        return matmuls * 2 * math.prod(_parse_list(SCORES, attributes)) * shapes[0][-1]
    if library == '__cudnn' and function.startswith('conv'):
        return _cudnn_convolution(function, instruction, shapes)
    return 0


def _parse_list(pattern: re.Pattern[str], attributes: str) -> list[int]:
    """Parse a list of numbers in a library call's configuration; empty if missing."""
    match = pattern.search(attributes)
    return [int(n) for n in re.findall(r'\d+', match[1])] if match else []


def _cudnn_convolution(
    function: str, instruction: Instruction, shapes: list[tuple[int, ...]]
) -> int:
    """Count the FLOPs of a convolution or its gradient, which has the forward's axes."""
    result = instruction.arrays[0].shape
    if function == 'convBackwardInput':  # of the outputs' gradient and the kernel
        lhs, rhs, out = result, shapes[1], shapes[0]
    elif function == 'convBackwardFilter':  # of the inputs and the outputs' gradient
        lhs, rhs, out = shapes[0], result, shapes[1]
    else:
        lhs, rhs, out = shapes[0], shapes[1], result
    return _convolution_flops(instruction, lhs, rhs, out)


def _convolution(computation: Computation, instruction: Instruction) -> int:
    lhs, rhs = (computation[name].arrays[0].shape for name in instruction.operands[:2])
    return _convolution_flops(instruction, lhs, rhs, instruction.arrays[0].shape)


def _convolution_flops(
    instruction: Instruction, lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int]
) -> int:
    labels = LABELS.search(instruction.attributes)
    if labels is None:
        raise ValueError(f'{instruction.name}: a convolution without dim_labels')
    left, right, out = labels.groups()
    window = _window(instruction.attributes)
    terms = rhs[right.index('i')]
    for axis in (c for c in out if c.isdigit()):
        steps = {key: values[int(axis)] for key, values in window.items()}
        terms *= _meetings(lhs[left.index(axis)], result[out.index(axis)], **steps)
    return 2 * result[out.index('b')] * result[out.index('f')] * terms


def _window(attributes: str) -> dict[str, list[int]]:
    """Parse a window's parameters for every spatial dimension, with defaults."""
    match = re.search(r'window=\{([^}]*)\}', attributes)
    fields = dict(re.findall(r'(\w+)=(\S+)', match[1] if match else ''))
    size = [int(n) for n in fields['size'].split('x')] if fields else []
    pads = fields.get('pad', 'x'.join(['0_0'] * len(size)))
    window = {'size': size, 'low': [int(pad.split('_')[0]) for pad in pads.split('x') if pad]}
    for key in ('stride', 'lhs_dilate', 'rhs_dilate'):
        text = fields.get(key)
        window[key] = [int(n) for n in text.split('x')] if text else [1] * len(size)
    return window


@functools.cache
def _meetings(
    length: int, outputs: int, size: int, low: int, stride: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Count pairs (output, window position) that read an input instead of padding."""
    last = (length - 1) * lhs_dilate
    return sum(
        0 <= (position := out * stride + offset * rhs_dilate - low) <= last
        and position % lhs_dilate == 0
        for out in range(outputs)
        for offset in range(size)
    )


def trip_count(module: Module, outside: Computation, loop: Instruction) -> int:
    """Find the trip count of a `while`, from the compiler or its counter; 1 if unclear.

    A counter is an element of the loop's carried tuple that is compared to a constant.
    """
    if match := KNOWN.search(loop.attributes):
        return int(match[1])
    parts = {part: module.computations[name] for part, name in PART.findall(loop.attributes)}
    condition, body = parts['condition'], parts['body']
    compared = [_source(condition, name) for name in condition.root.operands]
    if condition.root.opcode != 'compare' or 'direction=LT' not in condition.root.attributes:
        return 1
    counter, limit = compared
    if counter.opcode != 'get-tuple-element' or limit.opcode != 'constant':
        return 1
    index = int(INDEX.search(counter.attributes)[1])  # type: ignore[index]
    carried = _source(outside, loop.operands[0])
    start = _constant(outside, carried.operands[index]) if carried.opcode == 'tuple' else None
    step = _step(body, _source(body, body.root.operands[index]))
    return -(-(int(limit.text) - (start or 0)) // step)


def count_rematerialized(module: Module) -> int:
    """Count instructions that XLA repeats to save memory, such as `dot.3.remat2`."""
    return sum(
        re.search(r'\.remat\d*(\.|$)', instruction.name) is not None
        for computation in module.computations.values()
        for instruction in computation
    )


def _step(body: Computation, counted: Instruction) -> int:
    """Find the increment of a counter; 1 if unclear."""
    added = [_constant(body, name) for name in counted.operands] if counted.opcode == 'add' else []
    return next((n for n in added if n), 1)


def _constant(computation: Computation, name: str) -> int | None:
    instruction = _source(computation, name)
    return (
        int(instruction.text)
        if instruction.opcode == 'constant' and instruction.text.isdigit()
        else None
    )


def _source(computation: Computation, name: str) -> Instruction:
    """Find the original of an instruction that may be a copy."""
    instruction = computation[name]
    while instruction.opcode in ('copy', 'bitcast', 'copy-done', 'copy-start'):
        instruction = computation[instruction.operands[0]]
    return instruction
