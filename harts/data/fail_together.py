"""Work that ends on all ranks or on none: where one fails, the others learn of it instead of waiting for it.

Every exchange is preceded by a word from each rank, whether it has come this far: 8 bytes, one reduction. A rank that
fails between two exchanges says so in place of its next word, wherever it is, and all others raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from harts.data.exchange import Exchange

Result = TypeVar("Result")
TEXT_BYTES = 500
"""Of an error's message that other ranks get."""


class RankFailedError(RuntimeError):
    """Another rank could not go on, so this one cannot either."""


class FailTogether:
    """An exchange for a block of work, as `harts.data.exchange.Exchange`.

    What a rank raises in the block, it raises; all others raise a `RankFailedError` with its message. All ranks enter
    the block, and leave it together. A failure inside an exchange, of the network or the group, is not told, since
    nothing can be; there the group's timeout ends the others.

    Example:
        >>> from harts.data.exchange import run_in_threads
        >>> def work(exchange: Exchange) -> str:
        ...     try:
        ...         with FailTogether(exchange) as together:
        ...             together.maximum(np.array([1 // (1 - exchange.rank)]))
        ...     except (RankFailedError, ZeroDivisionError) as error:
        ...         return type(error).__name__
        ...     return "done"
        >>> run_in_threads(3, work)
        ['RankFailedError', 'ZeroDivisionError', 'RankFailedError']
    """

    def __init__(self, exchange: Exchange) -> None:
        """Take part with the end of an exchange, which is not used otherwise inside the block."""
        self._exchange = exchange
        self._others_listen = False

    def __enter__(self) -> FailTogether:
        self._others_listen = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Returns None, so whatever was raised goes on. An interrupt is not told: it asks to stop, not to wait.
        if error is None or (isinstance(error, Exception) and self._others_listen):
            self._give_word(error)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._exchange.rank

    @property
    def ranks(self) -> int:
        """How many take part."""
        return self._exchange.ranks

    def all_gather(self, values: NDArray, sizes: Sequence[int]) -> list[NDArray]:
        """As documented on `Exchange`."""
        return self._after_word(lambda: self._exchange.all_gather(values, sizes))

    def all_to_all(self, parts: Sequence[NDArray], sizes: Sequence[int]) -> list[NDArray]:
        """As documented on `Exchange`."""
        return self._after_word(lambda: self._exchange.all_to_all(parts, sizes))

    def maximum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """As documented on `Exchange`."""
        return self._after_word(lambda: self._exchange.maximum(values))

    def _after_word(self, call: Callable[[], Result]) -> Result:
        self._give_word(None)
        self._others_listen = False
        result = call()
        self._others_listen = True
        return result

    def _give_word(self, error: BaseException | None) -> None:
        """Tell and learn whether a rank failed; raise if another did and this one has no error of its own."""
        self._others_listen = False
        me, ranks = self._exchange.rank, self._exchange.ranks
        # The largest is that of the first rank that failed.
        word = self._exchange.maximum(np.array([0 if error is None else ranks - me], dtype=np.int64))[0]
        if word > 0:
            text = np.zeros(TEXT_BYTES, dtype=np.uint8)
            if error is not None:
                encoded = f"{type(error).__name__}: {error}".encode()[:TEXT_BYTES]
                text[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
            first = ranks - int(word)
            told = self._exchange.all_gather(text, [TEXT_BYTES] * ranks)[first].tobytes()
            if error is None:
                # A character may be cut in two.
                raise RankFailedError(f"Rank {first} failed: {told.rstrip(bytes(1)).decode(errors='ignore')}")
        self._others_listen = True
