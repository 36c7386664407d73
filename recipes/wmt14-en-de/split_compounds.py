"""Turn German text into the form in which the paper's scores were computed: Moses tokens, with hyphenated compounds split.

    python split_compounds.py [INPUT [OUTPUT]]

The steps of Tensor2Tensor's `get_ende_bleu.sh`, done by sacremoses: Unicode punctuation becomes ASCII, the Moses tokenizer splits words, and a hyphen
between two characters becomes a token of its own, so that `rich-text` counts as three words. Reference and translation must both go through it.
"""

import re
import sys

from sacremoses import MosesPunctNormalizer, MosesTokenizer

from mtkit.files import STDIO, open_lines, open_output

_HYPHEN = re.compile(r"(\S)-(\S)")


def main(source: str = STDIO, target: str = STDIO) -> None:
    """Write one line for each line read."""
    normalizer, tokenizer = MosesPunctNormalizer(lang="de"), MosesTokenizer(lang="de")
    with open_lines(source) as lines, open_output(target) as output:
        for line in lines:
            tokens = tokenizer.tokenize(normalizer.replace_unicode_punct(line), return_str=True, escape=False)
            output.write(_HYPHEN.sub(r"\1 ##AT##-##AT## \2", tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
