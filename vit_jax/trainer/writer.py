"""Output of a run: metrics.jsonl, `config.writers`, progress bar, curves."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.text import Text

from vit_jax.config.run import Run
from vit_jax.runtime.console import Console, Progress
from vit_jax.storage import lock, run_folder
from vit_jax.storage.paths import write_atomic, write_text_atomic
from vit_jax.storage.run_folder import Mirror
from vit_jax.trainer.services import Service
from vit_jax.viz import figures
from vit_jax.writers import base

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vit_jax.viz.base import Texts

UNKNOWN = '-:--'
REDRAWN = 0.1  # seconds between two moves of the bar
INPUT_BOUND = 0.1  # share of an interval spent waiting for data above which a line reports it


class Eta(ProgressColumn):
    """Time left at the rate of the last interval."""

    def render(self, task: Task) -> Text:
        rate = task.fields.get('steps_per_sec')
        if not rate or task.total is None:
            return Text(f'ETA {UNKNOWN}', style='cyan')
        return Text(f'ETA {clock((task.total - task.completed) / rate)}', style='cyan')


def clock(seconds: float) -> str:
    """75 -> 1:15; 3661 -> 1:01:01."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{secs:02}' if hours else f'{minutes}:{secs:02}'


class Writer:
    """Write the run folder on process 0; do nothing on other processes.

    Args:
      workdir: Run folder.
      total_steps: Length of the run.
      start_step: Step at which this start resumes; later lines of an earlier start are
        dropped, since their steps are repeated.
      unit: Unit of the training rate, such as 'images'.
      config: Config of the run, for the writers.
      failed: Function that is called once, after the first failed write; then only lines of the
        metrics are tried again, before the next save and at the end.
      check_lock: Check of the folder's lock, made before lines are written.
      evaluates_again: Whether this start repeats the evaluations of `start_step`; the lines of an
        earlier start that hold their results are dropped.
      writers: Names of the receivers of the same numbers.

    Attributes:
      trouble: The file that could not be written, and the reason; empty without a failure.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        total_steps: int,
        start_step: int,
        unit: str,
        config: Mapping[str, Any] | None = None,
        failed: Callable[[], None] = lambda: None,
        check_lock: lock.Check = lambda: None,
        evaluates_again: bool = False,
        writers: Sequence[str] = Run.writers,
    ):
        self.total_steps, self.unit, self._failed, self.trouble = total_steps, unit, failed, ''
        self.compiled: tuple[int, float] | None = None  # the first step, and when it was done
        self.first_interval, self.advised = True, False
        self._moves = 0.0  # when the bar does next
        self._undrawn = 0  # training lines since the curves were drawn
        self.enabled = jax.process_index() == 0
        if not self.enabled:
            return
        self.console = Console(soft_wrap=True)
        self.config = run_folder.read_config(workdir)
        self.mirror = Mirror(workdir)
        self.mirror.fetch(run_folder.METRICS)
        self.path = self.mirror.folder / run_folder.METRICS
        before = run_folder.read_metrics(self.mirror.folder)
        retained = [line for line in before if _stays(line, start_step, evaluates_again)]
        write_text_atomic(self.path, ''.join(json.dumps(line) + '\n' for line in retained))
        self.lines = Lines(self.path, check_lock, self.say)
        start = base.begin(workdir, self.mirror.folder, start_step, dict(config or {}), before)
        self.services = [Service(name, start, self.say) for name in writers]
        self.bar = Progress(
            TextColumn('step {task.completed}/{task.total}'),
            BarColumn(),
            TextColumn('{task.fields[summary]}', markup=False),
            Eta(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task(
            '', total=total_steps, completed=start_step, summary='compiling', steps_per_sec=None
        )
        self.bar.start()

    def say(self, text: str) -> None:
        """Print a line on the terminal."""
        if self.enabled:
            self.console.print(text)

    def progress(self, step: int) -> None:
        """Move the bar; the first step taken ends the compilation."""
        if not self.enabled:
            return
        now = time.perf_counter()
        if self.compiled is None:
            self.compiled = step, now
            self.bar.update(self.task, summary='')
        if now >= self._moves:
            self._moves = now + REDRAWN
            self.bar.update(self.task, completed=step)

    def _pace(self, step: int, seconds: float) -> float | None:
        """Seconds a step for the ETA; None while only the step that compiled is known."""
        is_first, self.first_interval = self.first_interval, False
        if not is_first or self.compiled is None:
            return max(seconds, 1e-9)
        steps, start_time = step - self.compiled[0], self.compiled[1]
        return max(time.perf_counter() - start_time, 1e-9) / steps if steps else None

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Append one line {step, name: value, ...}, and pass its numbers to the writers.

        After trouble the line waits for the next `flush`, or for `close`.
        """
        if not self.enabled:
            return
        self.lines.add(json.dumps({'step': step, **metrics}))
        self._undrawn += 'train/step_sec' in metrics
        if self.trouble:
            return
        with self._watched(run_folder.METRICS):
            self.lines.write()
            numbers = {k: v for k, v in metrics.items() if not isinstance(v, str)}
            self._pass_on(lambda service: service.scalars(step, numbers))
        self.mirror.publish()

    def show(self, step: int, name: str, content: Figure | Texts) -> None:
        """Pass a figure, or rows of {column: text}, to the writers."""
        if not self.enabled or self.trouble:
            return
        call = _make_draw_call(step, name, content)
        with self._watched('what the writers show'):
            self._pass_on(lambda service: service.show(call))
        self.mirror.publish()

    def _pass_on(self, call: Callable[[Service], None]) -> None:
        """Call every service; drop one that fails for good."""
        for service in list(self.services):
            call(service)
            if service.failed:
                self.services.remove(service)

    @contextlib.contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """End the run cleanly if a file can no longer be written, as on a full disk."""
        try:
            yield
        except (OSError, lock.Taken) as error:
            if not self.trouble:
                reason = getattr(error, 'strerror', None) or error
                self.trouble = f'{name} could not be written ({reason})'
                self._failed()

    def show_train(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the interval's numbers in the bar, or as a line without a terminal."""
        if not self.enabled:
            return
        rate = metrics[f'train/{self.unit}_per_sec']
        loss = metrics.get('train/loss', math.nan)
        summary = f'loss {loss:.4f}  {rate:,.0f} {self.unit}/s'
        if skipped := metrics.get('train/skipped'):
            summary += f'  {skipped:.0f} steps skipped'
        starved = metrics['train/input_bound']
        if starved >= INPUT_BOUND:
            summary += f'  {starved:.0%} waiting for data'
            if (locked := metrics['train/lock_bound']) >= INPUT_BOUND:
                summary += f', {locked:.0%} for the threads that make them'
        warm = not self.first_interval
        pace = self._pace(step, metrics['train/step_sec'])
        speed = None if pace is None else 1 / pace
        self.bar.update(self.task, completed=step, summary=summary, steps_per_sec=speed)
        if not self.console.is_terminal:
            eta = UNKNOWN if pace is None else clock((self.total_steps - step) * pace)
            self.say(f'step {step}/{self.total_steps}  {summary}  ETA {eta}')
        if warm and starved >= INPUT_BOUND and not self.advised:
            self.advised = True
            self.say(
                f'the devices waited for data {starved:.0%} of the time: set config.data.workers '
                'to more; `python -m vit_jax data` times only the pipeline (docs/input_speed.md)'
            )

    def show_eval(self, step: int, summary: str) -> None:
        """Print a line of evaluation results."""
        self.say(f'step {step}/{self.total_steps}  {summary}')

    def draw(self) -> None:
        """Draw curves.png again, unless the folder was deleted."""
        if not self.enabled or self.trouble or not self.mirror.folder.is_dir():
            return
        self._undrawn = 0
        with self._watched(run_folder.CURVES):
            from vit_jax.viz import curves  # imports Matplotlib

            curves.plot_curves(self.mirror.folder, self.config)
        self.mirror.publish()

    def flush(self) -> None:
        """Wait until everything written is in the run folder, as before a save."""
        if self.enabled:
            with self._watched(run_folder.METRICS):
                self.lines.write()
            self.mirror.flush()

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Close everything; `last` is called before the folder is left."""
        if not self.enabled:
            return
        self.bar.stop()
        # Lines that could not be written before are tried again.
        with contextlib.suppress(OSError, lock.Taken):
            self.lines.close()
        for service in self.services:
            with contextlib.suppress(OSError):
                service.close()
        # A run that stops before its first evaluation has curves, too.
        if self._undrawn > 1 and not (self.mirror.folder / run_folder.CURVES).exists():
            self.draw()
        last()
        self.mirror.close()


def _stays(line: Mapping[str, Any], start_step: int, evaluates_again: bool) -> bool:
    """Return whether a line of an earlier start stays in the metrics of a run that resumes."""
    if line['step'] == start_step and evaluates_again:
        return 'train/step_sec' in line
    return line['step'] <= start_step


def _make_draw_call(step: int, name: str, content: Figure | Texts) -> Callable[[base.Writer], None]:
    """Return the call to make of each writer; a figure is drawn only once."""
    if isinstance(content, list):
        return lambda writer: writer.texts(step, name, content)
    pixels = figures.pixels(content)
    return lambda writer: writer.image(step, name, pixels)


class Lines:
    """A file to append lines to; a line that a full disk cuts off is completed later.

    Args:
      path: File to append to.
      check_lock: Check of its folder's lock.
      say: Function that prints a line for the user.
    """

    def __init__(
        self,
        path: pathlib.Path,
        check_lock: lock.Check = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ):
        self._path, self._check_lock, self._say = path, check_lock, say
        self._file = path.open('a+b', buffering=0)
        self._file.seek(0)
        size = os.fstat(self._file.fileno()).st_size
        self._written, self._unwritten = bytearray(self._file.read(size)), b''

    def add(self, line: str) -> None:
        self._unwritten += line.encode() + b'\n'

    def write(self) -> None:
        """Write the added lines.

        A file that was deleted, replaced, truncated or appended to by others is written again. A
        deleted folder is reported by the next save.

        Raises:
          OSError: if that fails.
          lock.Taken: if another run has taken over the folder.
        """
        if self._path.parent.is_dir():
            self._check_lock()
            if not self._is_whole():
                self._write_again()
        while self._unwritten:
            count = self._file.write(self._unwritten)
            self._written += self._unwritten[:count]
            self._unwritten = self._unwritten[count:]

    def close(self) -> None:
        """Write the added lines, and sync them to the disk."""
        with self._file:
            self.write()
            os.fsync(self._file.fileno())

    def _is_whole(self) -> bool:
        try:
            there = self._path.lstat()
        except FileNotFoundError:
            return False
        same = os.path.samestat(os.fstat(self._file.fileno()), there)
        return same and there.st_size == len(self._written)

    def _write_again(self) -> None:
        write_atomic(self._path, bytes(self._written))
        self._file.close()
        self._file = self._path.open('a+b', buffering=0)
        self._say(f'{self._path.name} was deleted or changed during the run: written again')
