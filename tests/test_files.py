"""Text lines and atomic writes, against raw bytes and a file system that fails."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit import files
from mtkit.errors import ArtefactError, DataError, MTKitError, ResourceError
from mtkit.files import (
    LineReader,
    LineWriter,
    atomic_file,
    is_blank,
    one_line,
    open_bytes,
    open_lines,
    open_output,
    read_json,
    read_lines,
    write_json,
)

NOT_LINE_BREAKS = "a\u2028b\x85c\vd\fe\x1cf\x1dg\x1eh\u2029i"
"""What str.splitlines() would cut into nine pieces."""

text_bytes = st.lists(
    st.one_of(
        st.binary(max_size=8),
        st.sampled_from([b"\n", b"\r", b"\r\n", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xc2\x85", b"\x0b", b"\x0c", b"\x1c", b"\x00", b"\xed\xa0\x80"]),
    ),
    max_size=12,
).map(b"".join)


def lines_of(data: bytes) -> list[str]:
    return list(LineReader(io.BytesIO(data), name="test"))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- lines ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\n\n", ["", ""]),
        (b"x\ry\nz\n", ["x y", "z"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\r\n", ["a "]),
        (b"\r\n", [""]),
        (NOT_LINE_BREAKS.encode() + b"\n", [NOT_LINE_BREAKS]),
        (b"\xef\xbb\xbfHello\n\xef\xbb\xbfHello\n", ["Hello", "Hello"]),
        (b"caf\xe9\n", ["caf\ufffd"]),
        (b"\xed\xa0\x80\n", ["\ufffd\ufffd\ufffd"]),
        (b"a\x00b\tc\x1b[0m\n", ["a\x00b\tc\x1b[0m"]),
        (" a\u00a0b\u3000 \n".encode(), [" a\u00a0b\u3000 "]),
    ],
)
def test_lines_by_example(data: bytes, expected: list[str]) -> None:
    assert lines_of(data) == expected


@given(text_bytes)
def test_a_line_ends_at_lf_and_nowhere_else(data: bytes) -> None:
    lines = lines_of(data)

    assert len(lines) == data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    assert not any(set(line) & {"\n", "\r", "\ufeff"} for line in lines)


@given(text_bytes)
def test_bad_utf8_is_replaced_and_counted(data: bytes) -> None:
    reader = LineReader(io.BytesIO(data), name="test")
    lines = list(reader)

    def is_bad(raw: bytes) -> bool:
        try:
            raw.decode()
        except UnicodeDecodeError:
            return True
        return False

    assert reader.num_bad_utf8 == sum(is_bad(raw) for raw in data.split(b"\n"))
    assert reader.num_lines == len(lines)
    for line in lines:
        line.encode()  # no lone surrogates


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\n\r\ufeff", exclude_categories=["Cs"]))))
def test_what_is_written_is_read(lines: list[str]) -> None:
    stream = io.BytesIO()
    writer = LineWriter(stream)
    for line in lines:
        writer.write(line)

    assert lines_of(stream.getvalue()) == lines


@given(text_bytes.filter(lambda data: not data.startswith(b"\x1f\x8b")))
def test_a_plain_and_a_gzip_file_give_the_same_lines(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        plain, packed = Path(directory, "plain.gz"), Path(directory, "packed.txt")  # the names do not decide
        plain.write_bytes(data)
        packed.write_bytes(gzip.compress(data))

        assert read_lines(plain) == read_lines(packed) == lines_of(data)


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}])
def test_stdin_and_stdout_follow_the_same_rules_in_any_locale(locale: dict[str, str]) -> None:
    data = b"\xef\xbb\xbfx\ry\r\ncaf\xe9\n" + f"{NOT_LINE_BREAKS}ü\n\nlast".encode()
    script = "from mtkit.files import *\nwith open_lines('-') as lines, open_output('-') as output:\n    [output.write(line) for line in lines]"

    result = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, env={**os.environ, **locale}, check=True)

    assert result.stdout.decode().split("\n") == [*lines_of(data), ""]


def test_a_line_of_stdin_is_handed_over_before_the_next_one_comes() -> None:
    script = "import sys\nfrom mtkit.files import *\nwith open_lines('-') as lines:\n    [print(line.upper(), flush=True) for line in lines]"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for word in (b"one", b"two", b"three"):
            process.stdin.write(word + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == word.upper() + b"\n"


def test_gzip_members_one_after_another_are_one_text(tmp_path: Path) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"a\nb") + gzip.compress(b"c\nd\n") + gzip.compress(b""))

    assert read_lines(path) == ["a", "bc", "d"]


def damaged_gzip(kind: str) -> bytes:
    packed = bytearray(gzip.compress(os.urandom(50_000).hex().encode() + b"\n"))
    match kind:
        case "truncated":
            return bytes(packed[:-1000])
        case "no trailer":
            return bytes(packed[:-8])
        case "header only":
            return bytes(packed[:10])
        case "wrong checksum":
            packed[-5] ^= 1
        case "wrong data":
            packed[100:200] = b"\xff" * 100
        case "garbage after it":
            packed += b"garbage"
    return bytes(packed)


@pytest.mark.parametrize("kind", ["truncated", "no trailer", "header only", "wrong checksum", "wrong data", "garbage after it"])
def test_a_damaged_gzip_file_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "text.gz"
    path.write_bytes(damaged_gzip(kind))

    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}:\d+: reading failed"):
        read_lines(path)


@pytest.mark.parametrize("opener", [open_lines, open_bytes])
def test_a_file_that_cannot_be_read(tmp_path: Path, opener: Any) -> None:
    with pytest.raises(DataError, match="missing.en: cannot be read: No such file or directory"), opener(tmp_path / "missing.en"):
        pass
    with pytest.raises(DataError, match="cannot be read: Is a directory"), opener(tmp_path):
        pass


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (gzip.compress(gzip.compress(b"a\n")), "packed with gzip"),
        (bz2.compress(b"a\n"), "packed with bzip2"),
        (lzma.compress(b"a\n"), "packed with xz"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "packed with zstd"),
        (b"PK\x03\x04\x14\0", "packed with zip"),
        ("ein Satz\n".encode("utf-16"), "UTF-16"),
        ("\ufeffein Satz\n".encode("utf-16-be"), "UTF-16"),
    ],
    ids=["gzip", "bzip2", "xz", "zstd", "zip", "utf-16", "utf-16-be"],  # gzip's header holds the time: no name for a test
)
def test_what_is_no_text_is_refused_and_not_read_as_noise(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"^{path}: is {what}") as caught:
        read_lines(path)
    assert caught.value.hint is not None


def test_stdin_that_is_packed_is_refused_at_its_first_line() -> None:
    with pytest.raises(DataError, match="^stdin: is packed with gzip"):
        next(LineReader(io.BytesIO(gzip.compress(b"a\n")), name="stdin"))
    later = LineReader(io.BytesIO(b"a\n" + gzip.compress(b"a\n")), name="stdin")
    assert next(later) == "a"
    assert list(later)


def test_reading_that_fails_on_the_way_names_the_line() -> None:
    class Failing(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            if not line:
                raise OSError(errno.EIO, "Input/output error")
            return line

    reader = LineReader(Failing(b"a\nb\n"), name="a.en")

    assert [next(reader), next(reader)] == ["a", "b"]
    with pytest.raises(DataError, match="a.en:3: reading failed: .*Input/output error"):
        next(reader)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_line_of_just_the_largest_size_is_whole(monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 8)
    reader = LineReader(io.BytesIO(b"1234567\n12345678" + end), name="test")

    assert list(reader) == ["1234567", "12345678"]
    assert reader.num_cut == 0


@given(st.text(alphabet="aé€😀", min_size=1, max_size=20), st.integers(8, 12))
def test_an_over_long_line_is_cut_between_characters(text: str, limit: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(files, "MAX_LINE_BYTES", limit)
        reader = LineReader(io.BytesIO(f"{text}\nnext\n".encode()), name="test")
        lines = list(reader)

    assert lines[1:] == ["next"]
    assert text.startswith(lines[0])
    assert limit - 4 < len(lines[0].encode()) <= limit or lines[0] == text
    assert reader.num_cut == (lines[0] != text)
    assert reader.num_bad_utf8 == 0


def test_a_cut_does_not_hide_bad_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 8)
    reader = LineReader(io.BytesIO(b"ab\xffcdefghij\n"), name="test")

    assert list(reader) == ["ab\ufffdcdefg"[:8]]
    assert (reader.num_cut, reader.num_bad_utf8) == (1, 1)


@given(st.lists(st.binary(max_size=12), max_size=8).map(b"\n".join), st.integers(0, 9))
def test_skipped_lines_are_those_that_would_have_been_read(data: bytes, count: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "MAX_LINE_BYTES", 6)
        lines = lines_of(data)
        reader = LineReader(io.BytesIO(data), name="test")
        assert reader.skip(count) == min(count, len(lines))
        assert (reader.num_lines, reader.num_bad_utf8) == (min(count, len(lines)), 0)
        assert list(reader) == lines[count:]


def test_memory_does_not_grow_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 16)
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for _ in range(64):
            stream.write(b"x" * (1 << 20))

    with open_lines(path) as lines:
        tracemalloc.start()
        assert len(next(lines)) == 1 << 16
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert next(lines, None) is None
    assert lines.num_cut == 1
    assert peak < 4 << 20


# --- writing text ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " \t\u3000\xa0", "\u200b", "\xad", "\x00\x1b", "\u200e \u202b\u202c", "\u2060\ufeff"])
def test_what_shows_nothing_is_blank(text: str) -> None:
    assert is_blank(text)
    assert not is_blank(f"{text}.{text}")


def test_what_shows_something_is_not_blank() -> None:
    assert not any(map(is_blank, ["a", ".", "\u0301", "\ufffd", "\u2581", "\U0001f600", "\u0646\u200c"]))


def test_one_line() -> None:
    assert one_line("a\nb\rc") == "a b c"
    assert one_line(NOT_LINE_BREAKS) == "a b c d e f g h i"


@given(st.text())
def test_one_line_is_one_line_for_every_reader(text: str) -> None:
    line = one_line(text)

    assert len(line.splitlines()) == (line != "")
    assert len(line) == len(text)


def test_a_writer_refuses_a_line_break_and_replaces_surrogates() -> None:
    stream = io.BytesIO()
    writer = LineWriter(stream)
    writer.write("lone \ud800 pair \ud83d\ude00")

    assert stream.getvalue().decode() == "lone \ufffd pair 😀\n"
    with pytest.raises(ValueError, match="must not hold a line break"):
        writer.write("a\nb")


def test_output_appears_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.de"
    with open_output(path) as output:
        output.write("ä")
        output.flush()
        assert not path.exists()
    assert path.read_bytes() == "ä\n".encode()


# --- atomic files ---------------------------------------------------------------------------------------------------------------------


def test_output_is_packed_if_its_name_says_so(tmp_path: Path) -> None:
    data = []
    for name in ("a.gz", "b.gz"):
        with open_output(tmp_path / name) as output:
            output.write("x")
            output.flush()
            output.write("y")
        data.append((tmp_path / name).read_bytes())
    assert gzip.decompress(data[0]) == b"x\ny\n"
    assert data[0] == data[1]


def test_an_error_leaves_the_old_bytes_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.de"
    path.write_bytes(b"old")

    def fail() -> None:
        with atomic_file(path) as stream:
            stream.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.de"]


@pytest.mark.parametrize("existing_mode", [None, 0o600])
def test_the_mode_is_that_of_the_file_before_or_of_the_umask(tmp_path: Path, umask: int, existing_mode: int | None) -> None:
    path = tmp_path / "out.de"
    if existing_mode is not None:
        path.touch(mode=existing_mode)
    with atomic_file(path) as stream:
        stream.write(b"new")

    assert mode_of(path) == (0o666 & ~umask if existing_mode is None else existing_mode & ~umask)


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_is_followed(tmp_path: Path, exists: bool) -> None:
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    target.parent.mkdir()
    if exists:
        target.write_bytes(b"old")
    link.symlink_to(target)
    with atomic_file(link) as stream:
        stream.write(b"new")

    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert not target.is_symlink()


def test_a_named_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # open before the writer comes, so that neither waits
    try:
        with atomic_file(pipe) as stream:
            stream.write(b"new")
        assert os.read(reader, 100) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, operations: list[str]) -> None:
    directory = tmp_path / "directory"
    with atomic_file(directory / "a.txt") as stream:
        stream.write(b"new")

    assert operations == [f"fsync {tmp_path.name}", "fsync TEMPORARY a.txt", "rename TEMPORARY a.txt -> a.txt", "fsync directory"]


def test_directories_that_are_made_are_on_disk(tmp_path: Path, operations: list[str]) -> None:
    files.make_directory(tmp_path / "a" / "b")
    files.make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert operations == [f"fsync {tmp_path.name}", "fsync a"]


def test_writing_does_not_begin_where_the_space_is_too_small(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    files.require_space(tmp_path, free // 2)
    with pytest.raises(ResourceError, match=r"needs .* MB for what is to be written, and .* MB are free"):
        files.require_space(tmp_path, free)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_out_of_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path = tmp_path / "out.de"
    path.write_bytes(b"old")

    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ResourceError, match=f"out.de: cannot be written: {os.strerror(number)}"), atomic_file(path) as stream:
        stream.write(b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out.de"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "out.de", tmp_path):
        with pytest.raises(MTKitError, match=f"{place.name}: cannot be written: (Not|Is) a directory"), atomic_file(place):
            pass


def test_another_file_that_fails_in_the_block_is_named(tmp_path: Path) -> None:
    with pytest.raises(MTKitError, match=r"out.de: cannot be written: No such file or directory \(.*other.en\)"), atomic_file(tmp_path / "out.de"):
        (tmp_path / "other.en").read_bytes()


def test_a_reader_that_has_gone_is_no_fault_of_the_place(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), atomic_file(tmp_path / "out.de"):
        raise BrokenPipeError


FULL_DISK_SCRIPT = """
import os, sys
from pathlib import Path
from mtkit.errors import ResourceError
from mtkit.artefacts import atomic_directory
from mtkit.files import atomic_file

