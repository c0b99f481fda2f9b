"""`predict`: the classes of a user's files."""

import csv
import io
import json
import shutil

import jax
import numpy as np
import pytest
from helpers.messages import mentions, says
from PIL import Image
from pyarrow import parquet

from vit_jax import __main__ as cli
from vit_jax.commands import predict
from vit_jax.commands._parser import image_names
from vit_jax.data.sources import open_source
from vit_jax.inference import load
from vit_jax.runtime.console import Console


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """Three digits of the test split as PNG files."""
    folder = tmp_path_factory.mktemp('digits')
    source = open_source('digits', 'test')
    for i in (0, 1, 2):
        Image.fromarray(source[i]['image'][..., 0]).save(folder / f'{i}.png')
    return [folder / f'{i}.png' for i in (0, 1, 2)]


def probabilities(workdir, index):
    """Compute the probabilities of a test image directly with the model."""
    run = load.open_run(workdir)
    image = open_source('digits', 'test')[index]['image'][None].astype(np.float32)
    logits = jax.jit(run.model.apply)(run.variables, image / 127.5 - 1)['logits']
    return np.asarray(jax.nn.softmax(logits))[0]


@pytest.mark.slow
def test_the_most_probable_classes(smoke_run, files, capsys):
    argv = ['predict', '--workdir', smoke_run, *files, '--top', 3, '--json']
    assert cli.main([str(word) for word in argv]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output['step'] == 20
    for i, (path, result) in enumerate(zip(files, output['images'], strict=True)):
        assert result['image'] == str(path)
        assert says(result['read_as'], '8 x 8', 'gray')
        expected = probabilities(smoke_run, i)
        order = np.argsort(-expected)[:3]
        assert [p['label'] for p in result['predictions']] == order.tolist()
        assert [p['class'] for p in result['predictions']] == [str(k) for k in order]
        printed = [p['probability'] for p in result['predictions']]
        np.testing.assert_allclose(printed, expected[order], rtol=1e-5)


def test_a_table_an_image(smoke_run, files, capsys, tmp_path):
    photo = tmp_path / '[red]photo.jpg'
    Image.new('RGB', (60, 40), 'white').save(photo)
    argv = ['predict', '--workdir', smoke_run, photo, files[0], '--top', 99]
    assert cli.main([str(word) for word in argv]) == 0
    first, second = capsys.readouterr().out.strip().split('\n\n')
    assert '[red]photo.jpg' in first
    assert mentions(first, '60 x 40', '8 x 8')
    rows = [line.split() for line in second.splitlines()[2:]]
    assert sorted(row[0] for row in rows) == list('0123456789')
    assert sum(float(row[1]) for row in rows) == pytest.approx(1, abs=1e-3)


def test_an_earlier_checkpoint(smoke_run, files, capsys):
    argv = ['predict', '--workdir', str(smoke_run), str(files[0]), '--json', '--step']
    assert cli.main([*argv, '10']) == 0
    record = json.loads(capsys.readouterr().out)
    assert record['step'] == 10
    named = ['--checkpoint', str(smoke_run / 'checkpoints' / '10'), str(files[0]), '--json']
    assert cli.main(['predict', *named]) == 0
    assert json.loads(capsys.readouterr().out) == record
    assert cli.main([*argv, '7']) == 2
    assert '10' in capsys.readouterr().err


def test_mistakes_are_one_line(smoke_run, files, capsys, tmp_path):
    (tmp_path / 'text.png').write_text('not a picture')
    digit = str(files[0])
    for flags, message in [
        ([str(tmp_path / 'no.png')], 'No such file'),
        ([str(tmp_path / 'text.png')], 'text.png'),
        ([str(tmp_path / '*.jpg')], "*.jpg'"),
        ([digit, '--top', '0'], ('--top', '1')),
        ([digit, '--table', 'a.json'], '.csv or .parquet'),
        ([digit, '--one-row'], '--table'),
        ([digit] * 101 + ['--out', str(tmp_path / 'a.png')], 'name a folder'),
        ([digit, '--workdir', str(tmp_path)], 'holds no run'),
    ]:
        assert cli.main(['predict', '--workdir', str(smoke_run), *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == ''
        assert captured.err.startswith('error: ')
        assert captured.err.count('\n') == 1
        assert mentions(captured.err, message)


@pytest.mark.slow
def test_a_folder_with_a_broken_file_is_written_as_a_table(
    smoke_run, files, capsys, tmp_path, caplog
):
    broken = tmp_path / 'in' / 'sub' / 'broken.png'
    broken.parent.mkdir(parents=True)
    broken.write_text('not a picture')
    for i in (0, 1):
        shutil.copy(files[i], tmp_path / 'in' / f'{i}.png')
    (tmp_path / 'in' / 'scan.bmp').touch()
    argv = ['predict', '--workdir', str(smoke_run), '--top', '2', str(tmp_path / 'in')]
    assert cli.main([*argv, str(files[0].parent / '2.*'), '--table', str(tmp_path / 'a.csv')]) == 1
    captured = capsys.readouterr()
    assert captured.out == f'{tmp_path / "a.csv"}\n'
    named, counted = captured.err.splitlines()
    assert 'scan.bmp' in caplog.text and says(named, broken) and says(counted, '1 of 4')
    with open(tmp_path / 'a.csv', newline='') as opened:
        rows = list(csv.DictReader(opened))
    names = [tmp_path / 'in' / '0.png', tmp_path / 'in' / '1.png', files[2]]
    assert [row['image'] for row in rows] == [str(name) for name in names for _ in range(2)]
    flags = ['--json', '--table', str(tmp_path / 'a.parquet'), '--out', str(tmp_path / 'out')]
    assert cli.main([*argv, *flags]) == 1
    output = json.loads(capsys.readouterr().out)
    assert [entry['image'] for entry in output['left_out']] == [str(broken)]
    stored = parquet.read_table(tmp_path / 'a.parquet').to_pylist()
    expected = [entry for image in output['images'] for entry in image['predictions']]
    assert [row['probability'] for row in stored] == [entry['probability'] for entry in expected]
    assert [float(row['probability']) for row in rows[:4]] == [
        entry['probability'] for entry in expected
    ]
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == ['0.png', '1.png']


@pytest.mark.slow
def test_files_of_equal_names_get_a_picture_each(smoke_run, files, capsys, tmp_path):
    first, second = tmp_path / 'in' / 'a' / 'x.png', tmp_path / 'in' / 'b' / 'x.png'
    for file, digit in ((first, files[0]), (second, files[1])):
        file.parent.mkdir(parents=True)
        shutil.copy(digit, file)
    argv = ['predict', '--workdir', str(smoke_run), '--out', str(tmp_path / 'out')]
    assert cli.main([*argv, str(tmp_path / 'in')]) == 0
    pictures = [tmp_path / 'out' / 'a' / 'x.png', tmp_path / 'out' / 'b' / 'x.png']
    assert sorted((tmp_path / 'out').rglob('*.png')) == pictures
    assert pictures[0].read_bytes() != pictures[1].read_bytes()
    assert cli.main([*argv, str(first), str(first)]) == 2
    assert mentions(capsys.readouterr().err, 'x.png', 'picture')
    assert cli.main([*argv[:-1], str(first.parent), str(first)]) == 2
    assert mentions(capsys.readouterr().err, 'x.png', 'overwrite')


@pytest.mark.parametrize(
    ('argv', 'name'),
    [
        (['predict', '--workdir', 'RUN', 'FILE', '--out', 'FILE'], 'a.png'),
        (['predict', '--workdir', 'RUN', 'FOLDER', '--out', 'LINK'], 'a.png'),
        (['predict', '--workdir', 'RUN', 'FILE', '--table', 'FILE'], 'a.csv'),
        (['attention', '--workdir', 'RUN', 'FILE', '--out', 'FILE'], 'a.png'),
        (['colorize', '--workdir', 'RUN', 'FILE', '--out', 'FILE'], 'a.png'),
        (['embed', 'RUN', 'FOLDER', '--pca', 'FILE'], 'a.png'),
        (['embed', 'RUN', 'FILE', '--pca', 'b.png', '--neighbors', './b.png'], 'a.png'),
        (['colors', 'table:FILE', '--out', 'FILE'], 'a.csv'),
        (['translate', '--workdir', 'RUN', '--file', 'FILE', '--out', 'FILE'], 'a.txt'),
    ],
)
def test_inputs_are_not_overwritten(smoke_run, tmp_path, capsys, monkeypatch, argv, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'in').mkdir()
    file = tmp_path / 'in' / name
    file.write_bytes(b'the only copy')
    (tmp_path / 'link.png').symlink_to(file)
    places = {'RUN': smoke_run, 'FILE': file, 'FOLDER': tmp_path / 'in', 'LINK': 'link.png'}
    for place, path in places.items():
        argv = [word.replace(place, str(path)) for word in argv]
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert argv[-2] in line
    assert file.read_bytes() == b'the only copy' and (tmp_path / 'link.png').is_symlink()


def test_names_of_pictures():
    assert image_names(['a/x.jpg', 'b/y.jpg']) == ['x.png', 'y.png']
    assert image_names(['a/x.jpg', 'a/b/x.jpg', 'a/c/y.jpg']) == ['x.png', 'b/x.png', 'c/y.png']
    assert image_names(['a/x.jpg', 'a/x.webp', 'b/y.jpg'], samples=2) == [
        *('a/x.jpg_0.png', 'a/x.jpg_1.png', 'a/x.webp_0.png', 'a/x.webp_1.png'),
        *('b/y.jpg_0.png', 'b/y.jpg_1.png'),
    ]


def test_a_table_holds_boxes_and_images_without_any(tmp_path):
    row = {'class': '\udc80', 'score': 0.5, 'bbox': [1.5, 2.0, 3.0, 4.0]}
    results = [
        {'image': 'a.png', 'predictions': [row]},
        {'image': 'b, c.png', 'predictions': []},
    ]
    predict.write_table(str(tmp_path / 'a.csv'), results)
    assert (tmp_path / 'a.csv').read_text().splitlines() == [
        'image,rank,class,score,x,y,width,height',
        r'a.png,1,\udc80,0.5,1.5,2.0,3.0,4.0',
        '"b, c.png",,,,,,,',
    ]
    predict.write_table(str(tmp_path / 'a.parquet'), results)
    assert parquet.read_table(tmp_path / 'a.parquet')['height'].to_pylist() == [4.0, None]
    twice = [{'image': 'a.png', 'predictions': [row, row]}, results[1]]
    predict.write_table(str(tmp_path / 'one.parquet'), twice, one_row=True)
    first, second = parquet.read_table(tmp_path / 'one.parquet').to_pylist()
    assert (first['score_1'], first['height_2'], second['score_1']) == (0.5, 4.0, None)
    row = {'class': '=HYPERLINK("evil")', '@x': '-1+1', 'score': -0.5}
    predict.write_table(str(tmp_path / 'c.csv'), [{'image': '+a.png', 'predictions': [row]}])
    assert list(csv.reader((tmp_path / 'c.csv').read_text().splitlines())) == [
        ['image', 'rank', 'class', "'@x", 'score'],
        ["'+a.png", '1', '\'=HYPERLINK("evil")', "'-1+1", '-0.5'],
    ]
    predict.write_table(str(tmp_path / 'b.csv'), results[1:], ('class', 'score'))
    assert (tmp_path / 'b.csv').read_text() == 'image,class,score\n"b, c.png",,\n'


def test_a_table_of_boxes_fits_into_100_columns():
    row = {'class': 'motorcycle', 'score': 0.98765, 'bbox': [1023.25, 1023.75, 1023.25, 1023.75]}
    console = Console(width=100, file=io.StringIO())
    console.print(predict.format_table([row] * 2, ('class', 'score', 'bbox'), 'score'))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert '1023.2, 1023.8, 1023.2, 1023.8' in lines[1]
