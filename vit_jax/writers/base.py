"""Base class of writers, and their view of a run: its start, and earlier starts' output."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.array_types import UInt8
from vit_jax.errors import visible
from vit_jax.storage import paths, run_folder, servers

_IDS, _WRITTEN = 'ids', 'told'  # keys of the file


@dataclasses.dataclass(frozen=True)
class RunStart:
    """Start of a run, the first one or a resumption.

    Attributes:
      folder: Run folder.
      local: Folder on this machine, whose files are copied to the run folder.
      start_step: Step after which the run resumes; 0 for a new run.
      config: Complete config.
      written: Last step of each number that earlier starts have written.
    """

    folder: Path
    local: Path
    start_step: int
    config: Mapping[str, Any]
    written: Mapping[str, int]

    def unwritten(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Select numbers that no earlier start has written; a resumed run repeats steps."""
        return {name: value for name, value in values.items() if step > self.written.get(name, -1)}

    def is_written(self, step: int, name: str) -> bool:
        """Return whether an earlier start has written the evaluation of a picture.

        Args:
          step: Step of the picture.
          name: Name of the picture, ENTRY/NAME, like the evaluation's numbers.
        """
        entry = f'{name.partition("/")[0]}/'
        return any(step <= last for key, last in self.written.items() if key.startswith(entry))

    def identity(self, service: str, make: Callable[[], str]) -> str:
        """Return the run's id in a service, from earlier starts or new.

        Args:
          service: Name of the writer.
          make: Function that makes a new id.
        """
        stored = _read_record(self.folder, self.start_step)
        ids = dict(stored.get(_IDS, {}))
        ids.setdefault(service, '')
        ids[service] = ids[service] or make()
        content = json.dumps({_IDS: ids, _WRITTEN: dict(self.written)})
        paths.write_text_atomic(self.folder / run_folder.WRITERS, content + '\n')
        return ids[service]


class Writer(abc.ABC):
    """Base class of all writers.

    An `OSError` of a file ends the run cleanly, like a full disk. If the service does not answer
    (`may_pass`), the run continues, retries later and sends the numbers that it missed. After
    any other exception the run continues without the writer, since its folder holds the numbers.

    Args:
      run: Start of the run; a writer is made only on process 0.
    """

    @abc.abstractmethod
    def __init__(self, run: RunStart): ...

    @classmethod  # noqa: B027, a default
    def require_access(cls) -> None:
        """Check, without writing anything, that a run could be written; no check by default.

        Raises:
          UserError: without the package, the credentials, or an answer of the server.
        """

    @classmethod
    def may_pass(cls, error: Exception) -> bool:
        """Return whether the error means that the service does not answer, which may pass."""
        return servers.is_network_error(error)

    @classmethod  # noqa: B027, a default
    def require_answer(cls) -> None:
        """Check within seconds that the service answers, before it is tried again.

        Raises:
          Unreachable: if it does not.
        """

    @abc.abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write {name: number} of a step; a step may come in several calls."""

    def image(  # noqa: B027, a default
        self, step: int, name: str, pixels: UInt8[np.ndarray, 'Y X 3']
    ) -> None:
        """Write a picture of examples; the default does nothing."""

    def texts(  # noqa: B027, a default
        self, step: int, name: str, rows: Sequence[Mapping[str, str]]
    ) -> None:
        """Write rows of {column: text} of examples; the default does nothing."""

    def close(self) -> None:  # noqa: B027, a default
        """Finish; called once, also after a failure. Does nothing by default."""


def begin(
    folder: Path,
    local: Path,
    start_step: int,
    config: Mapping[str, Any],
    lines: Iterable[Mapping[str, Any]],
) -> RunStart:
    """Describe the start of a run that resumes after `start_step`.

    Args:
      folder, local, start_step, config: See `Run`.
      lines: Lines of the metrics, including steps that this start repeats.
    """
    written_lines: dict[str, int] = {}
    if start_step:
        written_lines |= _read_record(folder, start_step).get(_WRITTEN, {})
        for line in lines:
            for name in line.keys() - {'step'}:
                written_lines[name] = max(line['step'], written_lines.get(name, 0))
    return RunStart(folder, local, start_step, config, written_lines)


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Format rows of {column: text} as a Markdown table."""
    columns = list(rows[0]) if rows else []
    cells = [columns, ['---'] * len(columns), *([row[key] for key in columns] for row in rows)]
    return '\n'.join(f'| {" | ".join(map(_cell, line))} |' for line in cells)


def _cell(text: str) -> str:
    return visible(' '.join(text.split())).replace('\\', '\\\\').replace('|', '\\|')


def _read_record(folder: Path, start_step: int) -> dict[str, Any]:
    """Read the record of earlier starts; empty for a new run."""
    text = paths.read_text(folder / run_folder.WRITERS, errors='replace') if start_step else None
    try:
        content = paths.parse_json(text or '{}')
    except ValueError:
        return {}
    is_valid = isinstance(content, dict) and all(isinstance(v, dict) for v in content.values())
    return content if is_valid else {}
