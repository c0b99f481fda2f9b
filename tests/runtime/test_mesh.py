"""Slices of TPUs in the mesh, emulated on CPU devices: what is on which, and what crosses."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import toys
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from vit_jax.config.run import Parallel, Step
from vit_jax.errors import UserError
from vit_jax.profiling import hlo, roofline
from vit_jax.runtime import mesh, sharding
from vit_jax.step import init_state, init_variables, make_train_step

ON_SLICES = {'slices': 2, 'fsdp': 2, 'min_split_size': 8}


def chips(*slices, platform='tpu'):
    return [SimpleNamespace(id=i, slice_index=s, platform=platform) for i, s in enumerate(slices)]


def ids(parts):
    return [[device.id for device in part] for part in parts]


def test_the_devices_say_on_which_slices_they_are():
    assert ids(mesh.by_slice(chips(1, 1, 0, 0))) == [[2, 3], [0, 1]]
    assert ids(mesh.by_slice(chips(1, 1, 0, 0), 2)) == [[2, 3], [0, 1]]
    assert ids(mesh.by_slice(chips(0, 0, 1, 1, platform='gpu'))) == [[0, 1, 2, 3]]


def test_devices_of_one_slice_are_divided_in_their_order():
    assert ids(mesh.by_slice(chips(0, 0, 0, 0), 2)) == [[0, 1], [2, 3]]
    grid = mesh.make_mesh(jax.devices()[:8], fsdp=2, tensor=2, slices=2)
    assert dict(grid.shape) == {'slice': 2, 'data': 1, 'fsdp': 2, 'tensor': 2}
    assert [d.id for d in grid.devices[1].flat] == [d.id for d in jax.devices()[4:8]]


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = 'cpu'
    device_kind: str = 'cpu'


@pytest.mark.parametrize(
    ('grid', 'expected'),
    [
        # As mesh_utils arranges the four hosts of v5e:4x4.
        (
            [[p] for p in (0, 0, 1, 1, 1, 1, 0, 2, 3, 3, 3, 3, 2, 2, 2, 0)],
            {0: (0, 1, 6, 15), 1: (2, 3, 4, 5), 2: (7, 12, 13, 14), 3: (8, 9, 10, 11)},
        ),
        ([[0], [0], [1], [1]], {0: (0, 1), 1: (2, 3)}),
        ([[1], [0]], {0: (1,), 1: (0,)}),
        # Two hosts share the axis `tensor`.
        ([[0, 0, 1, 1], [0, 0, 1, 1]], {0: (0, 1), 1: (0, 1)}),
        ([[0, 1], [2, 3]], {0: (0,), 1: (0,), 2: (1,), 3: (1,)}),
    ],
)
def test_processes_hold_the_shards_of_their_devices(grid, expected):
    devices = [[Device(10 * i + j, p) for j, p in enumerate(row)] for i, row in enumerate(grid)]
    places = np.array(devices, object).reshape(1, len(grid), 1, -1)
    made = Mesh(places, mesh.AXES, axis_types=(AxisType.Auto,) * 4)
    assert {p: mesh.shards_of(made, len(grid), p) for p in expected} == expected


@pytest.mark.parametrize(
    ('devices', 'slices', 'message'),
    [
        (chips(0, 0, 1, 1), 1, r'parallel.slices=1: .* 2'),
        (chips(0, 0, 0, 1), None, 'slices have 1 to 3 devices'),
        (chips(0, 0, 0, 0), 3, r'config.parallel.slices=3: .* 4 devices'),
        (chips(0, 0, 0, 0), 0, r'config.parallel.slices=0: .* 4 devices'),
    ],
)
def test_slices_that_cannot_be_are_one_line(devices, slices, message):
    with pytest.raises(UserError, match=message) as error:
        mesh.by_slice(devices, slices)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'fsdp': 8}, r'fsdp=8 times tensor=1 .* 4 .* 2 slices'),
        ({'tensor': 8}, r'tensor=8 .* 4'),
        ({'rules': (('kernel$', ('slice', None)),)}, "rules.*'slice'"),
    ],
)
def test_parameters_are_split_within_a_slice_alone(options, message):
    with pytest.raises(UserError, match=message):
        sharding.make_layout(jax.devices()[:8], Parallel(slices=2, **options))


@pytest.mark.parametrize(
    ('spec', 'shape', 'expected'),
    [
        (P(), (6, 8), P(None, ('data', 'fsdp'))),
        (P(), (16, 8), P(('data', 'fsdp'), None)),
        (P('fsdp'), (16, 6), P(('fsdp', 'data'), None)),
        (P('fsdp'), (2, 6), P(('fsdp',), ('data',))),
        (P(None, 'fsdp'), (3, 6), P(None, ('fsdp',))),
        (P(), (3,), P(None)),
        (P(), (), P()),
    ],
)
def test_gradients_are_divided_among_all_devices_of_a_slice(spec, shape, expected):
    grid = mesh.make_mesh(jax.devices()[:8], fsdp=2, slices=2)
    assert mesh.spread_spec(spec, shape, grid) == expected


@pytest.mark.parametrize(
    ('spec', 'shape', 'expected'),
    [
        (P('data', None, None, None), (768, 3, 12, 64), (768, 2304)),
        (P(None, None, ('data', 'fsdp')), (12, 64, 768), (768, 768)),
        (P(None, 'data', None), (12, 64, 8), (12, 64, 8)),
        (P('fsdp', None, 'data'), (12, 64, 8), (12, 64, 8)),
        (P('data', None), (12, 64), (12, 64)),
        (P(None, None, None), (3, 5, 7), (3, 5, 7)),
    ],
)
def test_gradients_cross_as_matrices_so_that_little_of_them_is_padding(spec, shape, expected):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert mesh.matrix_shape(spec, leaf) == expected


def init():
    example = {k: jnp.asarray(x[:1]) for k, x in toys.make_batch().items()}
    variables = init_variables(toys.Model(), toys.Task(), example, seed=0)
    return init_state(variables, optax.sgd(1.0), seed=0, ema=False)


@functools.cache
def exchanged():
    """(whether in a loop, collective) of a step of four microbatches on two slices of four."""
    layout = sharding.make_layout(jax.devices()[:8], Parallel(**ON_SLICES))
    args = toys.Model(), toys.Task(), optax.sgd(1.0), Step(accum_steps=4), layout
    abstract = jax.eval_shape(init)
    step = layout.compile_train(make_train_step(*args), abstract)
    batch = sharding.abstract_batch(layout, toys.make_batch())
    lowered = step.lower(sharding.abstract_target(layout, abstract), batch)
    module = hlo.parse_module(lowered.compile().as_text())
    return layout, abstract, list(found_in(module, module.entry, in_loop=False))


def found_in(module, computation, in_loop):
    for instruction in computation:
        if instruction.opcode.removesuffix('-start') in roofline.KINDS:
            yield in_loop, roofline.collective(module, computation, instruction)
        for name in instruction.called:
            inside = in_loop or instruction.opcode == 'while'
            yield from found_in(module, module.computations[name], inside)


@pytest.mark.slow
def test_gradients_cross_once_a_step_and_not_once_a_microbatch():
    layout, abstract, found = exchanged()
    axes = [(loop, c.axis(layout.mesh.shape).split('+'), c) for loop, c in found]
    assert any('fsdp' in names for loop, names, _ in axes if loop), 'loops are looked into'
    crossing = [(loop, names, c) for loop, names, c in axes if 'slice' in names]
    assert crossing and not any(loop for loop, _, _ in crossing)
    assert {(*names, c.kind) for _, names, c in crossing} == {('slice', 'all-reduce')}
    # A device sends its quarter of every gradient whose size allows it, and a few metrics.
    leaves = jax.tree.leaves(abstract.params)
    parts = sum(x.size * 4 // (4 if any(n % 4 == 0 for n in x.shape) else 1) for x in leaves)
    assert parts <= sum(c.size for *_, c in crossing) <= parts + 64


@pytest.mark.slow
def test_every_slice_has_all_parameters_and_its_own_rows():
    layout = sharding.make_layout(jax.devices()[:8], Parallel(**ON_SLICES))
    batch = layout.put_batch(toys.make_batch())
    np.testing.assert_array_equal(batch['x'], toys.make_batch()['x'])
    first = {s.device: s.index[0].start for s in batch['x'].addressable_shards}
    assert [first[d] for d in layout.mesh.devices.flat] == list(range(0, toys.ROWS, 4))
    for x in jax.tree.leaves(layout.create(init).params):
        parts = {s.device: str(s.index) for s in x.addressable_shards}
        one, two = ([parts[d] for d in part.flat] for part in layout.mesh.devices)
        assert one == two
