"""`text:PATH`: pairs of sentences, one pair per line.

    text:/data/pairs.tsv                  source, a tab, target
    text:/data/train.en,train.de          source and target in two files with equally many lines

The second file is in the folder of the first unless its path contains a folder. The only split is
`train`. Files are UTF-8; pairs with an empty side are ignored.
"""

from __future__ import annotations

import logging
import pathlib

import numpy as np

from vit_jax.data import listing
from vit_jax.data.records import Listing, Record, SourceInfo, UnknownSplit
from vit_jax.errors import UserError
from vit_jax.storage import paths

log = logging.getLogger(__name__)


class Source:
    """Pairs {'source': str, 'target': str} of one TSV file, or of two parallel files."""

    info = SourceInfo(0, ())

    def __init__(self, path: str, split: str):
        self._title = f'text:{path}'
        if split != 'train':
            raise UnknownSplit.from_splits(f'source {self._title}', split, ['train'])
        first, comma, second = path.partition(',')
        self._lines = _Lines(pathlib.Path(first).expanduser())
        self._targets = _Lines(_resolve_second(first, second)) if comma else None
        if self._targets is not None and len(self._targets) != len(self._lines):
            raise UserError(
                f'source {self._title}: {self._lines.path} has {len(self._lines)} lines, '
                f'{self._targets.path} has {len(self._targets)}; parallel files need the same '
                'number'
            )
        pairs = (self._pair(line) for line in range(len(self._lines)))
        complete = np.array([bool(a.strip() and b.strip()) for a, b in pairs], bool)
        self._complete = np.flatnonzero(complete)
        if empty := len(complete) - len(self._complete):
            log.warning('%s: ignoring %d pairs with an empty side', self._title, empty)

    def __len__(self) -> int:
        return len(self._complete)

    def __getitem__(self, index: int, /) -> Record:
        source, target = self._pair(int(self._complete[index]))
        return {'source': source, 'target': target}

    def labels(self) -> np.ndarray:
        raise UserError(f'source {self._title}: pairs of sentences have no classes')

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest whole files."""
        del indices
        lines = (self._lines, self._targets)
        return Listing(listing.digest_of(*(file.data for file in lines if file is not None)))

    def record_name(self, index: int, /) -> str:
        return f'{self._lines.path} line {self._complete[index] + 1}'

    def _pair(self, line: int) -> tuple[str, str]:
        if self._targets is not None:
            return self._lines[line], self._targets[line]
        columns = self._lines[line].split('\t')
        if columns == ['']:
            return '', ''
        if len(columns) != 2:
            raise UserError(
                f'{self._lines.path} line {line + 1}: {len(columns)} columns; write the source, '
                'a tab and the target, or give two files, text:train.en,train.de'
            )
        return columns[0], columns[1]


class _Lines:
    """Lines of a UTF-8 file.

    Lines end only at line feeds: `str.splitlines` also splits at characters inside sentences, which
    would misalign the following pairs.

    Attributes:
      path: Path of the file.
      data: Content of the file.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        try:
            self.data = paths.read_bytes(path, paths.TEXT).removeprefix(b'\xef\xbb\xbf')
        except OSError as error:
            raise UserError(f'source text: cannot read {path}: {error.strerror}') from error
        try:
            self.data.decode()
        except UnicodeDecodeError as error:
            line = self.data.count(b'\n', 0, error.start) + 1
            raise UserError(
                f'{path} line {line}: not UTF-8 ({error.reason}); convert the file with iconv'
            ) from error
        ends = np.flatnonzero(np.frombuffer(self.data, np.uint8) == ord('\n'))
        if not self.data.endswith(b'\n') and self.data:
            ends = np.append(ends, len(self.data))
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        start = self._ends[index - 1] + 1 if index else 0
        return self.data[start : self._ends[index]].decode().removesuffix('\r')


def _resolve_second(first: str, second: str) -> pathlib.Path:
    path = pathlib.Path(second).expanduser()
    return path if len(path.parts) > 1 else pathlib.Path(first).expanduser().with_name(second)
