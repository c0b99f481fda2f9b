"""FLOPs, bytes, memory and collectives of a program as the compiler of TPUs schedules it."""

import pathlib

import pytest

from vit_jax.profiling import hlo, preflight, roofline, topology

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'golden' / 'scheduled_hlo.txt'
V5E = topology.CHIPS['v5e']


@pytest.fixture(scope='module')
def module():
    return hlo.parse_module(GOLDEN.read_text())


@pytest.fixture(scope='module')
def found(module):
    return {(op.path, op.kind): op for op in roofline.operations(module)}


@pytest.mark.parametrize(
    ('shape', 'size', 'space'),
    [
        ('f32[12,64]{1,0:T(8,128)S(1)}', 16 * 128 * 4, 1),
        ('f32[12,64]{0,1:T(8,128)}', 64 * 128 * 4, 0),
        ('bf16[3,9,100]{2,1,0:T(8,128)(2,1)}', 3 * 16 * 128 * 2, 0),
        ('f32[10]{0:T(128)}', 512, 0),
        ('pred[]{:T(512)}', 512, 0),
        ('s32[7]{0}', 28, 0),
    ],
)
def test_arrays_have_the_padding_of_their_tiles(shape, size, space):
    (array,) = hlo.arrays(shape)
    assert (array.size, array.space) == (size, space)


def test_text_that_was_not_written_to_its_end_is_refused():
    text = GOLDEN.read_text()
    with pytest.raises(ValueError, match='end is missing'):
        hlo.parse_module(text[: text.rindex('}')])


def test_products_count_two_flops_a_multiplication(found):
    assert found['encoder/block_*/mlp/fc1, forward', 'fusion'].flops == 2 * 16 * 100 * 64
    # A batch of products: every output meets one input along the dilated dimension.
    batched = found['encoder/block_*/attention, backward', 'convolution']
    assert batched.flops == 2 * 4 * 30 * 50 * 12


CONVOLUTION = """
ENTRY %main (x: f32[1,4,1], k: f32[{size},1,1]) -> f32[1,{outputs},1] {{
  %x = f32[1,4,1]{{2,1,0}} parameter(0)
  %k = f32[{size},1,1]{{2,1,0}} parameter(1)
  ROOT %y = f32[1,{outputs},1] convolution(%x, %k), window={{{window}}}, dim_labels=b0f_0io->b0f
}}
"""


@pytest.mark.parametrize(
    ('size', 'outputs', 'window', 'products'),
    [
        (3, 4, 'size=3 pad=1_1', 10),
        (3, 2, 'size=3 pad=1_1 stride=2', 5),
        (2, 2, 'size=2 rhs_dilate=2', 4),
    ],
)
def test_a_convolution_does_not_count_its_padding(size, outputs, window, products):
    text = CONVOLUTION.format(size=size, outputs=outputs, window=window)
    module = hlo.parse_module(text)
    assert hlo.instruction_flops(module, module.entry, module.entry['y']) == 2 * products


def test_bytes_are_those_of_hbm_alone(found):
    # The weight is in VMEM when the product reads it; bringing it there is a copy of its own.
    product = found['encoder/block_*/mlp/fc1, forward', 'fusion']
    assert product.bytes == 16 * 128 * 2 + 16 * 128 * 2
    copy = found['copy-start', 'copy-start']
    assert (copy.bytes, copy.asynchronous) == (104 * 128 * 2, True)


def test_a_loop_counts_the_slices_that_it_reads_and_writes_as_often_as_it_runs(found):
    read, write = found['fusion', 'fusion'], found['update', 'fusion']
    assert read.count == write.count == 10
    assert read.bytes == write.bytes == 8 * 128 * 4


