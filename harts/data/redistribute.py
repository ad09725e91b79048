"""Trajectories to the ranks that run them, as bytes whose number every rank knows before.

A trajectory goes from the rank that holds it to the one that runs it, if these differ. Of its streams those of trained
tokens are sent, for nothing else is read, in as few bytes as hold them exactly (`stream_formats.py`). What makes a
token, its id, share key and routes, is equal in trajectories that begin alike; so it travels to a rank once, and not at
all if the rank holds a trajectory with it (`arrivals.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from harts.data.arrivals import Arrivals, plan_arrivals
from harts.data.batch import STREAMS
from harts.data.exchange import Exchange
from harts.data.ragged import split
from harts.data.stream_formats import FACTS, StreamFormat, needs_float64, stream_facts
from harts.data.trajectory import Trajectory

_HEAD = 6 + FACTS * len(STREAMS)
_OF_TOKENS = ("token_ids", "share_key", "routes")
"""What makes a token."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrajectoryRecords:
    """What all ranks know of each trajectory of the step, by number."""

    numbers: NDArray[np.int64]
    """[n] int64. Numbers of this rank's trajectories, in the order given."""
    rank_N: NDArray[np.int64]
    """[N] int64. Rank that holds it."""
    length_N: NDArray[np.int64]
    """[N] int64, >= 1. Tokens."""
    count_N: NDArray[np.int64]
    """[N] int64. Trained tokens."""
    group_N: NDArray[np.int64]
    """[N] int64. Group id."""
    weight_N: NDArray[np.float64]
    """[N] float64, >= 0."""
    temperature_N: NDArray[np.float64]
    """[N] float64, > 0."""
    formats: dict[str, StreamFormat]
    """How each of `STREAMS` is sent; those that trajectories lack are not, and advantages are not if all are zero."""
    with_share_key: bool
    """Whether any carries a share key."""
    routes_shape: tuple[int, int] | None
    """Layers and experts of recorded routes; None if there are none."""
    wide_ids: bool
    """Whether token ids need 64 bits."""


def gather_records(
    trajectories: Sequence[Trajectory],
    exchange: Exchange,
    numbers: NDArray[np.int64],
    *,
    rank_N: NDArray[np.int64],
    length_N: NDArray[np.int64],
) -> TrajectoryRecords:
    """Tell all ranks what a step's normalisers and the sizes of messages depend on: 32 bytes a trajectory.

    Args:
        trajectories: Of this rank, checked.
        exchange: With the others.
        numbers: [n] int64. Their numbers in the step.
        rank_N: [N] int64, by number. Rank that holds each.
        length_N: [N] int64, by number. Tokens of each.

    Raises:
        ValueError: On all ranks, if some trajectories carry a stream or routes and others do not.
    """
    own = [trajectories[i] for i in np.argsort(numbers)]
    counts = np.bincount(rank_N, minlength=exchange.ranks)
    message = np.concatenate(
        [
            _head(own),
            np.array([t.loss_mask.sum() for t in own], dtype=np.int64),
            np.array([t.group_id for t in own], dtype=np.int64),
            np.array([t.weight for t in own], dtype=np.float64).view(np.int64),
            np.array([t.temperature for t in own], dtype=np.float64).view(np.int64),
        ]
    )
    gathered = exchange.all_gather(message, (_HEAD + 4 * counts).tolist())
    heads = np.stack([message[:_HEAD] for message in gathered])
    columns = np.concatenate([message[_HEAD:].reshape(4, -1) for message in gathered], axis=1)
    by_number = np.empty_like(columns)
    by_number[:, np.argsort(rank_N, kind="stable")] = columns
    given = heads[counts > 0]
    _check_heads(given, np.flatnonzero(counts))
    _, _, has_key, layers, experts, largest, *_ = given.max(axis=0).tolist()
    facts = np.split(given[:, -FACTS * len(STREAMS) :], len(STREAMS), axis=1)
    return TrajectoryRecords(
        numbers=numbers,
        rank_N=rank_N,
        length_N=length_N,
        count_N=by_number[0],
        group_N=by_number[1],
        weight_N=by_number[2].view(np.float64),
        temperature_N=by_number[3].view(np.float64),
        formats={name: StreamFormat.of(some) for name, some in zip(STREAMS, facts, strict=True)},
        with_share_key=bool(has_key),
        routes_shape=None if layers < 0 else (layers, experts),
        wide_ids=largest >= 2**31,
    )


def bits_to_move(records: TrajectoryRecords) -> tuple[NDArray[np.int64], int]:
    """What a trajectory takes that runs elsewhere than it lives.

    Returns:
        `[N]` int64, by number: bits beside its tokens, with the log-probs that come back, as float32; and bits of each
        token that the receiver does not hold.
    """
    routes = 0 if records.routes_shape is None else records.routes_shape[0] * records.routes_shape[1]
    per_token = (64 if records.wide_ids else 32) + 64 * records.with_share_key + 32 * routes
    bits_N = records.length_N + 32 * records.count_N
    for form in records.formats.values():
        bits_N += 8 * np.dtype(form.dtype).itemsize * form.sizes(records.count_N)
    return bits_N, per_token


