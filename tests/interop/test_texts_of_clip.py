"""Texts of CLIP checkpoints become the ids that transformers makes of them."""

import json
import shutil
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import transformers_texts
from helpers.round_trips import anew
from helpers.transformers_models import perturbed
from PIL import Image

from vit_jax import __main__ as cli
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.inference.load import open_model
from vit_jax.inference.predict import text_encoder

transformers = pytest.importorskip('transformers')
tokenizers = pytest.importorskip('tokenizers')
torch = pytest.importorskip('torch')

TEXTS = ['A photo of  a cat!', 'two small Dogs', 'dog', 'a b a b a b a b a b']
LENGTH, SIZE = 7, 8


def tokenizer():
    """A small one: single letters, two merges, and the marks of both ends."""
    letters = [*string.ascii_lowercase, '!']
    pieces = [*letters, *(f'{c}</w>' for c in letters), 'do', 'dog</w>']
    pieces += ['<|startoftext|>', '<|endoftext|>']
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[('d', 'o'), ('do', 'g</w>')])


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A CLIP whose config.json says 2 for the end, as the released ones do."""
    folder, words = tmp_path_factory.mktemp('clip'), tokenizer()
    shape = {'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 1}
    shape |= {'num_attention_heads': 2}
    text = {'vocab_size': len(words), 'max_position_embeddings': LENGTH, 'eos_token_id': 2}
    config = transformers.CLIPConfig(
        text_config=shape | text | {'bos_token_id': len(words) - 2},
        vision_config=shape | {'image_size': SIZE, 'patch_size': 4},
        projection_dim=5,
    )
    perturbed(transformers.CLIPModel(config)).save_pretrained(folder)
    words.save_pretrained(folder)
    transformers.CLIPImageProcessorPil(
        size={'shortest_edge': SIZE}, crop_size={'height': SIZE, 'width': SIZE}
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize('place', ['', ':text'])
def test_ids_are_those_of_clip_s_tokenizer(folder, place):
    trained = interop.read(f'{folder}{place}')
    found = text_encoder(trained)
    for text in TEXTS:
        ids = tokenizer()(text, truncation=True, max_length=LENGTH)['input_ids']
        assert found('caption', text)[: len(ids)].tolist() == ids


def test_transformers_encodes_by_what_is_written(folder, tmp_path):
    for place, out in ((f'{folder}:text', 'text'), (str(folder), 'whole')):
        interop.write(anew(interop.read(place)), tmp_path / out)
        found = transformers.AutoTokenizer.from_pretrained(tmp_path / out)
        limits = {'max_length': LENGTH, 'truncation': True}
        assert found(TEXTS, **limits)['input_ids'] == tokenizer()(TEXTS, **limits)['input_ids']
    assert transformers.AutoProcessor.from_pretrained(tmp_path / 'whole').tokenizer is not None


def test_a_tokenizer_of_another_kind_stays_what_it_is(tmp_path):
    """MetaCLIP 2 has that of XLM-V, whose end has the id 2."""
    marks = {'<s>': 0, '<pad>': 1, '</s>': 2, '<unk>': 3}
    vocab = marks | {letter: i + 4 for i, letter in enumerate(string.ascii_lowercase)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token='<unk>'))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single='<s> $A </s>', special_tokens=[('<s>', 0), ('</s>', 2)]
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token='</s>')
    shape = {'vocab_size': len(vocab), 'eos_token_id': 2, 'projection_dim': 5}
    model = transformers_texts.reference('MetaClip2TextModelWithProjection', shape)
    model.save_pretrained(tmp_path / 'in')
    theirs.save_pretrained(tmp_path / 'in')
    interop.write(anew(interop.read(tmp_path / 'in')), tmp_path / 'out')
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
    encode = text_encoder(interop.read(tmp_path / 'out'))
    for text in ('dog', 'a cat'):
        ids = theirs(text)['input_ids']
        assert found(text)['input_ids'] == ids
        assert encode('caption', text)[: len(ids)].tolist() == ids


@pytest.mark.fault(125)
def test_an_end_that_the_tokenizer_does_not_have_is_refused(folder, tmp_path, capsys):
    """Else every text would be pooled at its first token."""
    Image.new('RGB', (SIZE, SIZE)).save(tmp_path / 'a.png')
    other = shutil.copytree(folder, tmp_path / 'other')
    config = json.loads((other / 'config.json').read_text())
    config['text_config']['eos_token_id'] = 5
    (other / 'config.json').write_text(json.dumps(config))
    for command in (
        ['predict', '--checkpoint', str(other), str(tmp_path / 'a.png'), '--texts', 'a; b'],
        ['evaluate', '--checkpoint', str(other), '--source', 'scenes_captions', '--split', 'test'],
    ):
        assert cli.main(command) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert 'model.eos=5' in line and f'ends texts with {len(tokenizer()) - 1}' in line


@pytest.mark.fault(125)
def test_a_word_without_an_embedding_is_refused(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / 'other')
    words = tokenizer()
    words.add_tokens(['<cat-toy>'])
    words.save_pretrained(other)
    encode = text_encoder(interop.read(other))
    assert encode('caption', 'a cat').max() < len(words) - 1
    with pytest.raises(UserError, match=f'id {len(words) - 1}.*model'):
        encode('caption', 'a <cat-toy>')


def test_predict_gives_the_probabilities_of_transformers(folder, tmp_path, capsys):
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    words = ['--checkpoint', str(folder), str(tmp_path / 'a.png'), '--json']
    assert cli.main(['predict', *words, '--texts', ';'.join(TEXTS)]) == 0
    rows = json.loads(capsys.readouterr().out)['images'][0]['predictions']
    found = {row['text']: row['probability'] for row in rows}

    model = transformers.CLIPModel.from_pretrained(folder).eval()
    processor = transformers.CLIPImageProcessorPil.from_pretrained(folder)
    image = processor(Image.fromarray(pixels), return_tensors='pt')['pixel_values']
    ids = tokenizer()(TEXTS, padding='max_length', max_length=LENGTH, truncation=True)
    with torch.no_grad():
        made = model(input_ids=torch.tensor(ids['input_ids']), pixel_values=image)
    expected = torch.softmax(made.logits_per_image[0], 0).tolist()
    assert found == pytest.approx(dict(zip(TEXTS, expected, strict=True)), abs=1e-5)


def test_the_tower_for_texts_embeds_what_the_whole_model_does(folder):
    whole, tower = open_model(folder), interop.read(f'{folder}:text')
    encode = text_encoder(whole)
    ids = jnp.stack([encode('caption', text) for text in TEXTS])
    embed = jax.jit(lambda v: whole.model.apply(v, ids, method='embed_texts'))
    found = jax.jit(tower.model.apply)(tower.variables, ids)['logits']
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found / lengths, embed(whole.variables), atol=1e-6)
