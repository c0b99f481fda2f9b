"""The loop of `launch tpu`: request machines, run the command, and again when they are taken away.

It runs on the user's machine. The run itself does not depend on it: if the loop is killed, the
same command finds the resource and follows the run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable

from vit_jax.errors import EXIT_FAILED, EXIT_PREEMPTED, UserError
from vit_jax.launch import cloud_tpu, queued, remote
from vit_jax.launch.queued import ABSENT, ACTIVE, UNKNOWN, Answer, Found, TpuJob

FINAL = (0, 2, 3)  # exit codes that a further start would only repeat
TRIES = 3  # of what machines or the service may refuse for a moment
# What the service refuses now and may grant a minute later.
PASSING = ('UNAVAILABLE', 'INTERNAL', 'DEADLINE_EXCEEDED', 'ABORTED', 'timed out')
# A request in one of these states gets no machines any more: it has to be deleted first.
ENDED = ('FAILED', 'SUSPENDED')
LEAVING = ('SUSPENDING', 'DELETING')  # cannot be deleted yet


class Lost(UserError):
    """The job cannot go on, or something is left that costs."""

    exit_code = EXIT_FAILED


@dataclasses.dataclass(frozen=True)
class Pace:
    """The times of the loop.

    Attributes:
      poll: seconds between two looks.
      patience: seconds to wait for all slices before asking for one fewer.
      sleep, clock: of the machine.
    """

    poll: float = 30.0
    patience: float = 1800.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


class Loop:
    """The loop of one job."""

    def __init__(self, job: TpuJob, pace: Pace) -> None:
        self.job = job
        self.pace = pace
        self.resource = job.resource()
        self.slices = job.slices  # of the present resource
        self.failures = 0
        self.ready = False  # whether the machines have the code
        self.found = False  # whether a resource of an earlier loop goes on
        self.served = False  # whether there have been machines

    def run(self) -> int:
        """Run the command to its end and return its exit code; nothing rented is left.

        Raises:
          UserError: if gcloud refuses, machines refuse the SSH key, or failures are too many.
        """
        self._adopt()
        try:
            return self._until_it_ends()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        finally:
            self._clean_up()

    def _adopt(self) -> None:
        """Take over the resource of an earlier loop, if there is one."""
        found = self.resource.look()
        if found.state == UNKNOWN:
            raise UserError(f'launch tpu: {found.error}')
        if found.state == ABSENT:
            return
        if found.label != self.resource.label:
            raise UserError(
                f'launch tpu: {self.job.name} in {self.job.zone} exists already, for another '
                'command; give --job-name NAME'
            )
        say(f'found {self.job.name} of an earlier start ({found.state}); going on with it')
        self.found, self.slices = True, found.slices

    def _until_it_ends(self) -> int:
        while True:
            self._obtain()
            code = self._one_run()
            if code in FINAL:
                return code
            if code is None:  # what answers no more is given back
                self.ready = False
                if self._look().state == ACTIVE:
                    self._delete()
                continue
            say(f'the run ended with exit code {code}')
            self.pause()  # machines that are taken away need a moment to show it
            if code != EXIT_PREEMPTED and self._look().state == ACTIVE:
                if self.failures >= self.job.restarts:
                    return code
                self.failures += 1

    def _obtain(self) -> None:
        """Wait until there are machines; each time patience is over, ask for one slice fewer."""
        since, last = self.pace.clock(), ''
        if (found := self._look()).state != ACTIVE and not self.found:
            self.slices = self.job.slices
        while found.state != ACTIVE:
            if found.state != last:
                say(f'{self.job.name}: {found.state}{found.error and f" ({found.error})"}')
                last = found.state
            tired = self.pace.clock() - since >= self.pace.patience
            fewer = tired and self.slices > self.job.fewest
            if found.state == ABSENT:
                self._create()
            elif found.state in ENDED or (fewer and found.state not in (*LEAVING, UNKNOWN)):
                self._check_quota(found.error)
                self._delete()
                if fewer:
                    say(f'{self.slices} slices are not to be had; {self.slices - 1} will do')
                    self.slices -= 1
                    since = self.pace.clock()
            self.pause()
            found = self._look()
        self.served = True

    def _create(self) -> None:
        slices = f'{self.slices} x ' if self.slices > 1 else ''
        say(f'requesting {slices}{self.job.tpu} in {self.job.zone}')
        answer = queued.call(self.resource.creation(self.slices))
        if answer.code and not any(word in answer.err for word in PASSING):
            self._check_quota(answer.reason)
            if not self.served:
                raise UserError(f'launch tpu: gcloud refused: {answer.reason}')
        if answer.code:
            say(f'not granted yet: {answer.reason}')

    def _check_quota(self, reason: str) -> None:
        """End for a quota that was never enough: later, deleted machines may still count."""
        if 'quota' in reason.lower() and not self.served:
            raise UserError(f'launch tpu: gcloud refused: {reason}')

    def _one_run(self) -> int | None:
        """Run the command once: its exit code, or None if the machines are lost."""
        if not self._goes_on():
            if not (self.ready or self._install()):
                return None
            say(f'starting on {self._machines()} machines')
            if not self._everywhere(self.job.start(self.slices), remote.STARTED):
                return None
        return self._follow()

    def _goes_on(self) -> bool:
        """Whether an earlier loop has started the run on these machines."""
        if not self.found:
            return False
        self.found = False
        status = self._status(0)
        self.ready = status is not None and status.state != remote.NEW
        return self.ready

    def _install(self) -> bool:
        say(f'copying the code to {self._machines()} machines and installing it')
        with remote.archive() as path:
            words = self.resource.upload(path, f'{self.job.name}.tgz')
            copied = self._try(lambda: queued.call(words, queued.LONG_SECONDS))
        self.ready = copied and self._everywhere(self.job.install(), remote.READY)
        return self.ready

    def _everywhere(self, script: str, marker: str) -> bool:
        """Run a script on every machine; gcloud only warns of those it cannot reach."""

        def act() -> Answer:
            words = self.resource.remote(script, everywhere=True)
            answer = queued.call(words, queued.LONG_SECONDS)
            done, wanted = answer.out.split().count(marker), self._machines()
            if answer.code or done >= wanted:
                return answer
            return Answer(255, err=f'{done} of {wanted} machines answered')

        return self._try(act)

    def _try(self, act: Callable[[], Answer]) -> bool:
        """Act a few times until it succeeds; False if the machines are lost."""
        for attempt in range(1, TRIES + 1):
            answer = act()
            if not answer.code:
                return True
            if self._look().state not in (ACTIVE, UNKNOWN):
                say('the machines were taken away')
                return False
            if attempt < TRIES:
                say(f'trying again: {answer.reason}')
                self.pause()
        if 'Permission denied (publickey' in answer.err:
            raise UserError(
                'launch tpu: the machines refuse your SSH key: ssh-add '
                '~/.ssh/google_compute_engine, or see gcloud compute config-ssh --help'
            )
        self._count(answer.reason)
        return False

    def _follow(self) -> int | None:
        """Show the log until the run ends: its exit code, or None if the machines are lost."""
        seen = silent = 0
        while True:
            status = self._status(seen)
            if status is not None:
                print(status.log, end='', flush=True)
                seen, silent = status.size, 0
                if status.state != remote.RUNNING:
                    return int(status.state)
            elif (state := self._look().state) not in (ACTIVE, UNKNOWN):
                say(f'the machines were taken away ({state})')
                return None
            elif state == ACTIVE and (silent := silent + 1) >= TRIES:
                self._count('the first machine does not answer')
                return None
            self.pause()

    def _status(self, seen: int) -> remote.Status | None:
        script = remote.status(self.job.name, seen)
        answer = queued.call(self.resource.remote(script, everywhere=False))
        return None if answer.code else remote.read_status(answer.out)

    def _count(self, reason: str) -> None:
        """Count a failure; raises `Lost` if there were too many."""
        if self.failures >= self.job.restarts:
            raise Lost(f'launch tpu: {reason}; gave up after {self.failures} restarts')
        self.failures += 1
        say(reason)

    def _interrupt(self) -> None:
        """Let the run save its state; a second Ctrl-C cuts it short."""
        if self.ready:
            say('stopping the run, which saves its state (Ctrl-C again: at once)')
            words = self.resource.remote(remote.stop(self.job.name), everywhere=True)
            with contextlib.suppress(KeyboardInterrupt):
                queued.call(words)

    def _delete(self) -> None:
        """Delete the resource with its machines; raises `Lost` if that fails."""
        self.ready = self.found = False
        tries = 0
        while (state := self._look().state) != ABSENT:
            if state not in LEAVING:
                say(f'deleting {self.job.name}')
                answer = queued.call(self.resource.deletion())
                if not answer.code:
                    return
                if (tries := tries + 1) == TRIES:
                    raise self._left(answer.reason)
            self.pause()

    def _left(self, reason: str) -> Lost:
        delete = queued.shown(self.resource.deletion())
        return Lost(f'launch tpu: {self.job.name} is left ({reason}) and may cost: {delete}')

    def _clean_up(self) -> None:
        """Leave nothing behind, and say so; raises `Lost` with what is left."""
        try:
            self._delete()
        except KeyboardInterrupt:
            raise self._left(self._look().state) from None
        say(f'{self.job.name} is deleted; nothing is left in {self.job.zone}')

    def _machines(self) -> int:
        return self.slices * cloud_tpu.hosts(self.job.tpu)

    def _look(self) -> Found:
        return self.resource.look()

    def pause(self) -> None:
        """Wait for the next look."""
        self.pace.sleep(self.pace.poll)


def say(line: str) -> None:
    """Print a line about the loop beside the run's own."""
    print(f'launch tpu: {line}', file=sys.stderr, flush=True)
