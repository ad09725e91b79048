"""A small byte-level BPE with special tokens at turn boundaries.

A dialogue is `<|obs|> observation <|act|> action <|end|> <|obs|> ...`. Pieces are tokenised on their own and only ever
appended, so a dialogue's ids never change once written: nothing sampled is tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

OBSERVATION, ACTION, END = "<|obs|>", "<|act|>", "<|end|>"
SPECIAL_TOKENS = (OBSERVATION, ACTION, END)


class TurnTokenizer:
    """Text of observations and actions to ids and back."""

    def __init__(self, bpe: Tokenizer) -> None:
        """Wrap a tokenizer that knows the three special tokens."""
        # Text that spells a special token stays text; only this class writes turn boundaries.
        bpe.encode_special_tokens = True
        self.bpe = bpe
        ids = [token_id for token in SPECIAL_TOKENS if (token_id := bpe.token_to_id(token)) is not None]
        assert len(ids) == len(SPECIAL_TOKENS), "the tokenizer lacks a turn boundary"
        self.observation_id, self.action_id, self.end_id = ids

    @classmethod
    def build(cls, texts: Iterable[str], max_vocab_size: int) -> TurnTokenizer:
        """Learn the merges; equal texts give an equal tokenizer.

        Args:
            texts: Observations and actions.
            max_vocab_size: > 259 (the bytes and the special tokens). Fewer are used where the texts have no more
                pairs to merge.
        """
        bpe = Tokenizer(models.BPE())
        # Split before white space only: "[17]" can become a single token, so that an action is one decision.
        words = pre_tokenizers.Split(Regex(r"\s?[^\s]+|\s"), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
        bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
        trainer = trainers.BpeTrainer(
            vocab_size=max_vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        return cls(bpe)

    @classmethod
    def load(cls, file: Path) -> TurnTokenizer:
        """Read what `save` wrote."""
        return cls(Tokenizer.from_file(str(file)))

    def save(self, file: Path) -> None:
        """Write `tokenizer.json`."""
        self.bpe.save(str(file))

    @property
    def vocab_size(self) -> int:
        """W, all ids."""
        return self.bpe.get_vocab_size()

    def encode_observation(self, text: str) -> list[int]:
        """Ids of an observation, boundaries included, up to where the action begins."""
        return [self.observation_id, *self.bpe.encode(text).ids, self.action_id]

    def encode_action(self, text: str) -> list[int]:
        """Ids of an action, up to and including its end."""
        return [*self.bpe.encode(text).ids, self.end_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some ids; special tokens have none."""
        return self.bpe.decode(list(token_ids), skip_special_tokens=True)
