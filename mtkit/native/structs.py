"""The structs of `kernels.c`, in its order: what their fields mean is told there."""

import ctypes

POINTER, LONG = ctypes.c_void_p, ctypes.c_long

CHANNELS_MULTIPLE = 16
"""Channels of a head, and numbers of a row, have to be a multiple of this, which fills the registers of every processor."""


class Linear(ctypes.Structure):
    """A matrix product's weights."""

    _fields_ = (*[(name, POINTER) for name in ("weight", "scale", "bias", "excess")], *[(name, LONG) for name in ("inputs", "outputs", "kind")])


class Rounded(ctypes.Structure):
    """Room for rounded rows."""

    _fields_ = (("rows", POINTER), ("scale", POINTER))


class Norm(ctypes.Structure):
    """LayerNorm."""

    _fields_ = (("weight", POINTER), ("bias", POINTER))


class Model(ctypes.Structure):
    """What encoder and decoder have in common."""

    _fields_ = (
        *[(name, LONG) for name in ("num_layers", "heads", "channels", "activation", "is_half")],
        ("epsilon", ctypes.c_float),
        ("first_norm", Norm),
        ("embedding", POINTER),
        ("embedding_scale", POINTER),
    )


class Room(ctypes.Structure):
    """Room for the numbers of some rows."""

    _fields_ = (*[(name, POINTER) for name in ("x", "y", "heads", "scores", "wide")], ("rounded", Rounded))


class EncoderLayer(ctypes.Structure):
    """A layer of the encoder."""

    _fields_ = (*[(name, Linear) for name in ("self_in", "self_out", "hidden_in", "hidden_out")], ("norms", Norm * 2))


class Encoder(ctypes.Structure):
    """The encoder, with the projections of its output."""

    _fields_ = (("model", Model), ("layers", POINTER), ("sources", POINTER), ("num_sources", LONG))


class DecoderLayer(ctypes.Structure):
    """A layer of the decoder."""

    _fields_ = (
        *[(name, Linear) for name in ("self_in", "self_out", "cross_query", "cross_out", "hidden_in", "hidden_out")],
        ("norms", Norm * 3),
    )


class Decoder(ctypes.Structure):
    """The decoder, with the projection to the vocabulary."""

    _fields_ = (("model", Model), ("layers", POINTER), ("output", Linear), ("vocab_size", LONG))


class Best(ctypes.Structure):
    """The best pieces of each row so far."""

    _fields_ = (
        ("forbidden", POINTER),
        ("num_forbidden", LONG),
        ("count", LONG),
        *[(name, POINTER) for name in ("forced", "highest", "sum", "value", "piece")],
    )


class Step(ctypes.Structure):
    """A batch of sentences under search, at one step."""

    _fields_ = (
        ("num_rows", LONG),
        ("num_steps", LONG),
        *[(name, POINTER) for name in ("tokens", "position", "kv", "rows_of_step", "ancestor")],
        ("ancestor_ld", LONG),
        *[(name, POINTER) for name in ("keys", "values", "start", "count")],
        ("best", Best),
        ("room", Room),
        ("pointers", POINTER),
    )


IN_ORDER = (Linear, Rounded, Norm, Model, Room, EncoderLayer, Encoder, DecoderLayer, Decoder, Best, Step)
"""As `struct_size` of `kernels.c` numbers them."""
