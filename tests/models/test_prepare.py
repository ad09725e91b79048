"""What `prepare` accepts, changes, undoes, and refuses by name."""

from __future__ import annotations

import dataclasses

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5GatedDeltaNet

import harts
from harts.models import adapter
from harts.models.registry import find_family, supported_types
from harts.models.tiny import tiny_model
from harts.testing import assert_gradients_close, float64_throughout, gradients
from tests.cases import BESIDE, RICH, trajectories_of
from tests.oracle import step_of

MODEL_TYPES = supported_types()
OBJECTIVE = harts.grpo()
PEFT_REFUSES = {"falcon_h1": r".*\.out_proj", "nemotron_h": r".*\.out_proj"}
"""Modules that peft puts no adapters on, by its own list of model types."""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_without_a_layout_nothing_changes(model_type: str):
    ids = torch.arange(3, 73)[None]
    expected = tiny_model(model_type)(ids).logits
    prepared = harts.prepare(tiny_model(model_type))
    assert torch.equal(prepared.module(ids).logits, expected)
    module = prepared.restore()
    assert torch.equal(module(ids).logits, expected)
    assert not any(type(m).__module__.startswith("harts") for m in module.modules())
    assert module.config._attn_implementation == tiny_model(model_type).config._attn_implementation
    harts.prepare(module)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_generation_with_caches_and_padding_is_unchanged(model_type: str):
    if model_type == "falcon_h1" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("transformers 5.17 itself does not generate with this model from padded prompts; 5.24 does")
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = tiny_model(model_type).eval().generate(ids, **options)
    prepared = harts.prepare(tiny_model(model_type).eval())
    assert torch.equal(prepared.module.generate(ids, **options), expected)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_parameters_keep_their_names(model_type: str):
    names = set(tiny_model(model_type).state_dict())
    assert set(harts.prepare(tiny_model(model_type)).module.state_dict()) == names


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tied_embeddings_and_frozen_parameters(model_type: str):
    trajectories = trajectories_of(BESIDE)

    def build() -> nn.Module:
        model = tiny_model(model_type, dtype=torch.float64, overrides={"tie_word_embeddings": True})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name and "layers.1" not in name)
        return model

    compare_with_oracle(build, trajectories)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_lora_adapters(model_type: str):
    config = peft.LoraConfig(
        r=3,
        target_modules="all-linear",
        exclude_modules=PEFT_REFUSES.get(model_type),
        init_lora_weights=False,
        lora_dropout=0.0,
    )

    def build() -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(tiny_model(model_type), config).double()

    compare_with_oracle(build, trajectories_of(BESIDE))


def compare_with_oracle(build, trajectories) -> None:
    expected = step_of(build(), trajectories, OBJECTIVE)
    model = build()
    with float64_throughout():
        harts.train_step(harts.prepare(model), trajectories, OBJECTIVE)
    assert_gradients_close(expected.gradients, gradients(model), ratio=1e-10)


def test_a_compiled_mlp_keeps_working():
    trajectories = trajectories_of(RICH)
    plain, compiled = tiny_model("qwen3_5_text"), tiny_model("qwen3_5_text")
    for layer in compiled.model.layers:
        layer.mlp = torch.compile(layer.mlp, backend="eager")
    results = [harts.train_step(harts.prepare(m), trajectories, OBJECTIVE) for m in (plain, compiled)]
    assert (results[0].logprobs_P == results[1].logprobs_P).all()


class RunningMean(nn.Module):
    """A recurrent layer that nobody has seen."""

    def forward(self, hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, None]:
        length = torch.arange(1, hidden_states.shape[1] + 1)
        return hidden_states.cumsum(1) / length[:, None], None


class MixingMLP(Qwen3MLP):
    """A subclass of a known class that looks at the token before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.roll(1, dims=1)


def test_unknown_layers_are_refused_by_name():
    model = tiny_model("qwen3")
    model.model.layers[1].self_attn = RunningMean()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn is a .*RunningMean"):
        harts.prepare(model)
    model = tiny_model("qwen3")
    model.model.layers[2].mlp.__class__ = MixingMLP
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp is a .*MixingMLP"):
        harts.prepare(model)
    assert not any(type(m).__module__.startswith("harts") for m in model.modules()), "a refusal changes nothing"


class LigerMLP(Qwen3MLP):
    """Stands for a class of Liger's, whose package needs Triton."""

    def forward(self, x: Tensor) -> Tensor:
        return Qwen3MLP.forward(self, x)


LigerMLP.__module__ = "liger_kernel.transformers.swiglu"


