"""Prints a few sources with their reference and their translation."""

import sys

from mtkit.files import read_lines

NUM_SHOWN = 6


def main() -> None:
    """Show every so many-th line of three files of equal length: source, reference, translation."""
    src, ref, hyp = (read_lines(path) for path in sys.argv[1:4])
    step = max(1, len(src) // NUM_SHOWN)
    for index in range(0, min(len(src), step * NUM_SHOWN), step):
        mark = "" if ref[index] == hyp[index] else "   (differs)"
        print(f"\n  source       {src[index]}\n  reference    {ref[index]}\n  translation  {hyp[index]}{mark}")
    same = sum(left == right for left, right in zip(ref, hyp, strict=True))
    print(f"\n{same} of {len(ref)} translations equal the reference word for word.")


if __name__ == "__main__":
    main()
