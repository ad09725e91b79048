"""Wherever a rank fails, the others raise with its message, and none waits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harts.data.exchange import Exchange, ThreadExchange, run_in_threads
from harts.data.fail_together import TEXT_BYTES, FailTogether, RankFailedError

RANKS, STEPS = 3, 4


def outcome(exchange: Exchange, before_step: Callable[[int], None]) -> str:
    """Three exchanges, each after some work, and work after the last."""
    one = np.array([exchange.rank])
    try:
        with FailTogether(exchange) as together:
            before_step(0)
            assert [a.tolist() for a in together.all_gather(one, [1] * RANKS)] == [[0], [1], [2]]
            before_step(1)
            assert [a.tolist() for a in together.all_to_all([one] * RANKS, [1] * RANKS)] == [[0], [1], [2]]
            before_step(2)
            assert together.maximum(one).tolist() == [RANKS - 1]
            before_step(3)
    except (MemoryError, RankFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


@pytest.mark.parametrize("failing", [[0], [2], [1, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("step", range(STEPS))
def test_all_raise_wherever_some_fail(failing: list[int], step: int):
    def work(exchange: ThreadExchange) -> tuple[str, str]:
        def before_step(number: int) -> None:
            if number == step and exchange.rank in failing:
                raise MemoryError(f"none left on {exchange.rank}")

        # The same ranks go on afterwards: no word is left over.
        return outcome(exchange, before_step), outcome(exchange, lambda number: None)

    for rank, (first, second) in enumerate(run_in_threads(RANKS, work)):
        own = f"MemoryError: none left on {rank}"
        told = f"RankFailedError: Rank {failing[0]} failed: MemoryError: none left on {failing[0]}"
        assert first == (own if rank in failing else told)
        assert second == "done"


def test_a_word_is_a_reduction_before_every_exchange_and_at_the_end():
    def work(exchange: ThreadExchange) -> int:
        with FailTogether(exchange) as together:
            together.maximum(np.zeros(2, dtype=np.int64))
        return exchange.bytes_received

    assert run_in_threads(2, work) == [8 + 16 + 8] * 2


@pytest.mark.parametrize("text", ["", "ß" * TEXT_BYTES, "a" + "ß" * TEXT_BYTES])
def test_long_messages_are_cut(text: str):
    def work(exchange: ThreadExchange) -> str:
        try:
            with FailTogether(exchange):
                if exchange.rank == 0:
                    raise KeyError(text)
        except (RankFailedError, KeyError) as error:
            return str(error)
        return ""

    told = run_in_threads(2, work)[1].removeprefix("Rank 0 failed: ")
    assert f"KeyError: {KeyError(text)}".startswith(told)
    assert min(len(f"KeyError: {KeyError(text)}".encode()), TEXT_BYTES) - len(told.encode()) in (0, 1)


class Broken(ThreadExchange):
    """Fails inside its second call, that is in the exchange after the first word."""

    def maximum(self, values: np.ndarray) -> np.ndarray:
        if self.num_calls == 1:
            raise ConnectionError("no network")
        return super().maximum(values)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_no_error_of_the_work_is_not_told(kind: type[BaseException]):
    """Nor is a failure of an exchange: to tell would take another one."""

    def interrupted(exchange: ThreadExchange) -> int:
        with pytest.raises(kind), FailTogether(exchange):
            raise kind
        return exchange.num_calls

    def cut_off(exchange: ThreadExchange) -> int:
        broken = Broken(0, exchange._table)
        with pytest.raises(ConnectionError), FailTogether(broken) as together:
            together.maximum(np.zeros(1, dtype=np.int64))
        return broken.num_calls

    assert run_in_threads(1, interrupted) == [0]
    assert run_in_threads(1, cut_off) == [1]
