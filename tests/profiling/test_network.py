"""Exchanges between slices: how long they take, and how much of them is hidden."""

import pytest

from vit_jax.profiling import hlo, network, roofline, topology
from vit_jax.profiling.network import Event, Moment, Schedule

TWO = topology.parse_topology('2xv5e:2x2')
# Two passes; the first's result is sent after the second, and its sum awaited by the update.
TEXT = """HloModule m

ENTRY %main (x: f32[1024,128], w: f32[128,128]) -> f32[1024,128] {
  %x = f32[1024,128]{1,0:T(8,128)} parameter(0)
  %w = f32[128,128]{1,0:T(8,128)} parameter(1)
  %token = token[] after-all()
  %first = f32[1024,128]{1,0:T(8,128)} dot(%x, %w), DIMS, metadata={op_name="BACKWARD"}
  %second = f32[1024,128]{1,0:T(8,128)} dot(%first, %w), DIMS, metadata={op_name="BACKWARD"}
  %recv = (f32[1024,128]{1,0:T(8,128)}, u32[], token[]) recv(%token), is_host_transfer=true, ATTRS
  %send = (f32[1024,128]{1,0:T(8,128)}, u32[], token[]) send(%first, %token), ATTRS
  %sent = token[] send-done(%send), frontend_attributes={HANDLER}
  %got = (f32[1024,128]{1,0:T(8,128)}, token[]) recv-done(%recv), frontend_attributes={HANDLER}
  %sum = f32[1024,128]{1,0:T(8,128)} get-tuple-element(%got), index=0
  ROOT %update = f32[1024,128]{1,0:T(8,128)} negate(%sum), metadata={op_name="jit(train_step)/add"}
}
"""
TEXT = TEXT.replace('DIMS', 'lhs_contracting_dims={1}, rhs_contracting_dims={0}')
TEXT = TEXT.replace('BACKWARD', 'jit(train_step)/transpose(jvp(Model))/block/mul')
TEXT = TEXT.replace(
    'ATTRS',
    'frontend_attributes={HANDLER,_xla_host_transfer_rendezvous="psum.1",'
    '_xla_megascale_reduce_operation="SUM",_xla_megascale_transfer_type="ALL_REDUCE"}',
).replace('HANDLER', network.HANDLER)
SIZE = 4 * 1024 * 128
PASS, UPDATE = 2 * SIZE + 4 * 128 * 128, 2 * SIZE  # bytes from and to memory
# The bound is that of all traffic, with what is copied to and from the host meanwhile.
STRETCH = (2 * PASS + UPDATE + 2 * SIZE) / (2 * PASS + UPDATE) / TWO.chip.bandwidth


def test_a_schedule_says_when_an_array_is_ready_and_when_it_is_sent():
    found = network.schedule(hlo.parse_module(TEXT), TWO)
    send, done = found.events
    assert (send.key, done.key) == ('psum.1', 'psum.1')
    assert (send.bytes, done.bytes) == (SIZE, 0)
    assert send.ready.at(1) == pytest.approx(PASS * STRETCH)
    assert send.when.at(1) == done.when.at(1) == pytest.approx(2 * PASS * STRETCH)
    assert found.end.growing == pytest.approx(2 * PASS * STRETCH)
    assert found.end.fixed == pytest.approx(UPDATE * STRETCH), (
        'the update is the same for any batch'
    )


def test_arrays_for_other_slices_are_read_and_written_once():
    found = roofline.operations(hlo.parse_module(TEXT))
    transfers = [op for op in found if op.kind in ('send', 'recv')]
    assert [op.bytes for op in transfers] == [SIZE, SIZE]
    assert all(op.asynchronous for op in transfers)


