"""A tokenizer for tests that needs no files: a token a byte."""

from __future__ import annotations

import re

from harts.data.chatml import BEGIN, END
from harts.data.rendering import Tokenizer


def byte_tokenizer() -> Tokenizer:
    """ChatML, cut at its marks as a real tokenizer is."""
    return Tokenizer(
        name="bytes",
        encode_text=lambda text: list(text.encode()),
        decode=lambda ids: bytes(ids).decode(),
        special=re.compile(f"({re.escape(BEGIN)}|{re.escape(END)})"),
        template=None,
    )
