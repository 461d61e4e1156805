"""A GGUF file read once, and its header as lists: what transformers reads of it, in seconds."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Iterator
from typing import Any
from unittest import mock

import gguf
import numpy as np
from gguf import GGUFValueType, ReaderTensor
from numpy.typing import NDArray

_ARRAY = struct.Struct("<IQ")  # the type of its elements, how many
_LENGTH = struct.Struct("<Q")
_AS_IT_IS = -1  # a type that transformers hands on without looking into it
_AT_ONCE = 1 << 17  # weights: few calls, and what lies between fits into a core's cache


class GgufReader(gguf.GGUFReader):
    """gguf's reader, with an array of the header as one list of its values.

    Its own makes several numpy views of every element, and a vocabulary with its merges has
    hundreds of thousands. A version of gguf that reads arrays by another method is only slower.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        view = memoryview(self.data)
        kind, count = _ARRAY.unpack_from(view, orig_offs)
        offset = orig_offs + _ARRAY.size
        if kind == GGUFValueType.STRING:
            values, offset = _strings(view, count=count, offset=offset)
        elif kind in self.gguf_scalar_to_np:
            dtype = np.dtype(self.gguf_scalar_to_np[GGUFValueType(kind)])
            values = np.frombuffer(view, dtype, count, offset).tolist()
            offset += count * dtype.itemsize
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        # transformers takes the only element of a list out of it, so that is done here, too.
        whole = values[0] if count == 1 else values
        return offset - orig_offs, [whole], [0], [_AS_IT_IS]


def _strings(view: memoryview, *, count: int, offset: int) -> tuple[list[str], int]:
    values = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(view, offset)
        offset += _LENGTH.size
        values.append(str(view[offset : offset + length], "utf-8"))
        offset += length
    return values, offset


@contextlib.contextmanager
def reading_once() -> Iterator[None]:
    """Inside, transformers reads a file by :class:`GgufReader`, once, and makes one map of names.

    It makes a new reader at every call, and a new map of names for every part of a model.
    """
    names = functools.cache(gguf.get_tensor_name_map)
    with (
        mock.patch.object(gguf, "GGUFReader", functools.cache(GgufReader)),
        mock.patch.object(gguf, "get_tensor_name_map", names),
    ):
        yield


def dequantised(tensor: ReaderTensor) -> NDArray[np.float32]:
    """The weights of a tensor: ``gguf.dequantize``, with fewer and larger pieces in less memory."""
    shape = tuple(reversed(tensor.shape.tolist()))
    data = np.asarray(tensor.data)  # of a memory map, every slice costs
    if data.dtype != np.uint8:  # floats, not blocks of bytes
        return gguf.dequantize(data, tensor.tensor_type)
    rows = data.reshape(-1, data.shape[-1])
    out = np.empty((len(rows), shape[-1]), np.float32)
    step = max(1, _AT_ONCE // shape[-1])
    for first in range(0, len(rows), step):
        block = rows[first : first + step]
        # One long row, for gguf takes few of them at once; a block of weights knows no rows.
        weights = gguf.dequantize(block.reshape(1, -1), tensor.tensor_type)
        out[first : first + step] = weights.reshape(len(block), -1)
    return out.reshape(shape)
