"""Print the lines of both sides of a corpus, for `mtkit tokenizer train -`.

    python lines.py CORPUS...

CORPUS is what `mtkit preprocess --train` takes, for example parquet files with {"translation": {"de": ..., "en": ...}} records.
"""

import sys

from mtkit.data.corpus import parse_corpus
from mtkit.errors import MTKitError
from mtkit.files import STDIO, open_output


def main(*specs: str) -> None:
    """Write each source line and its target line, one below the other."""
    try:
        with open_output(STDIO) as output:
            for pair in parse_corpus(specs, src_lang="en", tgt_lang="de").pairs():
                for line in pair:
                    output.write(line)
    except MTKitError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main(*sys.argv[1:])
