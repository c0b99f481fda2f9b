"""What docstrings say of parameters is found."""

from vit_jax.config import reference


class Base:
    """A base.

    Attributes:
      width: of a token.
      depth: number
        of blocks: all of them.
    """


class Derived(Base):
    """One that says less.

    Args:
      depth, height: other things; 'a', or
        'b'. Two sentences.

    Raises:
      UserError: never.
    """


def google(learning_rate, b1):
    """In another style.

    Args:
        learning_rate (float): the rate.
        **b1: `decay`.

    Returns:
        x: nothing.
    """


def test_entries_go_on_below_and_several_names_share_one():
    assert reference.parameter_docs(Base) == {
        'width': 'of a token.',
        'depth': 'number of blocks: all of them.',
    }
    text = "other things; 'a', or 'b'. Two sentences."
    expected = {'width': 'of a token.', 'depth': text, 'height': text}
    assert reference.parameter_docs(Derived) == expected


def test_other_sections_and_styles():
    assert reference.parameter_docs(google) == {'learning_rate': 'the rate.', 'b1': '`decay`.'}
    assert reference.parameter_docs(lambda: None) == {}


def test_first_sentence():
    assert reference.sentence("at 0.5 or more, as 'a.b'. Then more.") == "at 0.5 or more, as 'a.b'"
    assert reference.sentence('of a token.') == 'of a token'
