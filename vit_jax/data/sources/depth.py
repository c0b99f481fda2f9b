"""`depth:PATH`: images with the distance of every pixel, in 16-bit PNG or NumPy files.

    PATH/images/*.jpg, PATH/depth/*.png               same names; a single split, `train`
    PATH/images/SPLIT/*.jpg, PATH/depth/SPLIT/*.npy   or PATH/SPLIT/images, PATH/SPLIT/depth
    PATH/nyu_SPLIT.txt                                or lines `IMAGE DEPTH`, relative to PATH
    PATH/scale.txt                                    units per meter, such as 256 for KITTI

The depth folder may also be called `depths` or `annotations`. Without `scale.txt`, whole numbers
are millimeters, and floating-point numbers meters. Depth that is 0, negative or not finite is
unknown. NYU Depth v2 (Silberman et al., 2012, doi:10.1007/978-3-642-33715-4_54) has such folders,
or the lists `nyu_train.txt` and `nyu_test.txt`, whose third column, the focal length, is ignored.
The files of a split have a fixed shuffled order.
"""

from __future__ import annotations

import io
import math
import pathlib
from typing import NamedTuple

import numpy as np

from vit_jax.array_types import Float
from vit_jax.data import images, listing
from vit_jax.data.records import BrokenRecord, Listing, Record, SourceInfo, UnknownSplit
from vit_jax.data.sources._pairs import Folders, Truth, pair_files, shuffle, split_folders
from vit_jax.errors import UserError, one_line
from vit_jax.ops.depth import UNKNOWN
from vit_jax.storage import paths

DEPTH = Truth('depth map', ('depth', 'depths', 'annotations'), ('.png', '.npy'))
LISTS = {'train': 'nyu_train.txt', 'test': 'nyu_test.txt'}
SCALE = 'scale.txt'
MILLIMETERS = 1000.0  # per meter


class Files(NamedTuple):
    """Files of a split.

    Attributes:
      images, depth: Folders.
      pairs: Names of an image and of its depth map.
    """

    images: pathlib.Path
    depth: pathlib.Path
    pairs: list[tuple[str, str]]


class Source:
    """Records {image, depth}: float32 [H W] in meters, 0 where it is unknown."""

    info = SourceInfo(0, ())

    def __init__(self, path: str, split: str):
        root = pathlib.Path(path).expanduser()
        self._title = f'source depth:{path}'
        if not root.is_dir():
            raise UserError(f'{self._title}: this folder does not exist')
        self._files = _find_files(root, split, self._title)
        self._scale = _read_scale(root / SCALE)

    def __len__(self) -> int:
        return len(self._files.pairs)

    def __getitem__(self, index: int, /) -> Record:
        name, other = self._files.pairs[index]
        image = images.decode_image(
            images.read_file(self._files.images / name), name=self.record_name(index)
        )
        record = self.annotations(index)
        if (size := record.pop('size')) != image.shape[:2]:
            raise BrokenRecord(
                f'{self._files.depth / other}: has {size[1]} x {size[0]} pixels, the image '
                f'{self._files.images / name} {image.shape[1]} x {image.shape[0]}'
            )
        return {'image': image, **record}

    def annotations(self, index: int) -> Record:
        """Return the depth, and its `size`, height and width; BrokenRecord if it is unreadable."""
        depth = read_depth(self._files.depth / self._files.pairs[index][1], self._scale)
        return {'size': depth.shape, 'depth': depth}

    def labels(self) -> np.ndarray:
        raise UserError(f'{self._title}: images have depth instead of one class')

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest names of files and the scale, and sizes of images and depth maps."""
        pairs = [self._files.pairs[i] for i in indices.tolist()]
        names = ['\0'.join(pair) for pair in pairs]
        folders = self._files.images, self._files.depth
        sizes = [
            listing.digest_of_sizes(folder, [pair[side] for pair in pairs])
            for side, folder in enumerate(folders)
        ]
        contents = listing.digest_of(sizes) if all(sizes) else ''
        return Listing(listing.digest_of(names, [str(self._scale)]), contents)

    def record_name(self, index: int, /) -> str:
        return str(self._files.images / self._files.pairs[index][0])


def read_depth(path: pathlib.Path, scale: float | None) -> Float[np.ndarray, 'H W']:
    """Read a depth map in meters, 0 where it is unknown.

    Args:
      path: PNG or .npy file.
      scale: Units per meter; None for millimeters in whole numbers, and meters in others.

    Raises:
      BrokenRecord: if the file cannot be read, or is not a map.
    """
    values = _read_array(path) if path.suffix.lower() == '.npy' else _read_png(path)
    if values.ndim == 3 and 1 in (values.shape[0], values.shape[2]):
        values = values.reshape([side for side in values.shape if side != 1] or [1])
    if values.ndim != 2 or values.dtype.kind not in 'uif' or not values.size:
        raise BrokenRecord(
            f'{path}: an array {values.dtype} {list(values.shape)} is not a depth map [H, W]'
        )
    is_whole = values.dtype.kind in 'ui'
    with np.errstate(over='ignore', invalid='ignore'):
        meters = values / np.float64(scale or (MILLIMETERS if is_whole else 1))
        depth = meters.astype(np.float32)
        return np.where(np.isfinite(depth) & (depth > 0), depth, np.float32(UNKNOWN))


def _read_png(path: pathlib.Path) -> np.ndarray:
    return images.read_values(path, colors=False)


def _read_array(path: pathlib.Path) -> np.ndarray:
    data = images.read_file(path)
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # NumPy raises ValueError, EOFError, MemoryError ...
        raise BrokenRecord(f'{path}: {one_line(str(error))}') from error


def _find_files(root: pathlib.Path, split: str, title: str) -> Files:
    """Find the files of a split, by a list or by folders."""
    if lists := {name: root / file for name, file in LISTS.items() if (root / file).is_file()}:
        if split not in lists:
            raise UnknownSplit.from_splits(title, split, lists)
        return Files(root, root, shuffle(_read_list(lists[split])))
    folders: tuple[Folders, Folders] = split_folders(root, DEPTH, title)
    if split not in folders[0]:
        raise UnknownSplit.from_splits(title, split, folders[0])
    both = folders[0][split], folders[1][split]
    return Files(*both, pair_files(*both, DEPTH, title))


def _read_list(file: pathlib.Path) -> list[tuple[str, str]]:
    pairs = []
    for number, line in enumerate(_read_text(file).splitlines(), 1):
        names = [name.lstrip('/') for name in line.split()[:2]]
        if not names:
            continue
        if len(names) < 2 or not all(map(paths.stays_inside, names)):
            raise UserError(f'{file}: line {number}: must be IMAGE DEPTH, files in {file.parent}')
        pairs.append((names[0], names[1]))
    if not pairs:
        raise UserError(f'{file}: lists no images')
    return pairs


def _read_scale(file: pathlib.Path) -> float | None:
    """Read the units per meter; None if there is no such file."""
    if not file.is_file():
        return None
    try:
        scale = float(_read_text(file))
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise UserError(f'{file}: must hold one number, the units per meter, such as 1000')
    return scale


def _read_text(file: pathlib.Path) -> str:
    try:
        return paths.read_bytes(file, paths.TABLE).decode('utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{file}: cannot be read as UTF-8: {paths.first_line(error)}') from error
