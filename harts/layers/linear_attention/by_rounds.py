"""Linear attention on a tree through calls of a kernel that only returns final states, one call a round.

The readable definition of rounds (model F), for any recurrence, and the way to run kernels we know nothing else of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.layers.gather import gather_rows
from harts.layout.rounds import RunPlan

StreamsT = TypeVar("StreamsT", bound="Streams")
InputsT_contra = TypeVar("InputsT_contra", contravariant=True)


class Streams(Protocol):
    """What a recurrence reads of every token, such as `GatedDeltaInputs`: tensors with one row a token."""

    def map(self: StreamsT, function: Callable[[Tensor], Tensor], /) -> StreamsT:
        """The same function applied to each tensor."""
        ...


class Kernel(Protocol[InputsT_contra]):
    """Runs independent sequences of tokens from given states, such as `chunk_gated_delta_rule`."""

    def __call__(
        self, inputs: InputsT_contra, /, *, cu_seqlens: Tensor, initial_state: Tensor, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        """Outputs [rows, ...] and final states [sequences, ...].

        Args:
            inputs: Rows of all sequences, one after the other.
            cu_seqlens: [sequences + 1] int64 on the CPU; sequence `i` is rows `cu_seqlens[i]:cu_seqlens[i + 1]`.
            initial_state: [sequences, ...].
            chunk_size: C; chunks are counted from the start of each sequence.
        """
        ...


def linear_attention_by_rounds(
    inputs: StreamsT, runs: RunPlan, kernel: Kernel[StreamsT], *, zero_state: Tensor
) -> Tensor:
    """Run the rounds of a plan one after the other; states are handed over with gradients.

    Args:
        inputs: One row a packed token, T rows.
        runs: Of the same tokens.
        kernel: Called once a round.
        zero_state: The state above every root, all zero; its shape, dtype and device are those of every state.

    Returns:
        [T, ...], each token's output taken from the row that owns it. Gradients of a token's replays, and of a state
        that several runs of a round start from, are added in float32 (float64 for float64) in run order.
    """
    device = zero_state.device
    token_R = torch.from_numpy(runs.token_R).to(device)
    rows = inputs.map(lambda x: gather_rows(x, token_R))
    offsets = torch.from_numpy(runs.run_offsets)
    outputs: list[Tensor] = []
    final_states: list[Tensor] = []  # of each round
    for begin, end in _round_ranges(runs):
        # Round `n`: runs whose parents all ended in rounds before `n`.
        sources, index = _sources(runs, begin, end)
        known = torch.cat([zero_state.new_empty(0, *zero_state.shape), *(final_states[source] for source in sources)])
        first_row, last_row = int(offsets[begin]), int(offsets[end])
        output, final_state = kernel(
            rows.map(lambda x, a=first_row, b=last_row: x[a:b]),
            cu_seqlens=offsets[begin : end + 1] - first_row,
            initial_state=gather_rows(known, torch.from_numpy(index).to(device)),
            chunk_size=runs.chunk_size,
        )
        outputs.append(output)
        final_states.append(final_state)
    return torch.cat(outputs).index_select(0, torch.from_numpy(runs.owner_T).to(device))


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicKernel(Generic[InputsT_contra]):
    """A kernel library's public function for packed sequences, in the form that rounds call.

    Example (fla; our queries are scaled already):
        >>> PublicKernel(  # doctest: +SKIP
        ...     function=partial(fla.ops.gated_delta_rule.chunk_gated_delta_rule, scale=1.0, output_final_state=True),
        ...     arguments=lambda x: {"q": x.query, "k": x.key, "v": x.value, "g": x.decay, "beta": x.beta},
        ...     chunk_size=64,
        ... )
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    """`(**arguments, initial_state=, cu_seqlens=) -> (outputs, final states)`: arguments and outputs are
    [1, rows, ...], states [sequences, ...], and cu_seqlens [sequences + 1] lies on their device."""
    arguments: Callable[[InputsT_contra], Mapping[str, Tensor]]
    """The inputs under the names that the function gives them."""
    chunk_size: int
    """C, fixed inside the function."""

    def __call__(
        self, inputs: InputsT_contra, /, *, cu_seqlens: Tensor, initial_state: Tensor, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        """Call the function.

        Raises:
            ValueError: If runs were planned for chunks of another size than the function's.
        """
        if chunk_size != self.chunk_size:
            raise ValueError(
                f"Runs are planned for chunks of {chunk_size} tokens, but the kernel's have {self.chunk_size}: states "
                "would be handed over inside its chunks. Plan the runs with the kernel's chunk size."
            )
        output, final_state = self.function(
            **{name: stream.unsqueeze(0) for name, stream in self.arguments(inputs).items()},
            initial_state=initial_state,
            cu_seqlens=cu_seqlens.to(initial_state.device),
        )
        return output.squeeze(0), final_state


def _round_ranges(runs: RunPlan) -> list[tuple[int, int]]:
    """First run and one past the last of every round."""
    offsets = np.searchsorted(runs.run_round, np.arange(runs.num_rounds + 1)).tolist()
    return list(pairwise(offsets))


def _sources(runs: RunPlan, begin: int, end: int) -> tuple[list[int], NDArray[np.int64]]:
    """Rounds whose final states runs `begin:end` start from, and where in these, put together, each run's state is.

    One past the last for runs that start from zero.
    """
    parents = runs.run_parent[begin:end]
    sources = np.unique(runs.run_round[parents[parents >= 0]])
    known = np.flatnonzero(np.isin(runs.run_round[:begin], sources))
    return sources.tolist(), np.where(parents >= 0, np.searchsorted(known, parents), known.size)
