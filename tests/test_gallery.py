"""`make gallery` replaces only pictures that look otherwise than before."""

import importlib.util
import pathlib

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def make(repo):
    spec = importlib.util.spec_from_file_location('make', repo / 'docs' / 'gallery' / 'make.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(path: pathlib.Path, shift: int = 0, line: bool = False) -> bytes:
    pixels = np.tile(np.arange(100, dtype=np.uint8) + 50 + shift, (100, 1))
    if line:
        pixels[50] = 255
    Image.fromarray(pixels).save(path)
    return path.read_bytes()


def test_a_picture_that_looks_as_before_keeps_its_bytes(make, tmp_path):
    file = tmp_path / 'a.png'
    before = draw(file)
    other = draw(file, shift=3)
    assert other != before
    make.keep(file, before)
    assert file.read_bytes() == before
    changed = draw(file, line=True)
    make.keep(file, before)
    assert file.read_bytes() == changed
    make.keep(file, None)
    assert file.read_bytes() == changed
