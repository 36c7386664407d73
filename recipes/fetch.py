"""Download one file, check it against a list of sha256 sums, and only then give it its name.

    python fetch.py URL OUTPUT --sums SHA256SUMS

A file whose URL ends in .gz is unpacked; the sum is that of OUTPUT, which the list names without its directory (the format of `sha256sum`).
"""

import argparse
import contextlib
import gzip
import hashlib
import shutil
import sys
import urllib.request
import zlib
from pathlib import Path


def main() -> None:
    """Read the arguments and fetch."""
    parser = argparse.ArgumentParser(description="Download a file and check its sha256.")
    parser.add_argument("url")
    parser.add_argument("output", type=Path)
    parser.add_argument("--sums", type=Path, required=True, help="list of sums in the format of sha256sum")
    arguments = parser.parse_args()
    try:
        fetch(arguments.url, arguments.output, expected=read_sum(arguments.sums, arguments.output.name))
    except (OSError, EOFError, ValueError, zlib.error) as error:  # urllib's errors are OSErrors
        sys.exit(f"error: {arguments.url}: {error}")


def read_sum(path: Path, name: str) -> str:
    """The sha256 that a list gives for a name.

    Raises:
        ValueError: The list does not have the name.
    """
    for line in path.read_text(encoding="utf-8").split("\n"):
        digest, _, listed = line.partition("  ")
        if listed == name:
            return digest
    raise ValueError(f"{path} has no sum for {name}")


def fetch(url: str, output: Path, *, expected: str) -> None:
    """Download `url` to `output`, which appears only when its sha256 is the expected one.

    Raises:
        OSError: The file cannot be downloaded or written.
        EOFError: The gzip file is cut off.
        zlib.error: The gzip file is damaged.
        ValueError: The sum differs.
    """
    print(f"downloading {url}", file=sys.stderr, flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f"{output.name}.part")
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(urllib.request.urlopen(url, timeout=60))
        if url.endswith(".gz"):
            source = stack.enter_context(gzip.open(source))
        shutil.copyfileobj(source, stack.enter_context(open(part, "wb")), length=1 << 20)
    with open(part, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != expected:
        raise ValueError(f"has the sha256 {digest}, but must have {expected}; it is kept as {part}")
    part.replace(output)


if __name__ == "__main__":
    main()