@pytest.mark.parametrize("when", ["before loading", "after loading", "before the family was imported"])
def test_layers_of_liger_run_on_trees(when: str, monkeypatch: pytest.MonkeyPatch):
    trajectories = trajectories_of(RICH)
    expected = harts.train_step(harts.prepare(tiny_model("qwen3")), trajectories, OBJECTIVE)
    if when == "before loading":
        monkeypatch.setattr(modeling_qwen3, "Qwen3MLP", LigerMLP)
    model = tiny_model("qwen3")
    if when == "after loading":
        for layer in model.model.layers:
            layer.mlp.__dict__["forward"] = LigerMLP.forward.__get__(layer.mlp)
    if when == "before the family was imported":
        monkeypatch.setattr(modeling_qwen3, "Qwen3MLP", LigerMLP)
        family = find_family(model.config)
        classes = {LigerMLP if cls is Qwen3MLP else cls for cls in family.token_wise_classes}
        changed = dataclasses.replace(family, token_wise_classes=frozenset(classes))
        monkeypatch.setattr(adapter, "find_family", lambda config: changed)
    actual = harts.train_step(harts.prepare(model), trajectories, OBJECTIVE)
    assert (actual.logprobs_P == expected.logprobs_P).all()


class DropsKeywords(Qwen3_5DecoderLayer):
    """A decoder layer that hands its mixer the hidden states alone."""

    def forward(self, hidden_states: Tensor, *args: object, harts_layout: object = None, **options: object) -> Tensor:
        return super().forward(hidden_states, *args, **options)


def test_a_layout_that_does_not_arrive_is_noticed():
    model = tiny_model("qwen3_5_text")
    prepared = harts.prepare(model)
    model.model.layers[2].__class__ = DropsKeywords
    for _ in range(2):
        with pytest.raises(ValueError, match="TreeQwen3_5GatedDeltaNet was called without the layout"):
            harts.train_step(prepared, trajectories_of(RICH), OBJECTIVE)
    model.model.layers[2].__class__ = Qwen3_5DecoderLayer
    harts.train_step(prepared, trajectories_of(RICH), OBJECTIVE)
    assert not any(module._forward_pre_hooks for module in model.modules())


class Wrapped(Qwen3_5GatedDeltaNet):
    """A known layer behind a wrapper that adds no forward of its own."""


@pytest.mark.parametrize("module", [nn.Conv1d(32, 32, 3, padding=2), nn.MultiheadAttention(32, 2), nn.Softmax(dim=1)])
def test_library_layers_that_mix_tokens_are_refused(module: nn.Module):
    model = tiny_model("qwen3_5_text")
    model.model.layers[0].mlp.up_proj = module
    with pytest.raises(ValueError, match=rf"mlp\.up_proj is a .*{type(module).__name__}"):
        harts.prepare(model)


def test_adapters_on_convolutions_are_refused():
    model = peft.get_peft_model(tiny_model("qwen3_5_text"), peft.LoraConfig(r=80, target_modules=["conv1d"]))
    with pytest.raises(ValueError, match=r"conv1d is a .*Conv"):
        harts.prepare(model)


def test_wrapped_layers_are_refused():
    model = tiny_model("qwen3_5_text")
    model.model.layers[0].linear_attn.__class__ = Wrapped
    with pytest.raises(ValueError, match=r"linear_attn is a Wrapped, a subclass of Qwen3_5GatedDeltaNet"):
        harts.prepare(model)


def test_unknown_families_are_refused_by_name():
    config = AutoConfig.for_model(
        "mamba2", hidden_size=16, num_heads=2, head_dim=16, n_groups=1, num_hidden_layers=1, vocab_size=20
    )
    with pytest.raises(ValueError, match=r"'mamba2' does not run on trees.*; supported are .*qwen3, "):
        harts.prepare(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("model_type", "overrides", "message"),
    [
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout is 0.1, expected 0"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "of type 'dynamic', whose frequencies depend on the longest trajectory",
        ),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention, which do not run on trees"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, expected None"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, expected None"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, expected False"),
    ],
)
def test_settings_that_cannot_be_exact_are_refused(model_type: str, overrides: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        harts.prepare(tiny_model(model_type, overrides=overrides))


def test_a_multimodal_model_is_asked_for_as_its_text_part():
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="Got a Gemma3ForConditionalGeneration, expected a Gemma3ForCausalLM"):
        harts.prepare(model)


def test_other_refusals():
    with pytest.raises(ValueError, match="Linear holds no transformers model"):
        harts.prepare(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expected a Qwen3ForCausalLM"):
        harts.prepare(tiny_model("qwen3").model)
    model = tiny_model("qwen3")
    harts.prepare(model)
    with pytest.raises(ValueError, match="It is prepared already"):
        harts.prepare(model)
    model = tiny_model("qwen3")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="'eager', expected 'sdpa'"):
        harts.prepare(model)
    dropout = peft.get_peft_model(tiny_model("qwen3"), peft.LoraConfig(target_modules="all-linear", lora_dropout=0.1))
    with pytest.raises(ValueError, match=r"drops out with p = 0\.1"):
        harts.prepare(dropout)
    with pytest.raises(ValueError, match="Model type 'gpt9' does not run on trees"):
        tiny_model("gpt9")
