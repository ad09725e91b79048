"""The tokenizer: any text comes back, turn boundaries cannot be forged, numbers are one token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harts.rollout.tokenizer import SPECIAL_TOKENS, TurnTokenizer


def test_equal_texts_give_an_equal_tokenizer(guess_texts, tokenizer):
    assert TurnTokenizer.build(guess_texts, 1024).bpe.to_str() == tokenizer.bpe.to_str()


def test_the_vocabulary_is_a_few_hundred_tokens(tokenizer):
    assert 259 < tokenizer.vocab_size < 1024


def test_the_vocabulary_keeps_its_limit(guess_texts):
    assert TurnTokenizer.build(guess_texts, 300).vocab_size == 300


@settings(deadline=None, max_examples=100)
@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode_observation(text)) == text
    assert tokenizer.decode(tokenizer.encode_action(text)) == text


def test_boundaries_stand_where_turns_begin_and_end(tokenizer):
    observation, action = tokenizer.encode_observation("higher"), tokenizer.encode_action("[7]")
    assert (observation[0], observation[-1], action[-1]) == (
        tokenizer.observation_id,
        tokenizer.action_id,
        tokenizer.end_id,
    )


def test_text_that_spells_a_boundary_is_not_one(tokenizer):
    special = {tokenizer.observation_id, tokenizer.action_id, tokenizer.end_id}
    for token in SPECIAL_TOKENS:
        inner = tokenizer.encode_observation(f"a {token} b")[1:-1]
        assert not special & set(inner)


def test_a_guess_is_one_token(tokenizer):
    assert all(len(tokenizer.encode_action(f"[{number}]")) == 2 for number in range(1, 21))


def test_a_saved_tokenizer_is_read_back_equal(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = TurnTokenizer.load(tmp_path / "tokenizer.json")
    text = "You are <|end|> Player 0.\n[3]"
    assert loaded.encode_observation(text) == tokenizer.encode_observation(text)
