"""Files of features, as Parquet or npz, on a disk or in object storage.

A file is written in parts, which stay in a folder until the last one is done. So a command that
was killed continues where it stopped, and produces the same file, which describes its features.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError, visible
from vit_jax.inference.embed import Embedder, Rows, TextInputs, column_order
from vit_jax.inference.images import ImageInputs
from vit_jax.interop import files
from vit_jax.storage import lock, paths

# A part has at most so many rows and about so many bytes: what a kill may cost.
PART_ROWS, PART_BYTES = 1024, 2**28
MANIFEST = 'manifest.json'


def write(
    embedder: Embedder, out: str | os.PathLike[str], advance: Callable[[int], object]
) -> Rows:
    """Write the features of all inputs to a file, a row for each that can be read.

    Columns are `image` (or `text`), the name; `label`, if all inputs have a class; and the
    features. Parts that an earlier call has finished, in the folder `OUT.parts`, are not computed
    again; the folder is deleted in the end. Nothing is computed for a file that already has these
    features.

    Args:
      embedder: Embedder of the inputs.
      out: A .parquet or .npz file, local or in object storage.
      advance: Called with each number of inputs that are done.

    Returns:
      The inputs of the rows and those that are left out, without features.

    Raises:
      UserError: if the file or the folder has other features, another process writes them, no
        input can be read, or as `Embedder.rows`.
      OSError: if a file cannot be written.
    """
    file, total, plan = paths.path(out), len(embedder.inputs), embedder.describe()
    if (left_out := _read_omitted(file, plan)) is not None:
        advance(total)
        return _rows_of(total, left_out)
    folder = parts_folder(file)
    size = max(1, min(PART_ROWS, PART_BYTES // embedder.row_bytes()) // embedder.batch_size)
    size *= embedder.batch_size
    with _lock_parts(folder, file):
        _begin(folder, {**plan, 'images in a part': size})
        names = []
        for start in range(0, total, size):
            chunk = range(start, min(start + size, total))
            names.append(f'{start}.npz')
            with paths.reaching(folder):
                is_done = (folder / names[-1]).exists()
            if is_done:
                advance(len(chunk))
            else:
                paths.write_atomic(folder / names[-1], _to_arrays(embedder.rows(chunk, advance)))
        with _local_copy(folder) as near:
            columns = _Columns(embedder.inputs, [near / name for name in names], plan)
            _write_whole(file, columns)
    paths.remove(folder)
    return _rows_of(total, columns.left_out)


def _read_omitted(file: pathlib.Path, plan: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the inputs that a finished file of this plan omits; None without such a file.

    Raises:
      UserError: if the file holds anything else.
    """
    with paths.reaching(file):
        if not file.exists():
            return None
        written_plan = _read_plan(file)
    if not written_plan:
        raise UserError(f'{file} exists and was not written by this command: write to another file')
    if changed := [name for name in plan if written_plan.get(name) != plan[name]]:
        raise UserError(
            f'{file} holds other features (not the same {", ".join(changed)}): delete it, or '
            'write to another file'
        )
    left_out: dict[str, str] | None = written_plan.get(_PLAN_LEFT_OUT)
    return left_out


