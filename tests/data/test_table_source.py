"""Tables of images and their classes: layouts, several classes, and mistakes by their rows."""

import numpy as np
import pyarrow as pa
import pytest
from helpers.messages import mentions
from PIL import Image
from pyarrow import parquet

from vit_jax.data.records import UnknownSplit
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Eight images `images/K.png` whose pixels are K."""
    (tmp_path / 'images').mkdir()
    for k in range(8):
        Image.new('RGB', (4, 4), (k, k, k)).save(tmp_path / 'images' / f'{k}.png')
    return tmp_path


def write(folder, *rows, header='image,label', encoding='utf-8', name='labels.csv'):
    (folder / name).write_text('\n'.join((header, *rows)) + '\n', encoding=encoding)


def found(source):
    """{pixel value: label} of all examples."""
    records = [source[i] for i in range(len(source))]
    return {int(r['image'][0, 0, 0]): r['label'] for r in records}


EIGHT = [f'images/{k}.png,{"cat" if k % 2 else "dog"}' for k in range(8)]


@pytest.mark.parametrize('how', ['folder', 'file', 'table', 'beside', 'parquet'])
def test_classes_are_those_of_the_table(folder, how):
    name = f'folder:{folder}'
    if how == 'parquet':
        rows = [row.split(',') for row in EIGHT]
        columns = {'image': [row[0] for row in rows], 'label': [row[1] for row in rows]}
        parquet.write_table(pa.table(columns), folder / 'labels.parquet')
    else:
        write(folder, *EIGHT)
        at = {'file': '/labels.csv', 'beside': '/images', 'table': '/labels.csv'}.get(how, '')
        name = f'{"table" if how == "table" else "folder"}:{folder}{at}'
    source = open_source(name, 'train')
    assert source.info.class_names == ('cat', 'dog')
    assert found(source) == {k: 1 - k % 2 for k in range(8)}
    np.testing.assert_array_equal(source.class_counts(), [4, 4])
    kept = open_source(name, 'train[:1 per class]')
    assert sorted(kept.labels()) == [0, 1]
    with pytest.raises(UnknownSplit):
        open_source(name, 'val')


def test_splits_share_their_classes_and_rows_may_stand_in_any_order(folder):
    rows = [f'{row},{"val" if k < 2 else "train"}' for k, row in enumerate(EIGHT)]
    rows[0] = 'images/0.png,emu,val'
    write(folder, *rows, header='image,label,split')
    train, val = (open_source(f'folder:{folder}', split) for split in ('train', 'val'))
    assert train.info.class_names == val.info.class_names == ('cat', 'dog', 'emu')
    assert found(val) == {0: 2, 1: 0}
    before = train.listing()
    write(folder, *reversed(rows), header='image,label,split')
    assert open_source(f'folder:{folder}', 'train').listing() == before
    write(folder, *rows[:-1], 'images/7.png,dog,train', header='image,label,split')
    assert open_source(f'folder:{folder}', 'train').listing() != before


def test_spreadsheets_write_a_mark_quotes_and_spaces(folder):
    (folder / 'images' / '0.png').rename(folder / 'images' / 'a, b.png')
    write(
        folder,
        '"images/a, b.png", "big, ""old"" cat"',
        '',
        './images/1.png,dog',
        header='Image,Label',
        encoding='utf-8-sig',
    )
    source = open_source(f'folder:{folder}', 'train')
    assert source.info.class_names == ('big, "old" cat', 'dog')
    assert found(source) == {0: 0, 1: 1}


def test_numbers_are_sorted_as_numbers_in_both_formats(folder):
    write(folder, 'images/0.png,10', 'images/1.png,9')
    csv = open_source(f'folder:{folder}', 'train')
    (folder / 'labels.csv').unlink()
    columns = {'image': ['images/0.png', 'images/1.png'], 'label': [10.0, 9.0]}
    parquet.write_table(pa.table(columns), folder / 'labels.parquet')
    assert csv.info.class_names == open_source(f'folder:{folder}', 'train').info.class_names
    assert csv.info.class_names == ('9', '10')


@pytest.mark.parametrize('form', ['csv', 'parquet'])
def test_several_classes_are_marks(folder, form):
    names = [f'images/{k}.png' for k in range(3)]
    if form == 'csv':
        write(
            folder,
            *map(','.join, zip(names, ('cat;dog', '', 'dog'), strict=True)),
            header='image,labels',
        )
    else:
        columns = {'image': names, 'labels': [['dog', 'cat'], [], ['dog']]}
        parquet.write_table(pa.table(columns), folder / 'labels.parquet')
    source = open_source(f'folder:{folder}', 'train')
    assert source.info.multilabel
    assert {k: v.tolist() for k, v in found(source).items()} == {0: [1, 1], 1: [0, 0], 2: [0, 1]}
    assert source[0]['label'].dtype == np.uint8
    np.testing.assert_array_equal(source.class_counts(), [1, 2])
    with pytest.raises(UserError, match='classes'):
        open_source(f'folder:{folder}', 'train[:1 per class]')
    model = open_source(f'folder:{folder}', 'train').info
    swapped = source.numbered_as(type(model)(3, ('dog', 'emu', 'cat')))
    assert swapped.info.multilabel
    assert {k: v.tolist() for k, v in found(swapped).items()}[2] == [1, 0, 0]


@pytest.mark.fault(137)
@pytest.mark.parametrize(
    ('rows', 'header', 'parts'),
    [
        (['images/0.png,cat', 'images/9.png,dog'], None, ['row 3', '9.png']),
        (['images/0,cat'], None, ['row 2', "did you mean 'images/0.png'"]),
        (['images\\0.png,cat'], None, ['row 2', 'write / between']),
        (['images/0.png,cat', './images/0.png,cat'], None, ['row 3', 'row 2']),
        (['../0.png,cat'], None, ['row 2', 'outside of']),
        (['/etc/passwd,cat'], None, ['row 2', 'outside of']),
        (['images/0.png,'], None, ['row 2', 'has no label']),
        ([',cat'], None, ['row 2', 'has no image']),
        (['images/0.png,cat;dog'], None, ['row 2', "a column 'labels'"]),
        (['images/0.png,big, cat'], None, ['row 2', 'has 3 cells', 'double quotes']),
        (['images/0.png,"cat'], None, ['row 2']),
        (['images/0.png,cat,1'], 'image,label,spilt', ["unknown column 'spilt'"]),
        (['images/0.png,cat'], 'file,label', ["no column 'image'", "'file'"]),
        (['images/0.png,cat'], 'image,image', ['two columns']),
        (['images/0.png;cat'], 'image;label', ["separated by ';'"]),
        (['images/0.png,1'], 'image,split', ["'label' or 'labels'"]),
        (['images/0.png,cat,'], 'image,label,split', ['row 2', 'has no split']),
        ([], None, ['lists no image']),
    ],
)
def test_mistakes_are_one_line_with_file_and_row(folder, rows, header, parts):
    write(folder, *rows, header=header or 'image,label')
    with pytest.raises(UserError) as error:
        open_source(f'folder:{folder}', 'train')
    message = str(error.value)
    assert '\n' not in message and str(folder / 'labels.csv') in message
    assert all(part in message for part in parts), message


@pytest.mark.fault(137)
@pytest.mark.parametrize(
    ('header', 'cells', 'named'),
    [
        ('image,label', ['cat', 'cat|dog'], 'row 3'),
        ('image,label', ['cat', "\"['cat', 'dog']\""], 'row 3'),
        ('image,labels', ['cat', 'cat|dog'], 'row 3'),
        ('image,labels', ['cat;dog', '"cat,dog"'], 'row 3'),
        ('image,labels', ['[]', '"[\'cat\']"'], 'row 2'),
        ('image,cat,dog', ['0,1', '1,0'], "'cat', 'dog'"),
    ],
)
def test_several_classes_in_other_forms_are_refused(folder, header, cells, named):
    write(folder, *(f'images/{k}.png,{cell}' for k, cell in enumerate(cells)), header=header)
    with pytest.raises(UserError, match=rf"{named}.*'labels'.*semicolon"):
        open_source(f'folder:{folder}', 'train')


@pytest.mark.fault(137)
def test_lists_of_marks_are_refused_and_those_of_numbers_are_read(folder):
    names = [f'images/{k}.png' for k in range(3)]
    for labels in ([[1, 0, 0], [0, 1, 1], [0, 0, 0]], [[True, True], [False, True], []]):
        parquet.write_table(pa.table({'image': names, 'labels': labels}), folder / 'labels.parquet')
        if [] in labels:
            assert open_source(f'folder:{folder}', 'train').info.multilabel
            continue
        with pytest.raises(UserError, match=r"'labels' has"):
            open_source(f'folder:{folder}', 'train')
    parquet.write_table(
        pa.table({'image': names, 'labels': [[0, 1], [1, 0], [1, 0]]}), folder / 'labels.parquet'
    )
    assert found(open_source(f'folder:{folder}', 'train'))[0].tolist() == [1, 1]


def test_a_comma_in_the_name_of_a_class_stays(folder):
    write(folder, 'images/0.png,"tench, Tinca tinca"', 'images/1.png,crane', header='image,labels')
    names = open_source(f'folder:{folder}', 'train').info.class_names
    assert names == ('crane', 'tench, Tinca tinca')


@pytest.mark.fault(137)
@pytest.mark.parametrize('other', ['Train', 'training', 'TRAIN'])
def test_a_split_under_two_names_is_refused(folder, other):
    rows = [f'{row},{other if k < 2 else "train"}' for k, row in enumerate(EIGHT)]
    write(folder, *rows, header='image,label,split')
    with pytest.raises(UserError, match=rf"'{other}' and 'train'|'train' and '{other}'"):
        open_source(f'folder:{folder}', 'train')


@pytest.mark.parametrize('form', ['table', 'pattern'])
def test_spellings_that_look_the_same_are_one_class(folder, form):
    composed, apart = 'k\u00e4se', 'ka\u0308se'
    if form == 'table':
        write(folder, f'images/0.png,{apart}', f'images/1.png,{composed}', 'images/2.png,dog')
        source = open_source(f'folder:{folder}', 'train')
    else:
        for k, name in enumerate((apart, composed, 'dog')):
            (folder / 'images' / f'{k}.png').rename(folder / 'images' / f'{name}_{k}.png')
        source = open_source(f'folder:{folder}/images/{{label}}_*', 'train')
    assert source.info.class_names == ('dog', composed)
    assert found(source) == {0: 1, 1: 1, 2: 0}


@pytest.mark.fault(137)
@pytest.mark.parametrize(
    ('labels', 'named'), [(('Cat', 'dog'), ['Cat', 'cat']), (('emu', 'cow'), ['emu', 'cow'])]
)
def test_classes_of_evaluation_that_training_lacks_are_refused(folder, labels, named):
    rows = [f'{row},train' for row in EIGHT[:6]]
    rows += [f'images/{k}.png,{label},val' for k, label in zip((6, 7), labels, strict=True)]
    write(folder, *rows, header='image,label,split')
    with pytest.raises(UserError, match="'val' has") as error:
        open_source(f'folder:{folder}', 'val')
    assert all(repr(name) in str(error.value) for name in named)


@pytest.mark.fault(137)
@pytest.mark.parametrize(
    ('encoding', 'part'), [('utf-16', 'is UTF-16'), ('latin-1', 'row 2: is not UTF-8')]
)
def test_other_encodings_are_refused(folder, encoding, part):
    write(folder, 'images/0.png,grün', encoding=encoding)
    with pytest.raises(UserError, match=part):
        open_source(f'folder:{folder}', 'train')


def test_other_mistakes(folder, caplog):
    write(folder, *EIGHT[:6])
    open_source(f'folder:{folder}', 'train')
    assert mentions(caplog.text, '2 images', 'list')
    (folder / 'labels.parquet').write_bytes(b'x')
    with pytest.raises(UserError, match='both exist'):
        open_source(f'folder:{folder}', 'train')
    (folder / 'labels.csv').unlink()
    with pytest.raises(UserError, match=r'labels\.parquet: .*Parquet'):
        open_source(f'folder:{folder}', 'train')
    with pytest.raises(UserError, match=r'\.csv or \.parquet'):
        open_source(f'table:{folder}', 'train')
    with pytest.raises(UserError, match='cannot be read'):
        open_source(f'table:{folder}/none.csv', 'train')