def test_what_a_fusion_within_a_fusion_slices_is_all_that_is_read_and_written():
    """As where the product of a scanned block takes its weights out of their stack itself."""
    stack, part = 'f32[10,8,128]{2,1,0:T(8,128)}', 'f32[1,8,128]{2,1,0:T(8,128)}'
    text = f"""HloModule m

%inner_read (s.1: f32[10,8,128], i.1: s32[]) -> f32[1,8,128] {{
  %s.1 = {stack} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %slice = {part} dynamic-slice(%s.1, %i.1, %i.1, %i.1), dynamic_slice_sizes={{1,8,128}}
}}

%inner_write (s.2: f32[10,8,128], i.2: s32[], x.2: f32[1,8,128]) -> f32[10,8,128] {{
  %s.2 = {stack} parameter(0)
  %i.2 = s32[] parameter(1)
  %x.2 = {part} parameter(2)
  ROOT %update = {stack} dynamic-update-slice(%s.2, %x.2, %i.2, %i.2, %i.2)
}}

%outer (s.3: f32[10,8,128], t.3: f32[10,8,128], i.3: s32[]) -> f32[10,8,128] {{
  %s.3 = {stack} parameter(0)
  %t.3 = {stack} parameter(1)
  %i.3 = s32[] parameter(2)
  %read = {part} fusion(%s.3, %i.3), kind=kLoop, calls=%inner_read
  %sin = {part} sine(%read)
  ROOT %write = {stack} fusion(%t.3, %i.3, %sin), kind=kLoop, calls=%inner_write
}}

ENTRY %main (s: f32[10,8,128], i: s32[]) -> f32[10,8,128] {{
  %s = {stack} parameter(0)
  %i = s32[]{{:T(128)S(6)}} parameter(1)
  %empty = {stack} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %both = {stack} fusion(%s, %empty, %i), kind=kOutput, calls=%outer
}}
"""
    (operation,) = roofline.operations(hlo.parse_module(text))
    assert operation.bytes == 2 * 8 * 128 * 4


BIG, SMALL = 'f32[32,128]{1,0:T(8,128)}', 'f32[8,128]{1,0:T(8,128)}'
SMALL_BYTES = 8 * 128 * 4


def begun(line):
    """The one operation of a program that begins something, as `line` says."""
    text = f"""HloModule m

%slicing (p: f32[32,128]) -> f32[8,128] {{
  %p = {BIG} parameter(0)
  ROOT %inside = {SMALL} slice(%p), slice={{[8:16], [0:128]}}
}}

%updating (q: f32[32,128], r: f32[8,128], j: s32[]) -> f32[32,128] {{
  %q = {BIG} parameter(0)
  %r = {SMALL} parameter(1)
  %j = s32[] parameter(2)
  ROOT %updated = {BIG} dynamic-update-slice(%q, %r, %j, %j)
}}

ENTRY %main (x: f32[32,128], y: f32[8,128], i: s32[]) -> f32[8,128] {{
  %x = {BIG} parameter(0)
  %y = {SMALL} parameter(1)
  %i = s32[]{{:T(128)S(6)}} parameter(2)
  {line}
  ROOT %done = {SMALL} async-done(%begun)
}}
"""
    (operation,) = roofline.operations(hlo.parse_module(text))
    assert operation.asynchronous
    return operation


@pytest.mark.parametrize('space', ['', 'S(1)'], ids=['HBM', 'VMEM'])
@pytest.mark.parametrize(
    ('operands', 'begins'),
    [
        (BIG, 'async-start(%x), calls=%slicing'),
        (BIG, 'slice-start(%x), slice={[8:16], [0:128]}'),
        (f'{BIG}, s32[], s32[]', 'dynamic-slice-start(%x, %i, %i), dynamic_slice_sizes={8,128}'),
    ],
    ids=['called', 'slice', 'dynamic-slice'],
)
def test_of_what_is_sliced_meanwhile_the_slice_moves_alone(operands, begins, space):
    """In the schedule the slice is called, in the text after code generation it is named."""
    kept = SMALL.replace(')}', f'){space}}}')
    operation = begun(f'%begun = (({operands}), {kept}, s32[]{{:S(2)}}) {begins}')
    assert operation.bytes == (1 if space else 2) * SMALL_BYTES


@pytest.mark.parametrize(
    'begins',
    ['async-start(%x, %y, %i), calls=%updating', 'dynamic-update-slice-start(%x, %y, %i)'],
    ids=['called', 'named'],
)
def test_of_what_is_updated_meanwhile_the_update_moves_alone(begins):
    kept = f'({BIG}, {SMALL}, s32[]), {BIG}, s32[]{{:S(2)}}'
    assert begun(f'%begun = ({kept}) {begins}').bytes == 2 * SMALL_BYTES


