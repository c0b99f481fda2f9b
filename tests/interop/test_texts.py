"""Texts of SigLIP checkpoints become the ids that transformers makes of them."""

import json

import jax
import numpy as np
import pytest
import sentencepiece
from helpers.round_trips import anew
from helpers.transformers_siglip import LENGTH, SIZE, reference
from PIL import Image

import vit_jax
from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.data import vocabulary
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.inference.load import open_model
from vit_jax.inference.predict import text_encoder

transformers = pytest.importorskip('transformers')
tokenizers = pytest.importorskip('tokenizers')
torch = pytest.importorskip('torch')

TEXTS = ['A photo of  a cat!', 'two (very) Small dogs', 'dog', "it's", 'a b a b a b a b a b']
WORDS = ['a photo of a cat', 'two very small dogs', 'its a dog', 'small cats of two', 'ab ba']
VOCAB = 40


def small():
    """A SiglipModel with as many ids as the tokenizers here have at most."""
    return reference(text={'vocab_size': VOCAB})


def spiece(path, ids=None):
    """A model with the special ids of SigLIP's: pad 0, eos 1, unk 2, no bos; or with others."""
    ids = ids or {'pad_id': 0, 'eos_id': 1, 'unk_id': 2, 'bos_id': -1}
    with path.open('wb') as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(WORDS * 20),
            model_writer=file,
            vocab_size=VOCAB,
            hard_vocab_limit=False,
            minloglevel=2,
            **ids,
        )


def tokenizer_json(folder):
    """A small tokenizer of the kind of Gemma's, whose texts end with <eos>."""
    special = {'<pad>': 0, '<eos>': 1, '<bos>': 2, '<unk>': 3}
    letters = sorted(set(''.join(WORDS).replace(' ', '▁')) | {'▁'})
    vocab = special | {letter: i + 4 for i, letter in enumerate(letters)}
    vocab |= {'do': len(vocab), 'dog': len(vocab) + 1}
    made = transformers.Siglip2Tokenizer(vocab=vocab, merges=[('d', 'o'), ('do', 'g')])
    made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single='$A <eos>', special_tokens=[('<eos>', 1)]
    )
    made.save_pretrained(folder)
    return made


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('siglip')
    small().save_pretrained(folder)
    spiece(folder / 'spiece.model')
    return folder


def test_ids_are_those_of_siglip_s_tokenizer(folder):
    theirs = transformers.SiglipTokenizer(str(folder / 'spiece.model'))
    expected = theirs(TEXTS, padding='max_length', max_length=LENGTH, truncation=True)
    encode = text_encoder(open_model(folder))
    np.testing.assert_array_equal(
        [encode('caption', text) for text in TEXTS], expected['input_ids']
    )


@pytest.mark.fault(125)
def test_texts_are_padded_by_the_tokenizer_s_own_end(tmp_path):
    """Which need not be 1; the last token is the embedding of a text."""
    small().save_pretrained(tmp_path)
    spiece(tmp_path / 'spiece.model', {'pad_id': 0, 'eos_id': 3, 'unk_id': 1, 'bos_id': 2})
    theirs = transformers.SiglipTokenizer(str(tmp_path / 'spiece.model'))
    expected = theirs(TEXTS, padding='max_length', max_length=LENGTH, truncation=True)['input_ids']
    encode = text_encoder(open_model(tmp_path))
    np.testing.assert_array_equal([encode('caption', text) for text in TEXTS], expected)
    assert expected[2][-1] == 3


def test_ids_are_those_of_siglip_2_s_tokenizer(tmp_path):
    theirs = tokenizer_json(tmp_path)
    small().save_pretrained(tmp_path)
    encode = text_encoder(open_model(tmp_path))
    for text in TEXTS:
        ids = theirs(text, truncation=True, max_length=LENGTH)['input_ids']
        found = encode('caption', text)
        assert found[: len(ids)].tolist() == ids
        assert not found[len(ids) :].any()


@pytest.mark.parametrize('kind', ['spiece.model', 'tokenizer.json'])
def test_transformers_encodes_by_what_is_written(kind, tmp_path):
    """Its AutoProcessor finds the tokenizer beside the model."""
    model, out = small(), tmp_path / 'out'
    model.save_pretrained(tmp_path / 'in')
    if kind == 'spiece.model':
        spiece(tmp_path / 'in' / kind)
        theirs = transformers.SiglipTokenizer(str(tmp_path / 'in' / kind))
    else:
        theirs = tokenizer_json(tmp_path / 'in')
    interop.write(anew(interop.read(tmp_path / 'in')), out)
    found = transformers.AutoTokenizer.from_pretrained(out)
    assert found.model_max_length == LENGTH
    limits = {'max_length': LENGTH, 'truncation': True}
    assert found(TEXTS, **limits)['input_ids'] == theirs(TEXTS, **limits)['input_ids']
    processor = transformers.AutoProcessor.from_pretrained(out)
    assert (
        processor.tokenizer(TEXTS[0], **limits)['input_ids']
        == found(TEXTS[0], **limits)['input_ids']
    )
    encode = text_encoder(open_model(out))
    for text in TEXTS:
        ids = theirs(text, **limits)['input_ids']
        assert encode('caption', text)[: len(ids)].tolist() == ids