disk = Path(sys.argv[1])
with atomic_file(disk / "file") as stream:
    stream.write(b"old" * 100_000)
with atomic_directory(disk / "artefact", kind="model") as directory:
    (directory / "weights").write_bytes(b"old" * 100_000)
before = sorted(os.listdir(disk))
for attempt in ("file", "directory", "overwrite"):
    try:
        if attempt == "file":
            with atomic_file(disk / "file") as stream:
                stream.write(b"new" * 1_000_000)
        else:
            with atomic_directory(disk / ("other" if attempt == "directory" else "artefact"), kind="model", overwrite=True) as directory:
                (directory / "weights").write_bytes(b"new" * 1_000_000)
    except ResourceError as error:
        assert "No space left on device" in error.message, error.message
    else:
        raise AssertionError(f"{attempt}: the disk was not full")
assert sorted(os.listdir(disk)) == before
assert (disk / "file").read_bytes() == b"old" * 100_000
assert (disk / "artefact" / "weights").read_bytes() == b"old" * 100_000
print("held")
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    isolated = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    commands = 'mount -t tmpfs -o size=2m none "$1" && exec "$2" -c "$3" "$1"'

    result = subprocess.run([*isolated, "sh", "-c", commands, "sh", tmp_path, sys.executable, FULL_DISK_SCRIPT], capture_output=True, check=False)

    assert (result.stdout, result.returncode) == (b"held\n", 0), result.stderr.decode()


