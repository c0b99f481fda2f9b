"""Memory-mapped rows of Arrow files, and of Parquet files after a conversion to Arrow.

Parquet has no random access, so each file is converted once, into the user's cache folder.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from vit_jax.errors import UserError
from vit_jax.runtime.console import progress
from vit_jax.storage import cache, paths

BATCH = 1000  # rows copied at a time
ARROW_FILE = b'ARROW1'  # the first bytes of the format with a footer
STREAM_END = b'\xff\xff\xff\xff\0\0\0\0'


def random_access(file: pathlib.Path, title: str) -> pathlib.Path:
    """Return an Arrow file with the rows of `file`: itself, or its copy in the user's cache folder.

    Raises:
      UserError: if the file cannot be read, or the copy cannot be written.
    """
    try:
        paths.open_file(file).close()
    except OSError as error:
        raise UserError(f'{title}: {file} cannot be read: {error.strerror}') from error
    if file.suffix == '.arrow':
        return file
    name = f'{cache.key([file])}.arrow'
    copy = cache.make_once('arrow', name, file, lambda path: copy_to_arrow(file, path, title))
    try:
        open_batches(copy, title)
    except UserError:  # the copy is damaged
        copy.unlink(missing_ok=True)
        cache.make_once('arrow', name, file, lambda path: copy_to_arrow(file, path, title))
    return copy


def copy_to_arrow(file: pathlib.Path, target: pathlib.Path, title: str) -> None:
    """Write the rows of a Parquet file as an Arrow stream.

    Raises:
      OSError: if the rows cannot be written.
      UserError: if the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def read(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
            raise UserError(f'{title}: {file} cannot be read: {_format_error(error)}') from error

    with (
        read(lambda: pq.ParquetFile(file)) as rows,
        target.open('wb') as opened,
        pa.ipc.new_stream(opened, rows.schema_arrow) as stream,
        progress(f'copying {file.name} to Arrow', rows.metadata.num_rows) as advance,
    ):
        batches = rows.iter_batches(batch_size=BATCH)
        while (batch := read(lambda: next(batches, None))) is not None:
            read(lambda: batch.validate(full=True))
            stream.write(batch)
            advance(batch.num_rows)


def open_batches(file: pathlib.Path, title: str) -> list[Any]:
    """Memory-map the record batches of a file.

    Raises:
      UserError: if the file is damaged or truncated.
    """
    import pyarrow as pa

    try:
        mapped = pa.memory_map(str(file))
        if mapped.read_at(len(ARROW_FILE), 0) == ARROW_FILE:
            footer = pa.ipc.open_file(mapped)
            batches = [footer.get_batch(i) for i in range(footer.num_record_batches)]
        else:
            batches = list(pa.ipc.open_stream(mapped))
            _require_end(mapped)
        for batch in batches:
            batch.validate(full=True)  # a wrong offset would end the process
            batch.schema.names  # noqa: B018  raises unless the names are UTF-8
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f'{title}: {file} cannot be read: {_format_error(error)}') from error
    return batches


def _require_end(stream: Any) -> None:
    """Raise OSError unless a stream was read to its end mark: zeros inside also end a stream."""
    position, size = stream.tell(), stream.size()
    end = stream.read_at(len(STREAM_END), max(0, size - len(STREAM_END)))
    if position != size or end != STREAM_END:
        raise OSError(f'its rows end after {position:,} of {size:,} bytes, without an end mark')


def _format_error(error: Exception) -> str:
    return ' '.join(str(error).split())[:200] or type(error).__name__
