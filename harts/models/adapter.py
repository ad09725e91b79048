"""A Hugging Face causal LM that also runs on layouts.

What HARTS changes on a model: the class of each layer in `TreeModel.replaced` (to a subclass with the same
parameters), and the attention implementation of its configuration. `restore` undoes both. The layout travels as a
keyword through the model's own forward, so checkpointing, hooks and autograd threads see nothing unusual.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from harts.layers.moe.losses import RouterLosses
from harts.layers.moe.recorder import RouterRecorder
from harts.layers.one_arithmetic import one_arithmetic
from harts.layout.flat import FlatLayout
from harts.layout.kernels import Kernels
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.arrival import layout_must_arrive
from harts.models.attention import DenseAttention
from harts.models.dimensions import dimensions_of
from harts.models.family import Family
from harts.models.registry import check_modules, family_of_type, find_family, supported_types
from harts.models.routing import Routing, attach, routed_class
from harts.plan.cost import CostModel, ModelDimensions

LOGIT_ROUNDING = 32
"""Relative difference of the logits of two equal passes, in units of rounding, that is still none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TreeModel:
    """A prepared model. Without a layout, `module` behaves as before.

    Example:
        >>> model = harts.prepare(Qwen3_5ForCausalLM(config))  # doctest: +SKIP
        >>> model.module.generate(...)  # doctest: +SKIP
    """

    module: PreTrainedModel
    """The causal LM. Train its parameters and save it as usual."""
    needs: LayoutNeeds
    """What its layers index with."""
    dense_attention: DenseAttention | None
    """How it attends without a layout; None if it was prepared for flat execution only, which changes nothing."""
    cost: CostModel
    """Predicts the work of a microbatch."""
    logit_scale: float
    """What its logits are multiplied by before the softmax."""
    replaced: tuple[tuple[nn.Module, type[nn.Module]], ...]
    """Every layer that now has a tree class, and its original class."""
    routing: Routing
    """Its routers, with the hooks on them; none without mixtures of experts."""
    router: RouterLosses | None
    """Losses of its routers; None records nothing."""
    unreached: list[nn.Module]
    """Layers that mix tokens and that no layout has reached yet; emptied by the first pass over a tree."""

    @property
    def runs_on_trees(self) -> bool:
        """False if it was prepared for flat execution only."""
        return self.dense_attention is not None

    @property
    def device(self) -> torch.device:
        """Where its embeddings are."""
        return self._embeddings.device

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding table."""
        return self._embeddings.shape[0]

    @property
    def _embeddings(self) -> Tensor:
        weight = self.module.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def head(self) -> nn.Linear:
        """The LM head."""
        head = self.module.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"The LM head is a {type(head).__qualname__}, expected nn.Linear. Leave it out of the adapters."
            )
        return head

    def hidden_states(self, layout: PackedLayout | FlatLayout, recorder: RouterRecorder | None = None) -> Tensor:
        """Run the decoder, all but the LM head.

        Args:
            layout: One microbatch.
            recorder: Of the same microbatch; None leaves its routers alone.

        Returns:
            [T, D] for a `PackedLayout`, [N * L, D] for a `FlatLayout`.
        """
        decoder = self.module.get_decoder()
        options = {} if recorder is None else {"harts_router": self.routing.bound(recorder)}
        if isinstance(layout, FlatLayout):
            return decoder(layout.token_ids_NL, use_cache=False, **options).last_hidden_state.flatten(0, 1)
        if not self.runs_on_trees:
            raise ValueError('The model was prepared for flat execution only. Pass execution="flat".')
        # A mask of four axes counts as prepared, which keeps transformers from building its own T x T one from the
        # positions; nothing reads it.
        prepared_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        with self.arithmetic(), layout_must_arrive(self.unreached):
            output = decoder(
                layout.token_ids_T[None],
                position_ids=layout.position_T[None],
                attention_mask=prepared_mask,
                use_cache=False,
                harts_layout=layout,
                **options,
            )
        self.unreached.clear()
        return output.last_hidden_state[0]

    def arithmetic(self) -> AbstractContextManager[object]:
        """What runs its forward passes, and its LM head's: operators as they are, or one arithmetic for every row."""
        return one_arithmetic(self.device) if self.needs.kernels.exact else nullcontext()

    def restore(self) -> PreTrainedModel:
        """Undo `prepare`. The handle must not be used afterwards."""
        for layer, original in self.replaced:
            layer.__class__ = original
        self.routing.remove()
        if self.dense_attention is not None:
            self.module.set_attn_implementation(self.dense_attention.implementation)
        return self.module


