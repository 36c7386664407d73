import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtkit.checkpoint.layout import read_tensor_header
from mtkit.errors import ArtefactError


def test_names_types_and_shapes_are_read_without_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros((2, 3), dtype=np.float32), "b": np.zeros((), dtype=np.float16)}, path, metadata={"format": "pt"})
    header = read_tensor_header(path)
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {"a": ("F32", [2, 3]), "b": ("F16", [])}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"1234567", id="shorter than the length"),
        pytest.param(struct.pack("<Q", 1 << 60) + b"{}", id="length beyond the file"),
        pytest.param(struct.pack("<Q", 2) + b"[]", id="not an object"),
        pytest.param(struct.pack("<Q", 3) + b"{x}", id="not json"),
        pytest.param(struct.pack("<Q", 7) + b'{"a":1}', id="entry is a number"),
        pytest.param(struct.pack("<Q", 21) + b'{"a": {"shape":[-1]}}', id="negative length"),
    ],
)
def test_a_damaged_header_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match="x.safetensors: is "):
        read_tensor_header(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="cannot be read"):
        read_tensor_header(tmp_path / "x.safetensors")