# --- JSON -----------------------------------------------------------------------------------------------------------------------------


def test_json_round_trip(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None, True], "a": {"ü": "\u2028"}}
    write_json(tmp_path / "a.json", value)

    assert read_json(tmp_path / "a.json") == value
    assert (tmp_path / "a.json").read_bytes().startswith(b'{\n  "a"')


def test_json_of_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    """B15: valid JSON in valid UTF-8, and the name comes back."""
    name = os.fsdecode(b"caf\xe9.en")
    write_json(tmp_path / "a.json", {name: [name]})

    assert read_json(tmp_path / "a.json") == {name: [name]}
    assert json.loads((tmp_path / "a.json").read_bytes().decode("utf-8")) == {name: [name]}


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"{} {}"])
def test_json_that_is_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)

    with pytest.raises(ArtefactError, match=r"a.json: is not valid JSON"):
        read_json(path)


def test_json_that_is_missing_or_huge(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="a.json: cannot be read: No such file"):
        read_json(tmp_path / "a.json")
    with open(tmp_path / "a.json", "wb") as stream:
        stream.truncate(files.MAX_JSON_BYTES + 1)  # a hole: takes no space
    with pytest.raises(ArtefactError, match="bytes are too many"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("number", ["1e999", "-Infinity", "NaN"])
def test_numbers_that_are_not_finite_are_no_json(tmp_path: Path, number: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(f'{{"size": {number}}}')
    with pytest.raises(ArtefactError, match="is not a finite number"):
        read_json(path)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_what_is_open_already_is_written_to_from_where_it_stands(tmp_path: Path, name: str) -> None:
    if not Path(name).exists():
        pytest.skip(f"there is no {name} here")
    path = tmp_path / "out"
    path.write_text("before\n")
    code = f"from pathlib import Path\nfrom mtkit.files import open_output\nwith open_output({name!r}) as output:\n    output.write('new')"
    with open(path, "ab") as stream:
        subprocess.run([sys.executable, "-c", code], stdout=stream, check=True)
    assert path.read_text() == "before\nnew\n"


def test_a_directory_is_made_where_a_link_to_nowhere_points(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "place")
    files.make_directory(tmp_path / "link" / "run")
    assert (tmp_path / "disk" / "place" / "run").is_dir()
    files.make_directory(tmp_path / "link")


def test_a_mounted_file_that_cannot_be_replaced_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bound").write_bytes(b"old and longer")
    inode = (tmp_path / "bound").stat().st_ino

    def replace(_old: Path, _new: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", replace)
    with atomic_file(tmp_path / "bound") as stream:
        stream.write(b"new")
    assert (tmp_path / "bound").read_bytes() == b"new"
    assert (tmp_path / "bound").stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["bound"]