@pytest.mark.parametrize('kind', ['spiece.model', 'tokenizer.json'])
def test_a_run_s_vocabulary_is_written_under_its_name_in_transformers(kind, folder, tmp_path):
    """A run has it as vocab.model."""
    spiece(tmp_path / kind) if kind == 'spiece.model' else tokenizer_json(tmp_path)
    small().save_pretrained(tmp_path)
    imported = interop.read(tmp_path)
    kept = (tmp_path / kind).rename(tmp_path / 'vocab.model')
    trained = _with_data(imported, vocab=str(kept))
    assert interop.write(trained, tmp_path / 'out') == ()
    assert interop.read(tmp_path / 'out').transforms.endswith(imported.transforms)

    plain = imported.transforms.replace('canonicalize', 'lower').replace(", pad='pad'", ', pad=3')
    notes = interop.write(_with_data(trained, transforms=plain), tmp_path / 'other')
    assert len(notes) == 1 and ('lost' if kind == 'spiece.model' else 'prepare texts') in notes[0]
    (note,) = interop.write(_with_data(trained, vocab='bytes'), tmp_path / 'bytes')
    assert 'vocabulary is lost' in note


def _with_data(imported, **values):
    return anew(imported.with_groups(data={**imported.config.data, **values}))


def test_a_tokenizer_s_file_is_a_vocabulary(tmp_path):
    tokenizer_json(tmp_path)
    vocab = vocabulary.load_vocabulary(tmp_path / 'tokenizer.json')
    ids = vocab.encode('two small dogs')
    assert vocab.special == (0, -1, 1, 3)
    assert vocab.decode([*ids, 1, 0]) == 'two small dogs'
    assert vocab.pieces(vocab.encode('dog')) == ['dog']
    assert vocab.pieces([len(vocab)]) == ['<unk>']


def test_files_that_are_no_tokenizer(tmp_path):
    file = tmp_path / 'tokenizer.json'
    file.write_text('{"model": 3}')
    with pytest.raises(UserError, match=r'tokenizer\.json.*not a tokenizer\.json'):
        vocabulary.load_vocabulary(file)
    tokenizer_json(tmp_path)
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {'post_processor': None}))
    with pytest.raises(UserError, match=r'tokenizer\.json.* id'):
        vocabulary.load_vocabulary(file)


def test_predict_gives_the_probabilities_of_transformers(folder, tmp_path, capsys):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    words = ['--checkpoint', str(folder), str(tmp_path / 'a.png'), '--json']
    assert cli.main(['predict', *words, '--texts', ';'.join(TEXTS[:3])]) == 0
    rows = json.loads(capsys.readouterr().out)['images'][0]['predictions']
    found = {row['text']: row['probability'] for row in rows}

    model = transformers.SiglipModel.from_pretrained(folder).eval()
    tokenizer = transformers.SiglipTokenizer(str(folder / 'spiece.model'))
    ids = tokenizer(TEXTS[:3], padding='max_length', max_length=LENGTH, truncation=True)
    image = torch.tensor(pixels[None] / 127.5 - 1, dtype=torch.float32).permute(0, 3, 1, 2)
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(ids['input_ids']), pixel_values=image
        ).logits_per_image[0]
    expected = dict(zip(TEXTS, torch.sigmoid(logits).tolist(), strict=False))
    assert found == pytest.approx(expected, abs=1e-5)


def test_without_a_tokenizer_texts_are_refused(tmp_path, capsys):
    small().save_pretrained(tmp_path)
    Image.fromarray(np.zeros((SIZE, SIZE, 3), np.uint8)).save(tmp_path / 'a.png')
    words = ['--checkpoint', str(tmp_path), str(tmp_path / 'a.png'), '--texts', 'a cat']
    assert cli.main(['predict', *words]) == 2
    assert 'spiece.model or tokenizer.json' in capsys.readouterr().err


def test_the_size_of_the_images_is_still_the_model_s(folder):
    trained = open_model(folder)
    assert 'resize' in trained.transforms and 'tokenize' in trained.transforms


@pytest.mark.slow
def test_classes_of_a_folder_by_their_names(folder, tmp_path):
    rng = np.random.default_rng(0)
    for name in ('cat', 'dog'):
        (tmp_path / 'test' / name).mkdir(parents=True)
        for i in range(4):
            pixels = rng.integers(0, 256, (SIZE, SIZE, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / 'test' / name / f'{i}.png')
    # Prompts of fewer ids than the model takes; longer ones would be cut to the same.
    found = vit_jax.evaluate(
        folder,
        source=f'folder:{tmp_path}',
        split='test',
        evaluators=["zero_shot(templates=('{}',))"],
    )
    trained = open_model(folder)
    encode = text_encoder(trained)
    ids = np.stack([encode('caption', name) for name in ('cat', 'dog')])
    source = open_source(f'folder:{tmp_path}', 'test')
    images = np.stack([source[i]['image'] for i in range(8)]) / np.float32(127.5) - 1
    made = jax.jit(trained.model.apply)(trained.variables, images, ids)
    right = (made['image'] @ made['text'].T).argmax(1) == source.labels()
    assert found['zero_shot/zero_shot_accuracy'] == pytest.approx(float(right.mean()))
