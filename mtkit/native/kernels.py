"""The functions of `kernels.c` on torch tensors. They are for inference on a CPU, and there only where `available` says so.

Tensors are fp32 and dense unless it is said otherwise. Nothing is checked that a caller in this package cannot get wrong by itself.

Shapes: B sentences, M positions of all of them, R rows (positions or hypotheses), D = d_model, H heads, C = D / H, K inputs and N outputs of a
product, V pieces, T steps.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mtkit.native import library, structs
from mtkit.native.structs import LONG as _LONG
from mtkit.native.structs import POINTER as _POINTER

MAX_HEADS = 128
"""Heads of a model, at most."""

FIRST_STEPS = 64
"""Steps that there is room for at first; it doubles when they are more. A multiple of 16."""

# Of kernels.c.
_PADDED_OUTPUTS, _ROUNDED_INPUTS, _ROUNDED_ROWS = 32, 64, 48
_LOGIT_COLUMNS = 512 + 64
_ROWS_OF_GROUP, _PLACES_OF_GROUP = 128, 512

_ACTIVATIONS = {"relu": 0, "gelu": 1, "swiglu": 2}

_KINDS = {"fp32": 0, "int8": 1, "bf16": 2}

_AVX2 = 1

LinearPrecision = Literal["fp32", "int8", "bf16"]


_ARGUMENTS = {
    "pack_fp32": (_POINTER, _LONG, _LONG, _POINTER),
    "pack_bf16": (_POINTER, _LONG, _LONG, _POINTER),
    "pack_int8": (_POINTER, *[_LONG] * 3, *[_POINTER] * 3),
    "multiply": (_POINTER, _POINTER, *[_LONG] * 3, structs.Rounded, _POINTER, _LONG),
    "encode": (_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, structs.Room, *[_POINTER] * 4),
    "decode_step": (_POINTER, _POINTER),
}


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = library.load()
    assert loaded is not None, library.reason()
    loaded.int8_level.restype = loaded.has_bf16.restype = _LONG
    for name, types in _ARGUMENTS.items():
        if name == "pack_bf16" and not loaded.has_bf16():
            continue
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    return loaded


def available() -> bool:
    """Whether there are kernels on this machine."""
    return library.load() is not None


def reason() -> str:
    """Why there are none; empty if there are."""
    return library.reason()


@functools.cache
def int8_level() -> int:
    """How products of 8-bit integers are done: 3 by matrix units, 2 by dot products, 1 by pairs of products in 16 bits, 0 not at all."""
    return int(_library().int8_level()) if available() else 0


@functools.cache
def has_bf16() -> bool:
    """Whether there are products of bf16, by matrix units."""
    return available() and bool(_library().has_bf16())


class Linear:
    """y = x Wᵀ + b, by as many threads as torch has.

    Args:
        weight_NK: W; it is copied.
        bias_N: b, or None.
        precision: int8 rounds W, a scale for each output, and the rows of x, a scale for each; it needs an `int8_level` above 0. bf16 rounds both
            and needs `has_bf16`; the sums are fp32.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, *, precision: LinearPrecision) -> None:
        self.num_outputs, self.num_inputs = weight_NK.shape
        weight_NK = weight_NK.contiguous()
        bias_N = self._bias_N = None if bias_N is None else bias_N.contiguous()
        scale_N = excess_N = None
        num_columns, shape = _round_up(self.num_outputs, _PADDED_OUTPUTS), (self.num_outputs, self.num_inputs)
        if precision == "fp32":
            self._weight = torch.zeros(num_columns * self.num_inputs)
            _library().pack_fp32(weight_NK.data_ptr(), *shape, self._weight.data_ptr())
        elif precision == "bf16":
            self._weight = torch.zeros(num_columns * _round_up(self.num_inputs, _ROUNDED_INPUTS // 2), dtype=torch.bfloat16)
            _library().pack_bf16(weight_NK.data_ptr(), *shape, self._weight.data_ptr())
        else:
            scale_N, excess_N = torch.empty(self.num_outputs), torch.empty(self.num_outputs)
            self._weight = torch.zeros(num_columns * _round_up(self.num_inputs, _ROUNDED_INPUTS), dtype=torch.int8)
            room = (self._weight.data_ptr(), scale_N.data_ptr(), excess_N.data_ptr())
            _library().pack_int8(weight_NK.data_ptr(), *shape, _levels(), *room)
        self._kept = (scale_N, excess_N)
        self.struct = structs.Linear(
            weight=self._weight.data_ptr(),
            scale=_address(scale_N),
            bias=_address(bias_N),
            excess=_address(excess_N),
            inputs=self.num_inputs,
            outputs=self.num_outputs,
            kind=_KINDS[precision],
        )

    def __call__(self, x_RK: Tensor) -> Tensor:
        """The product, [R, N]. x_RK may be a part of the columns of a matrix."""
        num_rows = len(x_RK)
        y_RN = x_RK.new_empty(num_rows, self.num_outputs)
        rounded = _RoundedRows(num_rows, self.num_inputs)
        _library().multiply(
            ctypes.addressof(self.struct),
            x_RK.data_ptr(),
            x_RK.stride(0),
            num_rows,
            False,
            rounded.struct,
            y_RN.data_ptr(),
            self.num_outputs,
        )
        return y_RN


class _RoundedRows:
    """Room for rows that are rounded to 8 bits, or 16."""

    def __init__(self, num_rows: int, num_inputs: int) -> None:
        self._rows = torch.empty(_round_up(num_rows, _ROUNDED_ROWS) * _round_up(2 * num_inputs, _ROUNDED_INPUTS), dtype=torch.int8)
        self._scales = torch.empty(num_rows)
        self.struct = structs.Rounded(self._rows.data_ptr(), self._scales.data_ptr())


def _levels() -> int:
    """Largest magnitude of a weight: pairs of products have to fit into 16 bits where they are added there, 2 · 255 · 63 do."""
    return 63 if int8_level() == _AVX2 else 127


@dataclass(frozen=True, slots=True)
class Norm:
    """LayerNorm."""

    weight_D: Tensor
    bias_D: Tensor
    eps: float

    @classmethod
    def of(cls, module: nn.LayerNorm) -> "Norm":
        """The weights that a module has now, kept as long as this is."""
        return cls(module.weight.detach().clone(), module.bias.detach().clone(), module.eps)

    def struct(self) -> structs.Norm:
        """For the kernels."""
        return structs.Norm(self.weight_D.data_ptr(), self.bias_D.data_ptr())


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector for each piece, and perhaps more.

    Attributes:
        weight_VD: fp32; or int8, and then without the scale.
        scale_V: What int8 is multiplied by, fp32; None = nothing.
    """

    weight_VD: Tensor
    scale_V: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Encoder or decoder: its layers and what surrounds them.

    Attributes:
        linears: Of each layer in_proj and out_proj of self-attention, for a decoder q_proj and out_proj of the attention to the source, and in_proj
            and out_proj of the feed-forward network.
        norms: Of attention, of the attention to the source, and of the feed-forward network, for each layer.
        last_norm: The norm after the last layer, for pre-norm; None = post-norm.
        embedding: Of the pieces.
        num_heads: H.
        activation: relu, gelu or swiglu.
        in_half: Keep keys and values in bf16.
    """

    linears: Sequence[Sequence[Linear]]
    norms: Sequence[Sequence[Norm]]
    last_norm: Norm | None
    embedding: Embedding
    num_heads: int
    activation: str
    in_half: bool

    @property
    def d_model(self) -> int:
        """D."""
        return self.embedding.weight_VD.shape[1]

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the keys and values that are kept."""
        return torch.bfloat16 if self.in_half else torch.float32

    def struct(self) -> structs.Model:
        """For the kernels."""
        return structs.Model(
            num_layers=len(self.linears),
            heads=self.num_heads,
            channels=self.d_model // self.num_heads,
            activation=_ACTIVATIONS[self.activation],
            is_half=self.in_half,
            epsilon=self.norms[0][0].eps,
            first_norm=structs.Norm() if self.last_norm is None else self.norms[0][0].struct(),
            embedding=self.embedding.weight_VD.data_ptr(),
            embedding_scale=_address(self.embedding.scale_V),
        )

    def layer_structs(self, kind: type[ctypes.Structure]) -> ctypes.Array[Any]:
        """The same for the layers. They have the norm after each part: with pre-norm that is the one before the next part."""
        norms = [norm for layer in self.norms for norm in layer]
        following = iter(norms if self.last_norm is None else [*norms[1:], self.last_norm])
        return (kind * len(self.linears))(
            *(
                kind(*(linear.struct for linear in linears), (structs.Norm * len(own))(*(next(following).struct() for _ in own)))
                for linears, own in zip(self.linears, self.norms, strict=True)
            )
        )


class _StackRoom:
    """Room for the numbers of some rows."""

    def __init__(self, stack: Stack, num_rows: int, *, num_scores: int) -> None:
        linears = [linear for layer in stack.linears for linear in layer]
        widest = max(*(linear.num_outputs for linear in linears), _LOGIT_COLUMNS)
        rounded = _RoundedRows(num_rows, max(linear.num_inputs for linear in linears))
        tensors = [torch.empty(num_rows, stack.d_model) for _ in range(3)] + [torch.empty(num_scores), torch.empty(num_rows, widest)]
        self._kept = (tensors, rounded)
        self.struct = structs.Room(*(tensor.data_ptr() for tensor in tensors), rounded.struct)


@dataclass(frozen=True, slots=True)
class Sources:
    """Encoded sentences, as attention to them is fast.

    Attributes:
        keys: For each layer of the decoder the keys by sentence and head, a column per position.
        values: The values, a row per position.
        length_B: Positions of each sentence, int32.
        start_B: Where it begins: the number of places before it. It takes as many as its length rounded up to 16. int32.
        longest: The largest length.
    """

    keys: list[Tensor]
    values: list[Tensor]
    length_B: Tensor
    start_B: Tensor
    longest: int


class Encoder:
    """An encoder, with the projections of its output to the keys and values of the decoder's layers.

    Args:
        stack: Layers and embeddings.
        sources: The projections, each 2 D wide.
    """

    def __init__(self, stack: Stack, sources: Sequence[Linear]) -> None:
        self._stack, self._sources = stack, sources
        layers, projections = stack.layer_structs(structs.EncoderLayer), (structs.Linear * len(sources))(*(linear.struct for linear in sources))
        self._kept = (layers, projections)  # the kernels have their addresses
        self._struct = structs.Encoder(stack.struct(), ctypes.addressof(layers), ctypes.addressof(projections), len(sources))

    def encode(self, tokens_M: Tensor, lengths: Sequence[int], positions_TD: Tensor) -> Sources:
        """Encode sentences.

        Args:
            tokens_M: int64, of all sentences one after the other, EOS included.
            lengths: Of each, at least 1.
            positions_TD: The encodings of at least as many positions as the longest has.
        """
        stack, longest = self._stack, max(lengths)
        ends = list(itertools.accumulate(_round_up(length, 16) for length in lengths))
        length_B, start_B = torch.tensor(lengths, dtype=torch.int32), torch.tensor([0, *ends[:-1]], dtype=torch.int32)
        keys, values = ([torch.empty(ends[-1] * stack.d_model, dtype=stack.kv_dtype) for _ in self._sources] for _ in range(2))
        num_rows = _ROWS_OF_GROUP + longest
        room = _StackRoom(stack, num_rows, num_scores=4 * _round_up(longest, 16))
        own_keys, own_values = (torch.empty((_PLACES_OF_GROUP + _round_up(longest, 16)) * stack.d_model) for _ in range(2))
        numbers = torch.empty(2, num_rows, dtype=torch.int32)
        key_pointers, value_pointers = _pointers(keys), _pointers(values)
        _library().encode(
            ctypes.addressof(self._struct),
            tokens_M.data_ptr(),
            positions_TD.data_ptr(),
            length_B.data_ptr(),
            len(lengths),
            ctypes.addressof(key_pointers),
            ctypes.addressof(value_pointers),
            room.struct,
            own_keys.data_ptr(),
            own_values.data_ptr(),
            numbers[0].data_ptr(),
            numbers[1].data_ptr(),
        )
        return Sources(keys, values, length_B, start_B, longest)


class Decoder:
    """A decoder, with the projection to the vocabulary.

    Args:
        stack: Layers and embeddings.
        output: The projection, without bias.
        vocab_size: V.
    """

    def __init__(self, stack: Stack, output: Linear, *, vocab_size: int) -> None:
        self.stack, self.vocab_size = stack, vocab_size
        layers = stack.layer_structs(structs.DecoderLayer)
        self._kept = (layers, output)
        self.struct = structs.Decoder(stack.struct(), ctypes.addressof(layers), output.struct, vocab_size)


class Search:
    """What a decoder remembers of a search, and its steps.

    Args:
        decoder: The decoder.
        sources: What `Encoder` made.
        max_rows: The largest number of hypotheses.
        count: How many pieces a step returns for each row, at most V.
        forbidden_ids: int64, ascending: they count for the probabilities of the others and are never returned.
    """

    def __init__(self, decoder: Decoder, sources: Sources, *, max_rows: int, count: int, forbidden_ids: Tensor) -> None:
        self._decoder, self._sources, self._count, self._forbidden_ids = decoder, sources, count, forbidden_ids
        self._max_rows = max_rows
        self._keys, self._values = _pointers(sources.keys), _pointers(sources.values)
        self._kv: list[Tensor] = []
        self._room = self._room_for(FIRST_STEPS)

    def _room_for(self, num_steps: int) -> _StackRoom:
        stack = self._decoder.stack
        self._room_steps = num_steps
        return _StackRoom(stack, self._max_rows, num_scores=max(stack.num_heads * num_steps, 4 * _round_up(self._sources.longest, 16)))

    def step(
        self, tokens_R: Tensor, position_D: Tensor, ancestor_RT: Tensor, start_R: Tensor, count_R: Tensor, forced_R: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The most probable pieces after each row.

        Args:
            tokens_R: The last token of each, int64.
            position_D: The encoding of its position.
            ancestor_RT: int32, for each row and step the row of that step that it descends from; for the present one, itself. May be wider.
            start_R: `Sources.start_B` of its sentence.
            count_R: And its length.
            forced_R: The one piece that each may take, or -1 for any, int64; None = any for all.

        Returns:
            Log-probabilities, fp32, and pieces, int64, both [R, count], the best first; -inf where there are no more.
        """
        stack, num_rows = self._decoder.stack, len(tokens_R)
        self._kv.append(torch.empty(len(stack.linears), num_rows, 2 * stack.d_model, dtype=stack.kv_dtype))
        num_steps = len(self._kv)
        if num_steps > self._room_steps:
            self._room = self._room_for(2 * self._room_steps)
        kv, rows_of_step = _pointers(self._kv), (ctypes.c_int64 * num_steps)(*(kv.shape[1] for kv in self._kv))
        room_for_pointers = (ctypes.c_void_p * num_steps)()
        highest_R, sum_R = torch.full((num_rows,), float("-inf")), torch.zeros(num_rows, dtype=torch.float64)
        value_RC, piece_RC = torch.full((num_rows, self._count), float("-inf")), torch.zeros(num_rows, self._count, dtype=torch.int64)
        state = [tensor.data_ptr() for tensor in (highest_R, sum_R, value_RC, piece_RC)]
        step = structs.Step(
            num_rows=num_rows,
            num_steps=num_steps,
            tokens=tokens_R.data_ptr(),
            position=position_D.data_ptr(),
            kv=ctypes.addressof(kv),
            rows_of_step=ctypes.addressof(rows_of_step),
            ancestor=ancestor_RT.data_ptr(),
            ancestor_ld=ancestor_RT.stride(0),
            keys=ctypes.addressof(self._keys),
            values=ctypes.addressof(self._values),
            start=start_R.data_ptr(),
            count=count_R.data_ptr(),
            best=structs.Best(self._forbidden_ids.data_ptr(), len(self._forbidden_ids), self._count, _address(forced_R), *state),
            room=self._room.struct,
            pointers=ctypes.addressof(room_for_pointers),
        )
        _library().decode_step(ctypes.addressof(self._decoder.struct), ctypes.addressof(step))
        return value_RC, piece_RC

    def num_rows(self, step: int) -> int:
        """Of how many rows the keys and values of a step are stored."""
        return self._kv[step].shape[1]

    def keep_rows(self, step: int, rows: Tensor) -> None:
        """Forget the keys and values that a step has of all rows but these, int32 or int64, ascending; rows are numbered anew."""
        self._kv[step] = self._kv[step].index_select(1, rows)


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[Any]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
