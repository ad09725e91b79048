"""Text from logs made fit for a screen."""

from __future__ import annotations


def printable(text: str, limit: int | None = None) -> str:
    """One line without control characters, which could move the cursor, recolour a terminal or reverse a text.

    Args:
        text: Any text.
        limit: Most characters; what is cut off becomes an ellipsis. None keeps all.

    Example:
        >>> printable("a\\x1b[31m\\nb")
        'a\\\\x1b[31m\\\\nb'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return shown if limit is None or len(shown) <= limit else shown[: max(limit - 1, 0)] + "…"