@pytest.mark.parametrize(
    ('shape', 'begins'),
    [
        (f'({SMALL}, {BIG})', 'all-gather-start(%y), replica_groups={{0,1,2,3}}, dimensions={0}'),
        (f'(({BIG}), {SMALL})', 'reduce-scatter-start(%x), replica_groups={{0,1,2,3}}'),
    ],
    ids=['all-gather', 'reduce-scatter'],
)
def test_of_what_is_exchanged_meanwhile_operand_and_result_move(shape, begins):
    assert begun(f'%begun = {shape} {begins}').bytes == 5 * SMALL_BYTES


def test_a_loop_without_a_known_count_runs_until_its_counter_is_at_the_limit(found):
    assert found['encoder/norm, forward', 'sqrt'].count == 8  # 0, 2, ... 14


def test_collectives_know_their_axis(found):
    op = found['update', 'all-reduce-start']
    assert op.asynchronous
    assert op.collective.groups == ((0, 2), (1, 3))
    assert op.collective.axis({'data': 2, 'fsdp': 2, 'tensor': 1}) == 'data'
    assert op.collective.sent == 8 * 128 * 4  # there and back, each half of it


def test_an_exchange_that_goes_on_beside_other_work_counts_once(module, found):
    ops = roofline.operations(module)
    (gather,) = [op for op in ops if op.collective and op.collective.kind == 'all-gather']
    whole = 64 * 128 * 2
    assert gather.asynchronous
    assert (gather.collective.size, gather.collective.sent) == (whole, whole * 3 / 4)
    assert gather.bytes == whole // 4 + whole
    # The work beside it moves its own bytes alone.
    assert found['encoder/block_*/mlp, forward', 'fusion'].bytes == 2 * 8 * 128 * 4


@pytest.mark.parametrize(
    ('text', 'groups'),
    [
        ('replica_groups={{0,1},{2,3}}', ((0, 1), (2, 3))),
        ('replica_groups=[2,2]<=[4]', ((0, 1), (2, 3))),
        ('replica_groups=[2,2]<=[2,2]T(1,0)', ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4,'b'=1] {'a','b'}", ((0, 1, 2, 3),)),
        (
            "replica_groups=mesh['a'=1,'b'=2,'c'=2], device_ids=([2,2]T(1,0)) {'b'}",
            ((0, 1), (2, 3)),
        ),
        ('source_target_pairs={{0,1},{1,0}}', ((0, 1), (1, 0))),
    ],
)
def test_groups_in_every_notation(text, groups):
    assert roofline.groups_of(text) == groups


def test_the_bound_is_that_of_operations_one_after_the_other(found):
    ops = list(found.values())
    alone = sum(op.seconds(V5E) for op in ops if not op.asynchronous)
    assert roofline.bound(ops, V5E) == max(alone, sum(op.count * op.bytes for op in ops) / 819e9)
    assert sum(op.cycles or 0 for op in ops) == 1500


def test_memory_by_what_it_holds(module):
    buffers = '\n'.join([
        'BufferAssignment:',
        'allocation 0: size 4096, parameter 0, shape |bf16[16,100]|, maybe-live-out:',
        ' value: <1 state @0> (size=4096,offset=0): bf16[16,100]',
        'allocation 1: size 26624, parameter 1, shape |bf16[100,64]| at ShapeIndex {}:',
        'allocation 2: size 16384, parameter 2, shape |bf16[4,12,30]| at ShapeIndex {}:',
        'allocation 3: size 100000, preallocated-temp:',
        'allocation 4: size 700, color 1, preallocated-temp:',
        'allocation 5: size 900, thread-local:',
        'allocation 6: size 512, output shape is |(bf16[16,64])|, maybe-live-out:',
    ])  # fmt: skip
    assert preflight.memory_parts(buffers, module) == {
        'parameters': 4096,
        'optimizer': 26624,
        'batch': 16384,
        preflight.TEMPORARIES: 100000,
        preflight.OTHER: 512,
    }


@pytest.mark.parametrize(
    ('op_name', 'path'),
    [
        ('jit(train_step)/jvp(Model)/encoder/norm/mul', 'encoder/norm, forward'),
        ('jit(train_step)/transpose(jvp(Model))/reduce_sum', 'model, backward'),
        ('jit(train_step)/jvp(Model)/head/shard_map/pallas_call', 'head, forward'),
        ('jit(train_step)/add', 'update'),
        ('', ''),
    ],
)
def test_operations_belong_to_modules(op_name, path):
    assert roofline.module_path(op_name) == path


