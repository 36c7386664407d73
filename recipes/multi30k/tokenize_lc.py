"""Turn text into the form in which Multi30k scores are published: lower-cased, punctuation normalized, Moses-tokenized.

    python tokenize_lc.py LANGUAGE [INPUT [OUTPUT]]

The same three steps in the same order as the data set's own `scripts/task1-tokenize.sh`, done by sacremoses. Of the raw test2016, test2017
and MSCOCO, English and German, the result is the distributed `.lc.norm.tok` text, byte for byte; a test of this recipe holds that.
"""

import sys

from sacremoses import MosesPunctNormalizer, MosesTokenizer

from mtkit.errors import MTKitError
from mtkit.files import STDIO, open_lines, open_output


def main(language: str, source: str = STDIO, target: str = STDIO) -> None:
    """Write one line for each line read."""
    normalizer, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)
    with open_lines(source) as lines, open_output(target) as output:
        for line in lines:
            # Like the Perl tokenizer, this also writes &amp;, &apos;, &quot; and so on; the distributed references have them.
            output.write(tokenizer.tokenize(normalizer.normalize(line.lower()), return_str=True))


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except MTKitError as error:
        sys.exit(f"error: {error}")
