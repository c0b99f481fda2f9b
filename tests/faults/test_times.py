"""The parts of a run's time fill it, through kills and stops."""

import json
import pathlib
import signal
import time

import pytest
from helpers.runs import (
    last_step,
    linear,
    started,
    steps,
    undrawn,  # noqa: F401
    wait_until,
)

from vit_jax.__main__ import main
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.storage import times

pytestmark = [pytest.mark.process, pytest.mark.slow]


def lines(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / 'times.jsonl').read_text().splitlines()]


@pytest.mark.fault(100)
@pytest.mark.long
def test_the_parts_of_time_sum_to_the_whole_through_a_kill_and_a_stop(
    tmp_path, repo, run_cli, capsys
):
    folder = tmp_path / 'run'
    flags = {'total': '100000 steps', 'every.log': '1', 'every.eval': '100000 steps'}
    words = linear(folder, **flags)

    run_cli('--version')  # starts the server that forks processes
    began = time.time()
    with started(repo, *words, '--config.every.checkpoint=5') as process:
        wait_until(lambda: bool(steps(folder)), process)
        saved = steps(folder)[-1]
        wait_until(lambda: last_step(folder) > saved + 7, process)
        process.kill()
        process.wait()
        killed = time.time()
    last = times.read(folder)
    assert last.wall == pytest.approx(killed - began, abs=2.0)  # the rest is `between`, below
    pause = 1.5
    time.sleep(pause)

    again = [*words, '--config.every.checkpoint=100000']
    with started(repo, *again) as process:
        wait_until(
            lambda: len([x for x in lines(folder) if 'start' in x and 'at' not in x]) == 2, process
        )
        resumed = lines(folder)[-1]['step']
        wait_until(lambda: last_step(folder) > resumed + 20, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == EXIT_PREEMPTED
    stopped = steps(folder)[-1]
    assert main([*again, '--stop-at', str(stopped + 3)]) == EXIT_PREEMPTED
    ended = time.time()

    account = times.read(folder)
    assert account.starts == 3
    assert account.wall == pytest.approx(ended - began, abs=1.0)
    assert account.seconds['between'] > pause - 0.5
    assert account.seconds['lost'] > 0 and 'unknown' not in account.seconds
    assert min(account.seconds[name] for name in ('steps', 'start', 'compile', 'saving')) > 0
    capsys.readouterr()
    assert main(['goodput', str(folder), '--json']) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert sum(row['seconds'].values()) == pytest.approx(row['wall_sec'])
    assert row['goodput'] == pytest.approx(row['seconds']['steps'] / row['wall_sec'])
