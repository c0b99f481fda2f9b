"""Lists of many files: cached once, and listed again as soon as a folder has changed."""

import logging
import os
import pathlib
import shutil

import pytest

from vit_jax.data import listing
from vit_jax.data.sources import open_source


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with files at three depths that changed long ago; more than two are many."""
    monkeypatch.setattr(listing, 'MANY', 2)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    root = tmp_path / 'data'
    for name in ('top', 'b/2', 'b/1', 'b/deep/3', '.hidden/4', 'a/.hidden'):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    settle(root)
    return root


def settle(root):
    for folder in (root, *(path for path in root.rglob('*') if path.is_dir())):
        os.utime(folder, (1e9, 1e9))


NAMES = ['b/1', 'b/2', 'b/deep/3', 'top']


def no_walk(*_, **__):
    raise AssertionError('listed again')


def test_files_are_listed_once(files, monkeypatch):
    assert listing.files_below(files) == NAMES
    monkeypatch.setattr(os, 'walk', no_walk)
    assert listing.files_below(files) == NAMES


@pytest.mark.parametrize('change', ['b/deep/new', 'new', 'a/new'])
def test_a_new_file_is_seen(files, change):
    listing.files_below(files)
    (files / change).touch()
    assert listing.files_below(files) == sorted([*NAMES, change])
    (files / change).unlink()
    assert listing.files_below(files) == NAMES


@pytest.mark.fault(87)
def test_a_list_is_made_anew_where_archives_fix_all_times(files):
    """As of `tar --mtime`, or a layer of a container unpacked again."""
    listing.files_below(files)
    (files / 'b' / '1').rename(files / 'b' / '9')
    settle(files)
    assert listing.files_below(files) == ['b/2', 'b/9', 'b/deep/3', 'top']
    shutil.copytree(files / 'b', files / 'copy')
    (files / 'copy' / '9').rename(files / 'copy' / '8')
    shutil.rmtree(files / 'b')
    (files / 'copy').rename(files / 'b')
    settle(files)
    assert listing.files_below(files) == ['b/2', 'b/8', 'b/deep/3', 'top']


@pytest.mark.parametrize('target', ['..', '.', '../..', '../../..'])
def test_a_link_to_a_folder_that_holds_it_is_left_out(files, target, caplog):
    (files / 'b' / 'deep' / 'link').symlink_to(target)
    assert listing.files_below(files) == NAMES
    assert 'b/deep/link' in caplog.text


def test_links_to_other_folders_are_followed_once(files):
    (files / 'a' / 'link').symlink_to('../b')
    (files / 'b' / 'link').symlink_to('../a')
    names = ['1', '2', 'deep/3']
    expected = {*NAMES, *(f'a/link/{name}' for name in names)}
    assert set(listing.files_below(files)) == expected


def test_a_folder_that_has_just_changed_is_not_cached(files, tmp_path):
    (files / 'b' / 'new').touch()
    listing.files_below(files)
    assert not list((tmp_path / 'cache').rglob('*.json'))


def test_few_files_are_not_cached(files, tmp_path, monkeypatch):
    monkeypatch.setattr(listing, 'MANY', 4)
    listing.files_below(files)
    assert not (tmp_path / 'cache').exists()


@pytest.mark.fault(87)
@pytest.mark.parametrize('content', [b'', b'[]', b'{"folders": {"x/": 1}, "files": ["y"]}', b'{"a'])
def test_a_damaged_list_is_made_anew(files, tmp_path, content):
    listing.files_below(files)
    (cached,) = (tmp_path / 'cache').rglob('*.json')
    cached.write_bytes(content)
    assert listing.files_below(files) == NAMES


@pytest.mark.fault(87)
def test_without_a_cache_folder_files_are_listed_each_time(files, tmp_path, caplog):
    (tmp_path / 'cache').write_text('a file')
    with caplog.at_level(logging.WARNING):
        assert listing.files_below(files) == NAMES
    assert f'{tmp_path / "cache" / "vit_jax"}' in caplog.text


def test_names_that_are_not_in_utf_8(files):
    pathlib.Path(os.fsdecode(os.fsencode(files / 'b') + b'/\xff')).touch()
    settle(files)
    for _ in range(2):
        assert os.fsdecode(b'b/\xff') in listing.files_below(files)


# -- digests of what is listed ---------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    """Two classes of three files, of which only names and sizes are read."""
    for name in ('a/0.png', 'a/1.png', 'a/2.png', 'b/0.png', 'b/1.png', 'b/2.png'):
        (tmp_path / 'images' / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'images' / name).write_bytes(b'four')
    return tmp_path / 'images'


def digests(folder, split='train'):
    return open_source(f'folder:{folder}', split).listing()


def test_digests_do_not_depend_on_the_place(images, tmp_path):
    shutil.copytree(images, tmp_path / 'elsewhere')
    assert digests(images) == digests(tmp_path / 'elsewhere')
    assert digests(images, 'train[:3]') != digests(images, 'train[3:]')


def test_digests_tell_names_and_labels_from_sizes(images):
    before = digests(images)
    (images / 'a' / '0.png').write_bytes(b'five!')
    replaced = digests(images)
    assert replaced.examples == before.examples and replaced.contents != before.contents
    (images / 'a' / '0.png').write_bytes(b'four')
    (images / 'a' / '0.png').rename(images / 'b' / '3.png')
    moved = digests(images)
    assert moved.examples != before.examples and moved.contents == before.contents


def test_sizes_of_many_files_are_not_asked_for(images, monkeypatch):
    monkeypatch.setattr(listing, 'MANY', 5)
    found = digests(images)
    assert found.examples and not found.contents


def test_texts_and_prompts_are_known_whole(tmp_path):
    (tmp_path / 'pairs.tsv').write_text('a dog\tein Hund\n')
    before = open_source(f'text:{tmp_path}/pairs.tsv', 'train').listing()
    (tmp_path / 'pairs.tsv').write_text('a dog\tein Huhn\n')
    assert open_source(f'text:{tmp_path}/pairs.tsv', 'train').listing() != before
    one, other = (
        open_source(f'prompts:{{"names": ["cat", "{name}"], "templates": ["a {{}}"]}}', 'all')
        for name in ('dog', 'cow')
    )
    assert one.listing() != other.listing()


def test_classes_that_are_numbered_anew_are_other_examples():
    source = open_source('digits', 'train')
    one, other = (source.only_classes(classes).listing() for classes in ((1, 2), (2, 1)))
    assert one.examples != other.examples and one.contents == other.contents


def test_a_source_that_lists_nothing_has_the_digest_of_what_is_chosen():
    one, other = (open_source('synthetic:copy', split).listing() for split in ('train', 'test'))
    assert one.examples != other.examples and not one.contents
