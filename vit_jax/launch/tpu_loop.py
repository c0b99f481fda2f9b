"""Loop of `launch tpu`: request machines, run the command, and start over after preemption.

It runs on the user's machine. The run itself does not depend on it: if the loop is killed, the
same command finds the resource and follows the run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable

from vit_jax.errors import EXIT_FAILED, EXIT_PREEMPTED, UserError
from vit_jax.launch import cloud_tpu, queued, remote
from vit_jax.launch.queued import ABSENT, ACTIVE, UNKNOWN, Answer, Description, TpuJob

FINAL = (0, 2, 3)  # exit codes after which a restart is useless
TRIES = 3  # of an action that may fail temporarily
# Errors of the service that may pass within a minute.
TRANSIENT = ('UNAVAILABLE', 'INTERNAL', 'DEADLINE_EXCEEDED', 'ABORTED', 'timed out')
# A request in one of these states gets no more machines and has to be deleted first.
ENDED = ('FAILED', 'SUSPENDED')
LEAVING = ('SUSPENDING', 'DELETING')  # cannot be deleted yet


class Lost(UserError):
    """Job cannot continue, or a resource remains that may cost money."""

    exit_code = EXIT_FAILED


@dataclasses.dataclass(frozen=True)
class LoopTimes:
    """Times of the loop.

    Attributes:
      poll: Seconds between two checks.
      patience: Seconds to wait for all slices before requesting one fewer.
      sleep, clock: Replacements of `time.sleep` and `time.monotonic`.
    """

    poll: float = 30.0
    patience: float = 1800.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


class Loop:
    """Loop of one job."""

    def __init__(self, job: TpuJob, pace: LoopTimes) -> None:
        self.job = job
        self.pace = pace
        self.resource = job.resource()
        self.slices = job.slices  # of the present resource
        self.failures = 0
        self.installed = False  # whether the machines have the code
        self.adopted = False  # whether the resource is from an earlier loop, whose run may continue
        self.had_machines = False

    def run(self) -> int:
        """Run the command to its end and return its exit code; nothing rented is left.

        Raises:
          UserError: if gcloud refuses, machines refuse the SSH key, or failures are too many.
        """
        self._adopt()
        try:
            return self._run_until_done()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        finally:
            self._clean_up()

    def _adopt(self) -> None:
        """Take over the resource of an earlier loop, if there is one."""
        description = self.resource.describe()
        if description.state == UNKNOWN:
            raise UserError(f'launch tpu: {description.error}')
        if description.state == ABSENT:
            return
        if description.label != self.resource.label:
            raise UserError(
                f'launch tpu: {self.job.name} in {self.job.zone} already exists for a different '
                'command; give --job-name NAME'
            )
        log(f'found {self.job.name} of an earlier start ({description.state}); continuing with it')
        self.adopted, self.slices = True, description.slices

    def _run_until_done(self) -> int:
        while True:
            self._obtain()
            code = self._run_once()
            if code in FINAL:
                return code
            if code is None:  # machines that no longer answer are given back
                self.installed = False
                if self._describe().state == ACTIVE:
                    self._delete()
                continue
            log(f'the run ended with exit code {code}')
            self.pause()  # machines that are taken away need a moment to show it
            if code != EXIT_PREEMPTED and self._describe().state == ACTIVE:
                if self.failures >= self.job.restarts:
                    return code
                self.failures += 1

    def _obtain(self) -> None:
        """Wait for machines; each time patience is over, ask for one slice fewer."""
        since, last_reason = self.pace.clock(), ''
        if (description := self._describe()).state != ACTIVE and not self.adopted:
            self.slices = self.job.slices
        while description.state != ACTIVE:
            if description.state != last_reason:
                reason = f' ({description.error})' if description.error else ''
                log(f'{self.job.name}: {description.state}{reason}')
                last_reason = description.state
            impatient = self.pace.clock() - since >= self.pace.patience
            can_shrink = impatient and self.slices > self.job.min_slices
            if description.state == ABSENT:
                self._create()
            elif description.state in ENDED or (
                can_shrink and description.state not in (*LEAVING, UNKNOWN)
            ):
                self._check_quota(description.error)
                self._delete()
                if can_shrink:
                    log(f'{self.slices} slices are not available; trying {self.slices - 1}')
                    self.slices -= 1
                    since = self.pace.clock()
            self.pause()
            description = self._describe()
        self.had_machines = True

    def _create(self) -> None:
        slices = f'{self.slices} x ' if self.slices > 1 else ''
        log(f'requesting {slices}{self.job.tpu} in {self.job.zone}')
        answer = queued.call(self.resource.create_command(self.slices))
        if answer.code and not any(word in answer.err for word in TRANSIENT):
            self._check_quota(answer.reason)
            if not self.had_machines:
                raise UserError(f'launch tpu: gcloud refused: {answer.reason}')
        if answer.code:
            log(f'not granted yet: {answer.reason}')

    def _check_quota(self, reason: str) -> None:
        """Raise UserError if the quota was never enough; deleted machines may still count."""
        if 'quota' in reason.lower() and not self.had_machines:
            raise UserError(f'launch tpu: gcloud refused: {reason}')

    def _run_once(self) -> int | None:
        """Run the command once; return its exit code, or None if the machines are lost."""
        if not self._is_started():
            if not (self.installed or self._install()):
                return None
            log(f'starting on {self._machine_count()} machines')
            if not self._run_on_all(self.job.start(self.slices), remote.STARTED):
                return None
        return self._follow()

    def _is_started(self) -> bool:
        """Return whether an earlier loop has started the run on these machines."""
        if not self.adopted:
            return False
        self.adopted = False
        status = self._status(0)
        self.installed = status is not None and status.state != remote.NEW
        return self.installed

    def _install(self) -> bool:
        log(f'copying the code to {self._machine_count()} machines and installing it')
        with remote.archive() as path:
            args = self.resource.scp_command(path, f'{self.job.name}.tgz')
            copied = self._retry(lambda: queued.call(args, queued.LONG_SECONDS))
        self.installed = copied and self._run_on_all(self.job.install(), remote.READY)
        return self.installed

    def _run_on_all(self, script: str, marker: str) -> bool:
        """Run a script on every machine and count replies; gcloud ignores unreachable machines."""

        def act() -> Answer:
            args = self.resource.ssh_command(script, everywhere=True)
            answer = queued.call(args, queued.LONG_SECONDS)
            replies, machine_count = answer.out.split().count(marker), self._machine_count()
            if answer.code or replies >= machine_count:
                return answer
            return Answer(255, err=f'{replies} of {machine_count} machines answered')

        return self._retry(act)

    def _retry(self, act: Callable[[], Answer]) -> bool:
        """Repeat an action until it succeeds; return False if the machines are lost."""
        for attempt in range(1, TRIES + 1):
            answer = act()
            if not answer.code:
                return True
            if self._describe().state not in (ACTIVE, UNKNOWN):
                log('the machines were taken away')
                return False
            if attempt < TRIES:
                log(f'trying again: {answer.reason}')
                self.pause()
        if 'Permission denied (publickey' in answer.err:
            raise UserError(
                'launch tpu: the machines refuse your SSH key: ssh-add '
                '~/.ssh/google_compute_engine, or see gcloud compute config-ssh --help'
            )
        self._count(answer.reason)
        return False

    def _follow(self) -> int | None:
        """Print the log until the run ends; return its exit code, or None if machines are lost."""
        position = silent = 0
        while True:
            status = self._status(position)
            if status is not None:
                print(status.log, end='', flush=True)
                position, silent = status.size, 0
                if status.state != remote.RUNNING:
                    return int(status.state)
            elif (state := self._describe().state) not in (ACTIVE, UNKNOWN):
                log(f'the machines were taken away ({state})')
                return None
            elif state == ACTIVE and (silent := silent + 1) >= TRIES:
                self._count('the first machine does not answer')
                return None
            self.pause()

    def _status(self, position: int) -> remote.Status | None:
        script = remote.status(self.job.name, position)
        answer = queued.call(self.resource.ssh_command(script, everywhere=False))
        return None if answer.code else remote.read_status(answer.out)

    def _count(self, reason: str) -> None:
        """Count a failure; raise `Lost` after too many."""
        if self.failures >= self.job.restarts:
            raise Lost(f'launch tpu: {reason}; gave up after {self.failures} restarts')
        self.failures += 1
        log(reason)

    def _interrupt(self) -> None:
        """Let the run save its state; a second Ctrl-C cuts it short."""
        if self.installed:
            log('stopping the run, which saves its state (Ctrl-C again: at once)')
            args = self.resource.ssh_command(remote.stop(self.job.name), everywhere=True)
            with contextlib.suppress(KeyboardInterrupt):
                queued.call(args)

    def _delete(self) -> None:
        """Delete the resource with its machines; raise `Lost` if that fails."""
        self.installed = self.adopted = False
        tries = 0
        while (state := self._describe().state) != ABSENT:
            if state not in LEAVING:
                log(f'deleting {self.job.name}')
                answer = queued.call(self.resource.delete_command())
                if not answer.code:
                    return
                if (tries := tries + 1) == TRIES:
                    raise self._left_behind(answer.reason)
            self.pause()

    def _left_behind(self, reason: str) -> Lost:
        delete = shlex.join(self.resource.delete_command())
        return Lost(f'launch tpu: {self.job.name} is left ({reason}) and may cost: {delete}')

    def _clean_up(self) -> None:
        """Delete all resources, and print so; raise `Lost` if one is left."""
        try:
            self._delete()
        except KeyboardInterrupt:
            raise self._left_behind(self._describe().state) from None
        log(f'{self.job.name} is deleted; nothing is left in {self.job.zone}')

    def _machine_count(self) -> int:
        return self.slices * cloud_tpu.hosts(self.job.tpu)

    def _describe(self) -> Description:
        return self.resource.describe()

    def pause(self) -> None:
        """Wait for the next check."""
        self.pace.sleep(self.pace.poll)


def log(line: str) -> None:
    """Print a line about the loop to standard error."""
    print(f'launch tpu: {line}', file=sys.stderr, flush=True)