CALL = '%y = ({result}, {space}) custom-call(%x, %k), {window}custom_call_target="{target}"{more}'
LIBRARY = """
ENTRY %main (x: {x}, k: {k}) -> {result} {{
  %x = {x} parameter(0)
  %k = {k} parameter(1)
  {call}
  ROOT %z = {result} get-tuple-element(%y), index=0
}}
"""
WINDOW = 'window={size=3x3 pad=1_1x1_1 stride=2x2}, dim_labels=b01f_o01i->b01f, '
INPUTS, KERNEL, OUTPUTS = 'bf16[2,8,8,3]', 'bf16[4,3,3,3]', 'bf16[2,4,4,4]'
CONVOLVED = 2 * 2 * 4 * 3 * 11 * 11  # 11 of 4 x 3 places along a side are no padding
SCORES = ', backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {' + (
    '"element_type": "BF16", "dimensions": ["2", "3", "5", "7"]}}}'
)
MATMUL = ', backend_config={"gemm_backend_config":{"dot_dimension_numbers":' + (
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
)


@pytest.mark.parametrize(
    ('target', 'x', 'k', 'result', 'flops'),
    [
        ('__cublas$lt$matmul', 'bf16[16,32]', 'bf16[32,64]', 'f32[16,64]', 2 * 16 * 32 * 64),
        ('__cudnn$convForward', INPUTS, KERNEL, OUTPUTS, CONVOLVED),
        ('__cudnn$convBiasActivationForward', INPUTS, KERNEL, OUTPUTS, CONVOLVED),
        ('__cudnn$convBackwardInput', OUTPUTS, KERNEL, INPUTS, CONVOLVED),
        ('__cudnn$convBackwardFilter', INPUTS, OUTPUTS, KERNEL, CONVOLVED),
        (
            *('__cudnn$fmhaSoftmax', 'bf16[2,5,3,8]', 'bf16[2,7,3,8]', 'bf16[2,3,5,8]'),
            2 * 2 * 2 * 3 * 5 * 7 * 8,
        ),
        (
            *('__cudnn$fmhaSoftmaxBackward', 'bf16[2,5,3,8]', 'bf16[2,7,3,8]', 'bf16[2,3,5,8]'),
            5 * 2 * 2 * 3 * 5 * 7 * 8,
        ),
        ('other', 'bf16[16,32]', 'bf16[32,64]', 'f32[16,64]', 0),
    ],
)
def test_calls_of_nvidia_libraries_have_flops_and_no_traffic_of_their_workspace(
    target, x, k, result, flops
):
    more = {'cublas': MATMUL, 'fmha': SCORES}
    call = CALL.format(
        result=result,
        space='s8[4194304]',
        window=WINDOW if 'conv' in target else '',
        target=target,
        more=next((text for name, text in more.items() if name in target), ''),
    )
    module = hlo.parse_module(LIBRARY.format(x=x, k=k, result=result, call=call))
    (op,) = roofline.operations(module)
    assert op.flops == flops
    arrays = sum(array.size for shape in (x, k, result) for array in hlo.arrays(shape))
    assert op.bytes == arrays + (4194304 if target == 'other' else 0)


@pytest.mark.parametrize('together', [True, False])
def test_a_collective_of_gpus_overlaps_if_something_runs_meanwhile(together):
    sync = 'false' if together else 'true'
    text = """
ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %s = f32[64]{0} all-reduce-start(%x), replica_groups={{0,1}}, SYNC
  ROOT %d = f32[64]{0} all-reduce-done(%s)
}
"""
    sync = f'backend_config={{"collective_backend_config":{{"is_sync":{sync}}}}}'
    (op,) = roofline.operations(hlo.parse_module(text.replace('SYNC', sync)))
    assert (op.asynchronous, op.collective.size, op.collective.sent) == (together, 256, 256)


def test_operations_that_xla_repeats_to_save_memory_are_counted():
    text = """
ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %a.remat = f32[64]{0} negate(%x), metadata={op_name="jit(f)/rematted_computation/neg"}
  %a.remat2 = f32[64]{0} negate(%a.remat)
  %fusion.4.remat.1 = f32[64]{0} negate(%a.remat2)
  ROOT %rematted_computation = f32[64]{0} negate(%fusion.4.remat.1)
}
"""
    assert hlo.count_rematerialized(hlo.parse_module(text)) == 3