def _read_plan(file: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `write` has stored about a file's features, see `Embedder.describe`.

    Returns:
      JSON values by name; none for a file of another program.
    """
    with paths.open_file(file) as opened:
        if os.fspath(file).lower().endswith('.npz'):
            try:
                with zipfile.ZipFile(opened) as archive:
                    text = archive.comment
            except zipfile.BadZipFile:
                return {}
        else:
            import pyarrow
            from pyarrow import parquet

            try:
                text = (parquet.read_schema(opened).metadata or {}).get(_KEY, b'')
            except pyarrow.ArrowInvalid:
                return {}
    try:
        plan = paths.parse_json(text)
    except ValueError:
        return {}
    return plan if isinstance(plan, dict) else {}


def _rows_of(total: int, left_out: Mapping[str, str]) -> Rows:
    """Return the inputs that can be read, without their features, and the others."""
    errors = {int(i): UserError(text) for i, text in left_out.items()}
    return Rows([i for i in range(total) if i not in errors], {}, errors)


@contextlib.contextmanager
def _lock_parts(folder: pathlib.Path, file: pathlib.Path) -> Iterator[None]:
    """Keep other processes from writing the same parts; UserError if one does."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.hold(folder))
        except lock.InUse as error:
            owner = lock.describe_owner(lock.holder(folder) or {})
            raise UserError(
                f'{file} is being written by another process ({owner}): wait for it, or give each '
                'process separate images and --out'
            ) from error
        yield


@contextlib.contextmanager
def _local_copy(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Provide a folder, or a local copy of one in object storage."""
    if not paths.is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as copied:
        paths.copy(folder, pathlib.Path(copied))
        yield pathlib.Path(copied)


def _write_whole(file: pathlib.Path, columns: _Columns) -> None:
    """Write a file that appears whole or not at all."""
    make = WRITERS[file.suffix.lower()]
    if paths.is_remote(file):
        with tempfile.TemporaryDirectory() as temporary:
            make(pathlib.Path(temporary, file.name), columns)
            paths.copy(pathlib.Path(temporary), file.parent)
        return
    with paths.atomic_file(file) as partial:
        make(partial, columns)


def read_column(file: str | os.PathLike[str], kind: str) -> np.ndarray:
    """Read a feature from a file of `write`, from the last layer if there are several."""
    path = paths.path(file)

    def last(names: Iterable[str]) -> str:
        return max((name for name in names if name.partition('_')[0] == kind), key=column_order)

    with paths.reaching(path), paths.open_file(path) as opened:
        if path.suffix.lower() == '.npz':
            with np.load(opened) as stored:
                return stored[last(stored.files)]
        from pyarrow import parquet

        table = parquet.ParquetFile(opened)
        name = last(table.schema_arrow.names)
        column = table.read([name])[name]
    width = column.type.list_size
    return np.concatenate([x.flatten().to_numpy().reshape(-1, width) for x in column.chunks])


def parts_folder(file: pathlib.Path) -> pathlib.Path:
    """Return the folder of the parts of an unfinished file."""
    return file.with_name(f'{file.name}.parts')


_NUMBERS, _LEFT_OUT = '#numbers', '#left_out'  # arrays of a part beside the features
_PLAN_LEFT_OUT = 'left out'  # in the plan of a finished file
_KEY = b'vit_jax'  # of the plan among the metadata of Parquet
_MOST_COMMENT = 2**16 - 1  # bytes of the comment of a zip file


def _begin(folder: pathlib.Path, plan: dict[str, Any]) -> None:
    """Make the folder of parts, or check that those in it are of the same plan."""
    manifest = folder / MANIFEST
    if (before := paths.read_text(manifest)) is None:
        paths.make_folder(folder)
        paths.write_text_atomic(manifest, json.dumps(plan))
        return
    written_plan = paths.parse_json(before)
    if changed := [name for name in plan if written_plan.get(name) != plan[name]]:
        raise UserError(
            f'{folder} has the beginning of other features (not the same {", ".join(changed)}): '
            'delete it to start again, or write to another file'
        )


def _to_arrays(rows: Rows) -> bytes:
    errors = json.dumps({str(i): str(error) for i, error in rows.left_out.items()})
    entries = {_NUMBERS: np.array(rows.numbers, np.int64), _LEFT_OUT: np.array(errors)}
    arrays: dict[str, Any] = entries | rows.features
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


class _Columns:
    """Columns of a file, in memory a part at a time.

    Attributes:
      known: Those that the inputs have, [rows].
      plan: What the features are of.
      left_out: The errors of inputs that cannot be read, by their numbers.
    """

    def __init__(
        self,
        inputs: ImageInputs | TextInputs,
        parts: Sequence[pathlib.Path],
        plan: Mapping[str, Any],
    ):
        self._numbers: list[int] = []
        self.parts: list[pathlib.Path] = []
        self.left_out: dict[str, str] = {}
        for part in parts:
            with np.load(part) as stored:
                numbers = stored[_NUMBERS].tolist()
                self._numbers += numbers
                self.left_out |= json.loads(str(stored[_LEFT_OUT]))
                if numbers:
                    self.parts.append(part)
                    self.features = [n for n in stored.files if n not in (_NUMBERS, _LEFT_OUT)]
        names = [visible(inputs.names[i]) for i in self._numbers]
        self.known = {inputs.column: np.array(names)}
        if inputs.labels is not None:
            self.known['label'] = inputs.labels[self._numbers]
        self.plan = {**plan, _PLAN_LEFT_OUT: self.left_out}

    def __len__(self) -> int:
        return len(self._numbers)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of a feature, part by part."""
        for part in self.parts:
            with np.load(part) as stored:
                yield stored[name]


def _write_npz(file: pathlib.Path, columns: _Columns) -> None:
    """Write arrays as `numpy.savez` does, but without having any of them whole."""
    with zipfile.ZipFile(file, 'w') as archive:
        archive.comment = _comment(columns.plan)
        rows = len(columns)
        for name, array in columns.known.items():
            files.write_rows(archive, name, rows, [array])
        for name in columns.features:
            files.write_rows(archive, name, rows, columns.chunks(name))


def _comment(plan: Mapping[str, Any]) -> bytes:
    """Return the plan as the comment of a zip file, without a long list of what is left out."""
    text = json.dumps(plan).encode()
    if len(text) <= _MOST_COMMENT:
        return text
    return json.dumps({k: v for k, v in plan.items() if k != _PLAN_LEFT_OUT}).encode()


def _write_parquet(file: pathlib.Path, columns: _Columns) -> None:
    """Write a row group for each part; a vector is a list of fixed size."""
    import pyarrow
    from pyarrow import parquet

    def as_lists(array: np.ndarray) -> Any:
        values = pyarrow.array(array.reshape(-1))
        for length in reversed(array.shape[1:]):
            values = pyarrow.FixedSizeListArray.from_arrays(values, length)
        return values

    writer, start = None, 0
    try:
        for chunks in zip(*(columns.chunks(name) for name in columns.features), strict=True):
            rows = slice(start, start + len(chunks[0]))
            start = rows.stop
            metadata = {name: pyarrow.array(x[rows]) for name, x in columns.known.items()}
            features = dict(zip(columns.features, map(as_lists, chunks), strict=True))
            table = pyarrow.table(metadata | features, metadata={_KEY: json.dumps(columns.plan)})
            writer = writer or parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


WRITERS = {'.parquet': _write_parquet, '.npz': _write_npz}
