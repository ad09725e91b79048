"""All formats, the more particular before the more general, and which of them a file is in."""

from __future__ import annotations

from collections.abc import Mapping

from harts.data.readers.files import Records
from harts.data.readers.format import ReaderFormat
from harts.data.readers.messages import MESSAGES
from harts.data.readers.mini_swe_agent import MINI_SWE_AGENT
from harts.data.readers.prime_rl import PRIME_RL
from harts.data.readers.shapes import SHAPES
from harts.data.readers.swe_agent import SWE_AGENT
from harts.data.readers.tau2_bench import TAU2_BENCH
from harts.data.readers.tau_bench import TAU_BENCH
from harts.data.readers.tinker import TINKER
from harts.data.readers.token_columns import TOKEN_COLUMNS
from harts.data.readers.trajectories import TRAJECTORIES
from harts.data.readers.trl import TRL
from harts.data.readers.verl import VERL

FORMATS: Mapping[str, ReaderFormat] = {
    form.name: form
    for form in (
        TRAJECTORIES,
        SHAPES,
        TINKER,
        PRIME_RL,
        TRL,
        VERL,
        TOKEN_COLUMNS,
        TAU_BENCH,
        TAU2_BENCH,
        SWE_AGENT,
        MINI_SWE_AGENT,
        MESSAGES,
    )
}
# Damaged records before the first good one, at most.
TRIED = 1000


def find_format(records: Records, name: str | None) -> ReaderFormat:
    """The format of a file, by its first record that is whole, or by name.

    Raises:
        ValueError: If there is no such format, the file is empty, or its first record is in none of them.
    """
    if name is not None:
        if name not in FORMATS:
            raise ValueError(f"Got the format {name!r}, expected one of {', '.join(FORMATS)}.")
        return FORMATS[name]
    damaged: ValueError | None = None
    for tried, item in enumerate(records):
        try:
            record = item.load()
        except ValueError as error:
            damaged = damaged or error
            if tried == TRIED:
                break
            continue
        for form in FORMATS.values():
            if form.sniff(record):
                return form
        known = "; ".join(f"{form.name}: {form.holds}" for form in FORMATS.values())
        fields = ", ".join(sorted(map(str, record.fields))[:20]) or "none"
        raise ValueError(f"{record.place}: fields {fields}, which is no format that is known. Formats are {known}.")
    if damaged is not None:
        raise damaged
    raise ValueError(f"{records.path} is empty, expected rollouts.")
