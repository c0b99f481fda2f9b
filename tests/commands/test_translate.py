"""`translate`: text in, text out, line for line."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import mentions, says
from helpers.runs import in_checkpoint

from vit_jax import __main__ as cli
from vit_jax.commands import translate
from vit_jax.data import vocabulary
from vit_jax.errors import UserError
from vit_jax.inference import load
from vit_jax.inference import text as text_lib
from vit_jax.ops import search as decode_lib
from vit_jax.ops.search import Search

pytestmark = pytest.mark.slow  # as a whole

LINES = ['A dog runs.', '', 'Two men in the snow.', 'The girl', ' ', 'A dog runs.']
LONG = 'A woman with a green hat plays the guitar on a bench in the snow.'


@pytest.fixture(scope='module')
def run(translating_run):
    return load.open_run(translating_run)


@pytest.fixture
def command(translating_run, capsys):
    """`command('--greedy', 'A dog.')` -> (exit code, output, errors)."""

    def call(*words):
        capsys.readouterr()
        code = cli.main(['translate', '--workdir', str(translating_run), *map(str, words)])
        return code, *capsys.readouterr()

    return call


def translate_single(run, line, search):
    """[(text, score)] of one sentence, without padding and outside of any batch."""
    vocab = vocabulary.load_vocabulary(run.path / 'vocab.model')
    source = np.append(vocab.encode(line.lower()), 2)[None]

    @jax.jit
    def decode(variables):
        def apply(*inputs, method):
            return run.model.apply(variables, *inputs, method=method)

        return decode_lib.decode(apply, jnp.asarray(source, jnp.int32), search)

    tokens, _, scores = (np.asarray(x[0]) for x in decode(run.variables))
    return [(vocab.decode(ids), score) for ids, score in zip(tokens, scores, strict=True)]


def test_line_for_line(run, command, tmp_path):
    (tmp_path / 'in.txt').write_text('\n'.join(LINES) + '\n')
    code, out, err = command('--file', tmp_path / 'in.txt', '--batch-size', 2)
    assert (code, err) == (0, '')
    translations = out.removesuffix('\n').split('\n')
    assert len(translations) == len(LINES)
    assert translations[1] == translations[4] == ''
    assert translations[0] == translations[5]
    search = Search(beams=2, extra_len=4)  # the search of the run's task
    assert translations[2] == translate_single(run, LINES[2], search)[0][0]
    output = tmp_path / 'out.txt'
    code, printed, _ = command('--file', tmp_path / 'in.txt', '--output', output)
    assert printed == f'{output}: 6 lines translated\n'
    assert output.read_text() == out


def test_standard_input(command, monkeypatch):
    def given(data):
        monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(data)))

    lines = ['A dog runs.', '', 'The girl']
    _, out, _ = command(*lines, '--greedy')
    given('\n'.join(lines).encode())
    assert command('-', '--greedy')[1] == out
    given('\ufeff'.encode() + '\r\n'.join([*lines, '']).encode())
    assert command('-', '--greedy')[1] == out
    given(b'')
    assert command('-')[:2] == (0, '')
    given(b'A dog.\nA caf\xe9.\n')
    code, output, errors = command('-')
    assert (code, output) == (2, '')
    assert says(errors, 'standard input line 2', 'not UTF-8')


def test_n_best_with_scores(run, command):
    flags = (LINES[0], '', LINES[3], '--n-best', 3, '--beams', 4, '--alpha', 1, '--scores')
    rows = [line.split('\t') for line in command(*flags)[1].splitlines()]
    assert [row[0] for row in rows] == ['1', '1', '1', '', '3', '3', '3']
    search = Search(beams=4, alpha=1.0, extra_len=4, stop='all')
    expected = translate_single(run, LINES[0], search)[:3]
    assert [row[2] for row in rows[:3]] == [text for text, _ in expected]
    printed = [float(row[1]) for row in rows[:3]]
    np.testing.assert_allclose(printed, [score for _, score in expected], atol=2e-3)


def test_json(run, command):
    _, out, _ = command('Männer spielen.', '', 'A dog.', '--json', '--greedy')
    first, second, _ = map(json.loads, out.splitlines())
    assert 'Männer' in out
    assert (first['line'], first['source']) == (1, 'Männer spielen.')
    (records,) = first['translations']
    vocab = vocabulary.load_vocabulary(run.path / 'vocab.model')
    assert vocab.decode(records['tokens']) == records['text']
    assert records['score'] < 0
    assert second == {'line': 2, 'source': '', 'translations': []}


@pytest.mark.slow
@pytest.mark.long
def test_samples_hang_on_the_seed_and_not_on_the_batch(command):
    sentences = ['A dog runs.', '', 'A dog runs.']

    def sample(*words):
        return command(*sentences, '--sample', '--temperature', 3, *words)[1]

    drawn = sample()
    assert drawn == sample('--seed', 0, '--batch-size', 1)
    assert drawn != sample('--seed', 1)
    first, *_, last = drawn.splitlines()
    assert first != last, 'equal sentences are drawn for independently'
    likeliest = command(*sentences, '--sample', '--top-k', 1)[1]
    assert likeliest == command(*sentences, '--greedy')[1]


def test_long_lines_are_cut_with_a_warning(run, command):
    code, out, err = command('A dog runs.', LONG, '--greedy')
    assert code == 0
    assert out.count('\n') == 2
    vocab = vocabulary.load_vocabulary(run.path / 'vocab.model')
    cut = vocab.decode(vocab.encode(LONG.lower())[15:])
    assert cut
    assert says(err, 'line 2', '15 tokens', repr(cut))


def test_windows_and_batches_do_not_show(run, monkeypatch):
    reader = dataclasses.replace(text_lib.sentence_reader(run), bounds=(8, 16))
    sentences = [reader.read(line) for line in [*LINES, LONG]]
    search = Search('greedy', extra_len=2)
    all_lines = list(text_lib.Translator(run, reader, search)(sentences))
    monkeypatch.setattr(text_lib, 'SORT_WINDOW', 2)
    parts = list(text_lib.Translator(run, reader, search, batch_size=1)(sentences))
    assert [[t.tokens for t in results] for results in parts] == [
        [t.tokens for t in results] for results in all_lines
    ]
    assert [len(results) for results in all_lines] == [1, 0, 1, 1, 0, 1, 1]


def test_a_model_that_draws_gets_the_streams_of_its_task(run, monkeypatch):
    streams = []
    apply = type(run.model).apply

    def drawing(model, variables, *inputs, rngs, **others):
        streams.append(sorted(rngs))
        return apply(model, variables, *inputs, rngs=rngs, **others)

    monkeypatch.setattr(type(run.model), 'apply', drawing)
    reader = text_lib.sentence_reader(run)
    next(iter(text_lib.Translator(run, reader, Search('greedy', extra_len=1))([reader.read('A')])))
    assert streams and set(map(tuple, streams)) == {run.task.rngs}


def test_few_shapes(run):
    reader = dataclasses.replace(text_lib.sentence_reader(run), bounds=(8, 16))
    sentences = [reader.read(line) for line in ['A dog runs.'] * 70 + ['A'] * 3]
    translate = text_lib.Translator(run, reader, Search(), batch_size=32)
    batches = list(translate.batches(sentences, range(73)))
    assert {(length, rows) for length, _, rows in batches} <= {(8, 4), (8, 32), (16, 32)}
    assert sorted(i for _, numbers, _ in batches for i in numbers) == list(range(73))


def test_mistakes_are_one_line(command, smoke_run, tmp_path):
    (tmp_path / 'bad.txt').write_bytes(b'fine\nfine\nbad \xff\n')
    for argv, message in [
        ([], 'give sentences, --file FILE'),
        (['a', '--file', 'b'], 'give sentences, --file FILE'),
        (['a', '--greedy', '--sample'], 'one of --greedy and --sample'),
        (['a', '--greedy', '--beams', 4], '--beams'),
        (['a', '--top-p', 0.5], '--top-p'),
        (['a', '--sample', '--top-p', 1.5], ('top_p', '0')),
        (['a', '--beams', 0], ('beams', '1')),
        (['a', '--n-best', 3], 'there are 2 beams; raise --beams'),
        (['a', '--n-best', 0], ('--n-best', '1', '0')),
        (['a', '--batch-size', 0], ('--batch-size', '1', '0')),
        (['a', '--workdir', smoke_run], ("'vit'", 'translate')),
        (['a', '--workdir', tmp_path], 'holds no run'),
        (['--file', tmp_path / 'no.txt'], 'No such file'),
        (['--file', tmp_path / 'bad.txt'], 'bad.txt line 3: not UTF-8'),
        (['a', '--output', tmp_path / 'bad.txt' / 'out'], ('bad.txt', 'folder')),
    ]:
        code, out, err = command(*argv)
        assert (code, out, err.count('\n')) == (2, '', 1), argv
        assert err.startswith('error: ')
        assert mentions(err, message)


def test_a_run_without_text(run):
    config = run.config.copy_and_resolve_references()
    config.evals = {}
    del config.data.vocab
    with pytest.raises(UserError, match=r'trained.*text'):
        text_lib.sentence_reader(dataclasses.replace(run, config=config))


def test_a_run_may_turn_the_pairs_round(run):
    config = run.config.copy_and_resolve_references()
    config.evals.val.transforms = 'swap|lower|tokenize(16)'
    turned = text_lib.sentence_reader(dataclasses.replace(run, config=config))
    ids, cut = turned.read('Ein Hund.')
    assert (turned.vocab.decode(ids), cut) == ('ein hund.', '')


def test_the_search_is_that_of_the_task_unless_flags_say_otherwise(run):
    def chosen(*words):
        argv = ['RUN', *words]
        args = translate.make_parser(argv).parse_args(argv)
        return translate.choose_search(run.task, args)

    assert chosen() == Search(beams=2, extra_len=4)
    assert chosen('--n-best', '2') == Search(beams=2, extra_len=4, stop='all')
    assert chosen('--greedy').method == 'greedy'
    assert chosen('--sample', '--top-k', '3').top_k == 3


def test_sequences_of_digits(reversing_run, capsys, tmp_path):
    """Their text comes from the source, without a vocabulary file."""
    run = load.open_run(reversing_run)
    reader = text_lib.sentence_reader(run)
    assert reader.read('3 1 4 1 5').ids.tolist() == [7, 5, 8, 5, 9, 2]
    assert reader.read('3 ' * 13 + '1 4').cut == '3 1 4', 'the last bucket has room for 12'
    argv = ['translate', '--workdir', str(reversing_run)]
    assert cli.main([*argv, '3 1 4 1 5', '', '--json']) == 0
    (record,) = json.loads(capsys.readouterr().out.splitlines()[0])['translations']
    assert record['text'] == reader.vocab.decode(record['tokens'])
    (tmp_path / 'in.txt').write_text('3 1 4\n2 7 x\n')
    for flags, message in [
        (
            ['3 1 4', '10 2'],
            "line 2: tokenize: '10'",
        ),
        (['--file', str(tmp_path / 'in.txt')], "line 2: tokenize: 'x'"),
    ]:
        assert cli.main([*argv, *flags]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count('\n')) == ('', 1)
        assert captured.err.startswith(f'error: {message}')


@pytest.mark.fault(81)
def test_another_vocabulary_in_the_run_folder_is_one_line(translating_run, tmp_path, capsys):
    folder = shutil.copytree(translating_run, tmp_path / 'run')
    argv = ['eins zwei drei', 'vier fünf sechs', 'sieben acht neun']
    (folder / 'vocab.model').write_bytes(vocabulary.train(argv, 30, 'bpe').model)
    assert cli.main(['translate', '--workdir', str(folder), 'A dog.']) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, 'vocabulary', 'trained')
    # Nor does the file that the config names take the place of a lost copy, if it is another.
    other = (folder / 'vocab.model').rename(tmp_path / 'other.model')
    config = json.loads((folder / 'config.json').read_text())
    config['data']['vocab'] = str(other)
    in_checkpoint(folder, lambda meta: meta['config']['data'].update(vocab=str(other)))
    (folder / 'config.json').write_text(json.dumps(config))
    assert cli.main(['translate', '--workdir', str(folder), 'A dog.']) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert mentions(line, other, 'vocabulary', 'trained')
