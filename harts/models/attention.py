"""Tree attention behind transformers' attention interface.

With a layout among the keyword arguments of the model's forward, attention follows the tree; without one the same
model attends exactly as it did before, so that one prepared model serves generation and both executions. What it did
before depends on the family, so there is one name in the interface for each `DenseAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from harts.layers.tree_attention.dispatch import tree_attention
from harts.layout.packed import PackedLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAttention:
    """How models of a family attend without a layout."""

    implementation: str
    """transformers' name of it, which a model must have been loaded with."""
    tree_name: str
    """The name under which it is registered together with tree attention."""

    @classmethod
    def register(
        cls, implementation: str, tree_name: str, *, forward: Callable[..., Any], mask: Callable[..., Any]
    ) -> DenseAttention:
        """Make `tree_name` an attention implementation: tree attention with a layout, `forward` without one.

        Args:
            implementation: transformers' name of `forward`.
            tree_name: Not yet registered.
            forward: What `implementation` calls for models of the family, in transformers' attention signature.
            mask: What makes its masks, in transformers' mask signature.
        """

        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            harts_layout: PackedLayout | None = None,
            **options: Any,
        ) -> tuple[Tensor, Tensor | None]:
            # [batch, heads, tokens, width] in, [batch, tokens, heads, V] out.
            if harts_layout is None:
                return forward(module, query, key, value, attention_mask, **options)
            assert query.shape[0] == 1, "a layout is one packed row"
            output = tree_attention(
                query[0],
                key[0],
                value[0],
                layout=harts_layout,
                scale=options["scaling"],
                # Layers of families without windows or sinks do not name them.
                window=options.get("sliding_window"),
                sink_H=options.get("s_aux"),
            )
            return output.transpose(0, 1)[None], None

        AttentionInterface.register(tree_name, attend)
        AttentionMaskInterface.register(tree_name, mask)
        return cls(implementation=implementation, tree_name=tree_name)


SDPA = DenseAttention.register("sdpa", "harts_tree", forward=sdpa_attention_forward, mask=sdpa_mask)
"""transformers' default, which most families run with."""