def redistribute(
    trajectories: Sequence[Trajectory],
    exchange: Exchange,
    records: TrajectoryRecords,
    target_N: NDArray[np.int64],
    *,
    order_N: NDArray[np.int64],
    lcp_N: NDArray[np.int64],
) -> list[Trajectory]:
    """Send every trajectory to the rank that runs it.

    Args:
        trajectories: Of this rank.
        exchange: With the others.
        records: Of all trajectories.
        target_N: [N] int64, by number. Rank that runs each.
        order_N: [N] int64. Numbers in lexicographic order.
        lcp_N: [N] int64, in that order. Tokens shared with the one before; 0 for the first.

    Returns:
        What this rank runs, by ascending number. Streams of trajectories from elsewhere are zero where nothing is
        trained.
    """
    me, here = exchange.rank, dict(zip(records.numbers.tolist(), trajectories, strict=True))
    plan = partial(plan_arrivals, rank_N=records.rank_N, target_N=target_N, order_N=order_N, lcp_N=lcp_N)
    parts = [np.zeros(0, dtype=np.uint8)] * exchange.ranks
    for other in np.unique(target_N[(records.rank_N == me) & (target_N != me)]).tolist():
        leaving = plan(other)
        parts[other] = _to_bytes(leaving.take(records.rank_N[leaving.numbers] == me), here, records)
    arrivals = plan(me)
    coming = [arrivals.take(records.rank_N[arrivals.numbers] == other) for other in range(exchange.ranks)]
    received = exchange.all_to_all(parts, [_num_bytes(some, records) for some in coming])
    pieces: dict[int, dict[str, NDArray]] = {}
    for some, message in zip(coming, received, strict=True):
        pieces |= zip(some.numbers.tolist(), _from_bytes(message, some, records), strict=True)
    # In lexicographic order, so that what a trajectory begins with is there.
    for number, source, shared in zip(arrivals.numbers.tolist(), arrivals.source, arrivals.shared, strict=True):
        here[number] = _rebuilt(pieces[number], here[source] if shared else None, shared, records, number)
    return [here[number] for number in np.flatnonzero(target_N == me).tolist()]


