"""Rows of dictionaries of tensors: safetensors and torch files, read without running code from the file."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from harts.data.readers.record import Record

ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorItem:
    """A row that was not read yet."""

    place: str
    """For messages."""
    tensors: Mapping[str, Any]
    """All of the file; each is indexed by row first."""
    row: int
    """Of all tensors."""
    file_name: str
    """As in `Record`."""

    def load(self) -> Record:
        """The row of every tensor, as NumPy arrays."""
        fields = {name: _to_numpy(tensor[self.row]) for name, tensor in self.tensors.items()}
        return Record(place=self.place, fields=fields, file_name=self.file_name)


class TensorRows:
    """The rows of a file of tensors that all have the same first dimension. Nothing is read before it is asked for."""

    def __init__(self, path: Path, magic: bytes) -> None:
        self.path = path
        self.position = 0
        self._tensors = _torch_tensors(path) if magic.startswith(ZIP_MAGIC) else _safetensors(path)
        sizes = {name: _rows(tensor) for name, tensor in self._tensors.items()}
        if len(set(sizes.values())) != 1 or None in sizes.values():
            raise ValueError(
                f"{path}: tensors have {sizes or 'no'} rows, expected the same first dimension everywhere. "
                "Save the batch alone."
            )
        self._rows = next(iter(sizes.values())) or 0

    def __iter__(self) -> Iterator[TensorItem]:
        size = self.path.stat().st_size
        for item in self.at(range(self._rows)):
            yield item
            self.position = (item.row + 1) * size // self._rows

    def at(self, numbers: Iterable[int]) -> Iterator[TensorItem]:
        """Rows by number."""
        name = self.path.name.split(".")[0]
        for number in numbers:
            place = f"{self.path}, row {number + 1}"
            yield TensorItem(place=place, tensors=self._tensors, row=number, file_name=name)


def looks_like_safetensors(magic: bytes) -> bool:
    """Eight bytes of length, then the JSON of the header."""
    return len(magic) > 8 and magic[8:9] == b"{" and int.from_bytes(magic[:8], "little") < 1 << 32


def _safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(str(path), framework="pt")
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged safetensors file ({error}).") from error


def _torch_tensors(path: Path) -> Mapping[str, Any]:
    import torch

    try:
        value = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        # Objects of classes that are not tensors (a DataProto, a TensorDict) are refused by torch itself.
        raise ValueError(
            f"{path}: not a plain dictionary of tensors ({str(error).splitlines()[0] if str(error) else error!r}). "
            "Save it as one, `torch.save(dict(data.batch), path)`, or with safetensors."
        ) from error
    if isinstance(value, dict) and isinstance(value.get("batch"), dict):
        value = value["batch"]
    tensors = value if isinstance(value, dict) else {}
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path}: expected a dictionary of tensors, `torch.save(dict(data.batch), path)`.")
    return {str(name): tensor for name, tensor in tensors.items()}


def _rows(tensor: Any) -> int | None:
    import torch

    shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else tensor.get_shape()
    return shape[0] if shape else None


def _to_numpy(tensor: Any) -> NDArray[Any]:
    """float64 for all kinds of floats, of which NumPy lacks bfloat16."""
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
