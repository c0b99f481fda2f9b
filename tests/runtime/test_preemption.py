"""Being told to go becomes a flag that is read between two steps."""

import signal
from concurrent import futures

import pytest

from vit_jax.runtime.preemption import Preemption


@pytest.fixture
def handlers():
    """The handlers of this process, put back afterward."""
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    before = {number: signal.getsignal(number) for number in numbers}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_becomes_a_flag_and_then_sigterm_no_longer_kills(handlers, number):
    with Preemption() as preemption:
        assert not preemption.should_stop()
        signal.raise_signal(number)
        assert preemption.should_stop()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]


def test_another_thread_leaves_signals_alone(handlers):
    """`vit_jax.train` may run in one, where Python refuses handlers."""

    def run():
        with Preemption() as preemption:
            assert handlers == {number: signal.getsignal(number) for number in handlers}
            preemption.request()
            return preemption.should_stop()

    with futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(run).result()
    assert handlers == {number: signal.getsignal(number) for number in handlers}


@pytest.mark.usefixtures('handlers')
def test_under_nohup_a_closed_terminal_changes_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Preemption() as preemption:
        signal.raise_signal(signal.SIGHUP)
        assert not preemption.should_stop()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.usefixtures('handlers')
def test_what_finds_a_fault_asks_for_the_stop_itself():
    with Preemption() as preemption:
        preemption.request()
        assert preemption.should_stop()


def test_without_a_signal_the_handlers_come_back(handlers):
    with Preemption():
        assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]
    assert handlers == {number: signal.getsignal(number) for number in handlers}


@pytest.mark.usefixtures('handlers')
def test_more_sigterms_change_nothing_but_a_second_ctrl_c_stops():
    with Preemption() as preemption:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert preemption.should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