def return_values(
    values_P: NDArray[np.float64],
    exchange: Exchange,
    records: TrajectoryRecords,
    target_N: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Send a value of each trained token back to the rank that holds its trajectory.

    Args:
        values_P: [P] float64, of the trajectories that ran here, by ascending number.
        exchange: With the others.
        records: Of all trajectories.
        target_N: [N] int64, by number. Rank that ran each.

    Returns:
        [P] float64, of this rank's trajectories, in the order given.
    """
    me, ranks = exchange.rank, range(exchange.ranks)
    ran = np.flatnonzero(target_N == me)
    pieces = dict(zip(ran.tolist(), split(values_P, records.count_N[ran]), strict=True))
    back = [np.flatnonzero((target_N == me) & (records.rank_N == other)).tolist() for other in ranks]
    home = [np.flatnonzero((target_N == other) & (records.rank_N == me)) for other in ranks]
    is_wide = exchange.maximum(np.array([needs_float64(values_P)], dtype=np.int64))[0]
    dtype = np.float64 if is_wide else np.float32
    sent = [np.concatenate([values_P[:0], *(pieces[i] for i in some)]).astype(dtype) for some in back]
    received = exchange.all_to_all(sent, [int(records.count_N[some].sum()) for some in home])
    returned: dict[int, NDArray[np.float64]] = {}
    for some, values in zip(home, received, strict=True):
        returned |= zip(some.tolist(), split(values.astype(np.float64), records.count_N[some]), strict=True)
    return np.concatenate([values_P[:0], *(returned[i] for i in records.numbers.tolist())])


def _head(own: Sequence[Trajectory]) -> NDArray[np.int64]:
    """Which streams a rank's trajectories carry (sampling, reference, share key), their routes, the largest id, and
    what the values of `STREAMS` need."""
    if not own:
        return np.array([0, 0, 0, -1, -1, -1, *[0] * FACTS * len(STREAMS)])
    first = own[0]
    shape = (-1, -1) if first.routes is None else first.routes.shape[1:]
    has_key = any(t.share_key is not None for t in own)
    largest = max(int(t.token_ids.max()) for t in own)
    has_sampling, has_ref = first.sampling_logprobs is not None, first.ref_logprobs is not None
    needs = [stream_facts(_trained(own, name), even_zeros=name != "advantages") for name in STREAMS]
    return np.concatenate([[has_sampling, has_ref, has_key, *shape, largest], *needs]).astype(np.int64)


def _trained(own: Sequence[Trajectory], name: str) -> list[NDArray[np.float64]]:
    """A stream's values at the trained tokens of each trajectory that carries it."""
    return [stream[t.loss_mask] for t in own if (stream := getattr(t, name)) is not None]


def _check_heads(heads: NDArray[np.int64], ranks: NDArray[np.int64]) -> None:
    for column, name in enumerate(["sampling_logprobs", "ref_logprobs", "", "routes", "routes"]):
        other = np.flatnonzero(heads[:, column] != heads[0, column])
        if name and other.size:
            raise ValueError(
                f"Trajectories of rank {ranks[0]} and those of rank {ranks[other[0]]} differ in {name}: some carry "
                "none, or of another model. Give them for all trajectories of the step or for none."
            )


def _columns(some: Arrivals, records: TrajectoryRecords) -> Iterator[tuple[str, type, int]]:
    """Name, type and number of entries of each array that some trajectories are sent as."""
    tokens = int(records.length_N[some.numbers].sum())
    sent = tokens - int(some.shared.sum())
    yield "token_ids", np.int64 if records.wide_ids else np.int32, sent
    yield "loss_mask", np.uint8, -(-tokens // 8)
    for name, form in records.formats.items():
        if form.is_sent:
            yield name, form.dtype, int(form.sizes(records.count_N[some.numbers]).sum())
    if records.with_share_key:
        yield "share_key", np.int64, sent
    if records.routes_shape is not None:
        yield "routes", np.int32, sent * records.routes_shape[0] * records.routes_shape[1]


def _num_bytes(some: Arrivals, records: TrajectoryRecords) -> int:
    return sum(np.dtype(kind).itemsize * count for _, kind, count in _columns(some, records))


def _to_bytes(some: Arrivals, own: Mapping[int, Trajectory], records: TrajectoryRecords) -> NDArray[np.uint8]:
    columns = []
    for name, kind, _ in _columns(some, records):
        sent = [own[number] for number in some.numbers.tolist()]
        if name in STREAMS:
            column = records.formats[name].write(_trained(sent, name))
        elif name == "loss_mask":
            column = np.packbits(np.concatenate([t.loss_mask for t in sent]))
        else:
            pieces = zip(sent, some.shared.tolist(), strict=True)
            column = np.concatenate([_of_tokens(t, name)[shared:].reshape(-1) for t, shared in pieces])
        columns.append(column.astype(kind, copy=False).view(np.uint8))
    return np.concatenate(columns)


def _of_tokens(trajectory: Trajectory, name: str) -> NDArray[np.generic]:
    if name == "share_key" and trajectory.share_key is None:
        return np.zeros(len(trajectory), dtype=np.int64)
    return getattr(trajectory, name)


def _from_bytes(message: NDArray[np.uint8], some: Arrivals, records: TrajectoryRecords) -> Iterator[dict[str, NDArray]]:
    """What was sent of each trajectory, by name."""
    length, begin = records.length_N[some.numbers], 0
    pieces: dict[str, list[NDArray]] = {}
    for name, kind, count in _columns(some, records):
        end = begin + np.dtype(kind).itemsize * count
        column = np.frombuffer(message[begin:end].tobytes(), dtype=kind)
        begin = end
        if name == "loss_mask":
            pieces[name] = split(np.unpackbits(column, count=int(length.sum())).astype(bool), length)
        elif name in STREAMS:
            pieces[name] = records.formats[name].read(column, records.count_N[some.numbers])
        else:
            entries = column.reshape(-1, *(records.routes_shape or ())) if name == "routes" else column
            pieces[name] = split(entries, length - some.shared)
    for place in range(some.numbers.size):
        yield {name: parts[place] for name, parts in pieces.items()}


def _rebuilt(
    pieces: Mapping[str, NDArray], source: Trajectory | None, shared: int, records: TrajectoryRecords, number: int
) -> Trajectory:
    """A trajectory from what came, and from another one that begins with the same tokens."""
    mask = pieces["loss_mask"]
    fields: dict[str, NDArray] = {"loss_mask": mask, "advantages": np.zeros(mask.size)}
    for name, values in pieces.items():
        if name in STREAMS:
            fields[name] = _full(values, mask)
        elif name in _OF_TOKENS:
            first = [] if source is None else [_of_tokens(source, name)[:shared]]
            fields[name] = np.concatenate([*first, values])
    fields["token_ids"] = fields["token_ids"].astype(np.int64, copy=False)
    return Trajectory(
        **fields,
        group_id=int(records.group_N[number]),
        temperature=float(records.temperature_N[number]),
        weight=float(records.weight_N[number]),
    )


def _full(values: NDArray[np.floating], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A stream over all tokens from its trained ones, or from the one value of all of these."""
    full = np.zeros(mask.size)
    full[mask] = values
    return full
