"""The structs are those of C."""

import ctypes

import pytest

from mtkit.native import library, structs


@pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
@pytest.mark.parametrize("number", range(len(structs.IN_ORDER)))
def test_a_struct_is_as_large_as_in_c(number: int) -> None:
    loaded = library.load()
    assert loaded is not None
    loaded.struct_size.restype, loaded.struct_size.argtypes = ctypes.c_long, (ctypes.c_long,)
    assert ctypes.sizeof(structs.IN_ORDER[number]) == loaded.struct_size(number)