def prepare(
    model: nn.Module,
    *,
    replay: bool = True,
    flat_only: bool = False,
    router: RouterLosses | None = None,
    kernels: Kernels | None = None,
) -> TreeModel:
    """Let a model run on prefix trees, in place.

    Args:
        model: A transformers causal LM, or a wrapper around one (a peft model). Its attention implementation must be
            the one that its family states: "sdpa", or "eager" where transformers has no other.
        replay: False starts linear-attention chunks at branch points. An ablation: results are no longer those of
            training each trajectory alone.
        flat_only: Change nothing on the model, for `execution="flat"` alone: any causal LM whose logits are its LM
            head's will do then, so that a model that does not run on trees trains through the same step.
        router: Losses of the routers of a mixture of experts, and, without coefficients too, the request to count
            what they choose. None leaves them alone.
        kernels: Which kernels to run on trees, and whether they must be deterministic or exact. None takes the
            fastest that can run; which ones is logged by `harts.layers`.

    Raises:
        ValueError: If the model or one of its layers is not known to run on trees, or its routers are asked for and
            not known; the message names it.
    """
    causal_lm = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if causal_lm is None:
        raise ValueError(f"{type(model).__qualname__} holds no transformers model. Pass one, or a wrapper around one.")
    if flat_only:
        if router is not None:
            raise ValueError("Routers are known of models that run on trees only. Leave out flat_only, or router.")
        return _prepare_flat(causal_lm)
    family = find_family(causal_lm.config)
    kernels = kernels or Kernels()
    _check_model(causal_lm, family, kernels)
    routing = attach(causal_lm, family.routers)
    if router is not None and not routing.sites:
        raise ValueError(
            f"A {type(causal_lm).__qualname__} has no routers that the installed transformers shows. Leave out router "
            "for a model without experts; install a newer transformers for one with them."
        )
    replaced = _replace_classes(causal_lm, family, has_routers=bool(routing.sites))
    causal_lm.set_attn_implementation(family.attention.tree_name)
    mixing = {*family.tree_classes.values(), *family.attention_classes}
    needs = replace(family.layout_needs(causal_lm.config), replay=replay, kernels=kernels)
    return TreeModel(
        module=causal_lm,
        needs=needs,
        dense_attention=family.attention,
        cost=_cost(dimensions_of(causal_lm, family)),
        logit_scale=family.logit_scale(causal_lm.config),
        replaced=replaced,
        routing=routing,
        router=router,
        unreached=[m for m in causal_lm.modules() if type(m) in mixing],
    )


def _prepare_flat(model: PreTrainedModel) -> TreeModel:
    name = model.config.model_type
    prepared = TreeModel(
        module=model,
        needs=LayoutNeeds(chunk_size=None, conv_width=1),
        dense_attention=None,
        cost=CostModel(flops_per_token=float(model.num_parameters()), flops_per_pair=0.0),
        logit_scale=family_of_type(name)[1].logit_scale(model.config) if name in supported_types() else 1.0,
        replaced=(),
        routing=attach(model, {}),
        router=None,
        unreached=[],
    )
    # Some models scale or cap their logits after the head, and a step would not know.
    hidden: list[Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda _m, _i, output: hidden.append(output.last_hidden_state))
    with torch.no_grad():
        logits = model(torch.arange(2, device=prepared.device)[None], use_cache=False).logits
        hook.remove()
        own = prepared.logit_scale * prepared.head(hidden[0])
    if (logits - own).double().norm() > LOGIT_ROUNDING * torch.finfo(own.dtype).eps * logits.double().norm():
        raise ValueError(
            f"The logits of a {type(model).__qualname__} are not its LM head's: they are scaled or capped in a way "
            "that HARTS does not know. State it in a family file."
        )
    return prepared


def _replace_classes(
    model: PreTrainedModel, family: Family, *, has_routers: bool
) -> tuple[tuple[nn.Module, type[nn.Module]], ...]:
    replaced = []
    for layer in model.modules():
        original = type(layer)
        on_layouts = family.tree_classes.get(original, original)
        if has_routers and issubclass(original, GradientCheckpointingLayer):
            on_layouts = routed_class(on_layouts)
        if on_layouts is not original:
            layer.__class__ = on_layouts
            replaced.append((layer, original))
    return tuple(replaced)


def _check_model(model: PreTrainedModel, family: Family, kernels: Kernels) -> None:
    config = model.config
    implementation, expected = config._attn_implementation, family.attention.implementation
    if implementation != expected:
        prepared = implementation == family.attention.tree_name
        raise ValueError(
            f"The model's attention implementation is {implementation!r}, expected {expected!r}. "
            + ("It is prepared already." if prepared else f'Load the model with attn_implementation="{expected}".')
        )
    if not isinstance(model, family.causal_lm):
        raise ValueError(
            f"Got a {type(model).__qualname__}, expected a {family.causal_lm.__qualname__}. "
            "Load the model with that class."
        )
    check_modules(model, family)
    if kernels.exact and config._experts_implementation not in (None, "eager"):
        raise ValueError(
            f"The experts run with {config._experts_implementation!r}, whose bits may depend on how many tokens each "
            'has. For exact mode, call model.set_experts_implementation("eager").'
        )


def _cost(model: ModelDimensions) -> CostModel:
    return CostModel.of_model(
        num_parameters=model.num_dense_parameters + model.num_expert_parameters + model.vocab_size * model.hidden_size,
        num_attention_layers=model.num_full_attention_layers,
        attention_width=model.attention_width,
        windows=model.windows,
    )