@pytest.mark.parametrize(('slices', 'share'), [(2, 1), (4, 1.5)])
def test_a_host_sends_for_its_chips_around_the_ring_of_slices(slices, share):
    many = topology.parse_topology(f'{slices}xv5e:2x2')
    found = network.measure_crossing(hlo.parse_module(TEXT), many, rows=64)
    assert (found.slices, found.count) == (slices, 1)
    assert found.host_bytes == pytest.approx(4 * share * SIZE)
    assert [speed.gbits for speed in found.speeds] == [25, 50, 100]
    for speed in found.speeds:
        assert speed.seconds == pytest.approx(8 * found.host_bytes / (speed.gbits * 1e9))
        assert speed.best.step <= speed.scheduled.step
        assert speed.best.pays_from <= speed.scheduled.pays_from


def test_what_is_hidden_is_what_does_not_lengthen_the_step():
    """A second of work, a part sent after 0.2, one after 0.8, and both awaited there."""
    parts = [
        Event('a', Moment(0.2), Moment(0.1), 3),
        Event('b', Moment(0.8), Moment(0.5), 4),
        Event('a', Moment(0.8), Moment()),
        Event('b', Moment(0.8), Moment()),
    ]
    made = Schedule(parts, Moment(1.0))
    assert made.scheduled(rate=float('inf')) == 1
    assert made.scheduled(rate=10) == pytest.approx(0.8 + 0.4 + 0.2)
    assert made.best(rate=10) == pytest.approx(1.0), 'sent at 0.1 and 0.5, there at 0.9'
    assert made.scheduled(rate=1) == pytest.approx(0.2 + 3 + 4 + 0.2)
    assert made.best(rate=1) == pytest.approx(0.1 + 3 + 4)
    assert made.scheduled(rate=1, growth=10) == pytest.approx(8 + 4 + 2)


def test_more_slices_pay_where_the_step_is_shorter_than_on_one():
    """Compute of a second for 64 rows; two slices save as much, and wait for 1.9 seconds."""
    sent = Event('a', Moment(1), Moment(), 1.9)
    made = Schedule([sent, Event('a', Moment(1), Moment())], Moment(1))

    def pays(growth):
        return made.scheduled(1, growth) < made.end.at(2 * growth)

    assert network.pays_from(pays, rows=64, unit=8) == 2 * 64
    assert network.pays_from(pays, rows=60, unit=8) == 120, 'more than 114'
    assert network.pays_from(lambda growth: True, rows=64, unit=8) == 8, 'the smallest there is'


# Of two hosts with two GPUs each: all four, then one of each host, then those of a host, in a loop.
HOSTS = """HloModule m

%body (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %r = f32[64]{0} all-reduce(%p), replica_groups={{0,1,2,3}}
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %a = f32[64]{0} all-reduce-start(%x), replica_groups={{0,1,2,3}}
  %b = (f32[64]{0}, f32[128]{0}) all-gather-start(%x), replica_groups={{0,2},{1,3}}
  %c = f32[64]{0} all-reduce-start(%x), replica_groups={{0,1},{2,3}}
  %n = f32[64]{0} negate(%x), metadata={op_name="jit(train_step)/transpose(jvp(Model))/block/mul"}
  %a.done = f32[64]{0} all-reduce-done(%a)
  %b.done = f32[128]{0} all-gather-done(%b)
  %c.done = f32[64]{0} all-reduce-done(%c)
  ROOT %w = f32[64]{0} while(%n), body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_collectives_of_gpus_cross_the_network_where_groups_have_several_hosts():
    gpus = topology.parse_topology('2xh100:2')
    found = network.schedule(hlo.parse_module(HOSTS), gpus)
    sent = {event.key: (event.bytes, event.count) for event in found.events if event.bytes}
    # A host sends as much as a ring of two hosts needs, and the GPUs of a group share it.
    assert sent == {'a': (256 / 2, 1), 'b': (512 / 2, 1), 'w': (3 * 256 / 2, 3)}
    assert [event.key for event in found.events if not event.bytes] == ['a', 'b', 'w']
    crossing = network.measure_crossing(hlo.parse_module(HOSTS), gpus, rows=64)
    assert crossing.host_bytes == 2 * sum(size for size, _ in sent.values())
    assert (crossing.count, [s.gbits for s in crossing.speeds]) == (5, [800, 1600, 3200])
    assert not network.schedule(hlo.parse_module(HOSTS), topology.parse_topology('h100:4')).events
