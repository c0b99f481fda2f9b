"""Pairs of sentences from files: lines belong together whatever stands in them."""

import logging

import pytest
from helpers.messages import says

from vit_jax.data.sources import open_source
from vit_jax.errors import UserError

ENGLISH = ['A man.', 'Two dogs\u2028run\x85far.', 'Ünïcode\x0b!', 'last']
GERMAN = ['Ein Mann.', 'Zwei Hunde.', 'Ein\tTab?', 'letzte']


def pairs(source):
    return [(source[i]['source'], source[i]['target']) for i in range(len(source))]


def two_files(folder, first, second, end='\n'):
    (folder / 'a.en').write_bytes(end.join(first).encode())
    (folder / 'a.de').write_bytes(end.join([*second, '']).encode())
    return f'text:{folder}/a.en,a.de'


@pytest.mark.parametrize('end', ['\n', '\r\n'])
def test_two_files(tmp_path, end):
    source = open_source(two_files(tmp_path, ENGLISH, GERMAN, end), 'train')
    assert pairs(source) == list(zip(ENGLISH, GERMAN, strict=True))
    assert source.info.num_classes == 0
    assert source.record_name(2) == f'{tmp_path}/a.en line 3'


def test_the_second_file_may_lie_elsewhere(tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    two_files(tmp_path, ENGLISH, GERMAN)
    (tmp_path / 'a.de').rename(tmp_path / 'elsewhere' / 'b.de')
    source = open_source(f'text:{tmp_path}/a.en,{tmp_path}/elsewhere/b.de', 'train')
    assert source[1]['target'] == 'Zwei Hunde.'


def test_a_table(tmp_path):
    path = tmp_path / 'pairs.tsv'
    path.write_text('\ufeffone\teins\n\ntwo\tzwei\n', encoding='utf-8')
    source = open_source(f'text:{path}', 'train')
    assert pairs(source) == [('one', 'eins'), ('two', 'zwei')]
    assert source.record_name(1) == f'{path} line 3'


def test_slices_count_what_is_kept(tmp_path):
    name = two_files(tmp_path, ['a', ' ', 'c', 'd', 'e'], ['A', 'B', 'C', '', 'E'])
    assert pairs(open_source(name, 'train[:2]')) == [('a', 'A'), ('c', 'C')]
    assert pairs(open_source(name, 'train[2:]')) == [('e', 'E')]


def test_empty_sides_are_left_out_and_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        open_source(two_files(tmp_path, ['a', ' ', 'c', 'd'], ['A', 'B', 'C', '']), 'train')
    assert says(caplog.messages, '2 pairs', 'empty')


def test_files_that_are_not_parallel(tmp_path):
    name = two_files(tmp_path, ENGLISH, GERMAN[:3])
    with pytest.raises(UserError, match=r'a\.en has 4 lines, .*a\.de has 3'):
        open_source(name, 'train')


def test_bytes_that_are_no_utf8_are_named_by_line(tmp_path):
    name = two_files(tmp_path, ENGLISH, GERMAN)
    (tmp_path / 'a.de').write_bytes(b'Ein Mann.\nZwei M\xe4nner\nc\nd\n')
    with pytest.raises(UserError, match=r'a\.de line 2: not UTF-8'):
        open_source(name, 'train')


@pytest.mark.parametrize(
    ('content', 'message'),
    [('a\tA\nb\n', 'line 2: 1 columns'), ('a\tA\tx\n', 'line 1: 3 columns')],
)
def test_a_table_of_other_columns(tmp_path, content, message):
    (tmp_path / 'p.tsv').write_text(content)
    with pytest.raises(UserError, match=message):
        open_source(f'text:{tmp_path}/p.tsv', 'train')


def test_mistakes(tmp_path):
    name = two_files(tmp_path, ENGLISH, GERMAN)
    for wrong, split, message in [
        (name, 'test', "unknown split 'test'"),
        (name, 'train[:2 per class]', 'have no classes'),
        (f'text:{tmp_path}/no.en,a.de', 'train', r'no\.en.*No such file'),
        (f'text:{tmp_path}', 'train', 'cannot read'),
    ]:
        with pytest.raises(UserError, match=message):
            open_source(wrong, split)


def test_an_empty_file_has_no_example(tmp_path):
    (tmp_path / 'p.tsv').write_text('')
    with pytest.raises(UserError, match='selects no example'):
        open_source(f'text:{tmp_path}/p.tsv', 'train')


def test_multi30k(shared_data):
    folder = shared_data / 'multi30k'
    if not folder.is_dir():
        pytest.skip(f'no {folder}')
    source = open_source(f'text:{folder}/val.en,val.de', 'train')
    assert len(source) == 1014
    assert source[0] == {
        'source': 'A group of men are loading cotton onto a truck',
        'target': 'Eine Gruppe von Männern lädt Baumwolle auf einen Lastwagen',
    }
