"""`coco_captions:PATH`: images with captions in COCO format, arXiv:1504.00325.

PATH/captions_SPLIT.json, or PATH/annotations/captions_SPLIT.json
PATH/SPLIT/*.jpg, PATH/images/SPLIT/*.jpg, PATH/images/*.jpg or PATH/*.jpg
"""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import numpy as np

from vit_jax.data import images, listing
from vit_jax.data.records import Listing, Record, SourceInfo
from vit_jax.data.sources import coco
from vit_jax.errors import UserError

log = logging.getLogger(__name__)

PREFIX = 'captions_'


class Source:
    """Records {image, caption, image_id}, one per caption, sorted by image id and caption id.

    `image_id` is the number of the image in the file, so that a retrieval evaluation knows which
    captions belong to the same image. Empty captions are dropped, and the log counts them.
    """

    def __init__(self, path: str, split: str):
        root = pathlib.Path(path).expanduser()
        self._name = f'source coco_captions:{path}'
        file = self._file = coco.find_annotations(root, split, PREFIX, self._name)
        content = coco.read_json(file, self._name)
        with coco.coco_format(file, self._name):
            self._images = coco.list_images(content, sized=False)
            self._captions = _list_captions(content['annotations'], self._images)
            if lost := len(content['annotations']) - len(self._captions):
                log.warning('%s: %d empty captions are ignored', file, lost)
            if not self._captions:
                raise ValueError('it has no captions')
            self._folder = coco.image_folder(root, split, self._images, self._name)
        self.info = SourceInfo(0, ())

    def __len__(self) -> int:
        return len(self._captions)

    def __getitem__(self, index: int, /) -> Record:
        return images.decode_record(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        """Return the record with an encoded image; BrokenRecord if it cannot be read."""
        number, caption = self._captions[index]
        data = images.read_file(self._path(number))
        return {'image': data, 'caption': caption, 'image_id': number}

    def labels(self) -> np.ndarray:
        raise UserError(f'{self._name}: images have captions instead of classes')

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest the whole annotation file, and the sizes of the images."""
        names = [self._images[self._captions[i][0]]['file_name'] for i in indices.tolist()]
        return Listing(
            listing.digest_of_file(self._file), listing.digest_of_sizes(self._folder, names)
        )

    def record_name(self, index: int, /) -> str:
        return str(self._path(self._captions[index][0]))

    def _path(self, number: int) -> pathlib.Path:
        return self._folder / self._images[number]['file_name']


def _list_captions(
    annotations: list[dict[str, Any]], image_records: list[dict[str, Any]]
) -> list[tuple[int, str]]:
    """List (image number, caption), sorted by image, then by caption."""
    numbers = {image['id']: number for number, image in enumerate(image_records)}
    captions = []
    for annotation in annotations:
        caption_id = coco.read_id(annotation, 'id', 'a caption')
        name = f'caption {caption_id}'
        image = coco.read_id(annotation, 'image_id', name)
        if image not in numbers:
            raise ValueError(f'{name} refers to the unknown image {image}')
        if not isinstance(annotation['caption'], str):
            raise ValueError(f'{name} is not text')
        if caption := annotation['caption'].strip():
            order = isinstance(caption_id, str), caption_id
            captions.append((numbers[image], order, caption))
    return [(number, caption) for number, _, caption in sorted(captions)]
