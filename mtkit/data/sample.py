"""A bounded random sample of the sentences of a corpus, for training a tokenizer on text of any size."""

import hashlib
import random
from collections.abc import Iterator

from mtkit.files import is_blank

MAX_SENTENCE_CHARS = 4096
"""A longer line is cut into sentences of at most so many characters, at a space where there is one."""


class SentenceSample:
    """Keeps a uniform random sample of the sentences that are added to it, in bounded memory.

    Algorithm R (Vitter, "Random sampling with a reservoir", 1985): sentence i replaces a random one of the k kept with probability k / i. What
    is kept depends on the sentences, their order and the seed, and on nothing else.

    Args:
        capacity: How many sentences to keep at most; None keeps all.
        seed: Seed of the sample.

    Attributes:
        sentences: The sample, in no particular order once sentences were replaced.
        num_lines: Non-blank lines added so far.
        num_sentences: Sentences that these were: more where lines had to be cut.
    """

    def __init__(self, *, capacity: int | None, seed: int) -> None:
        self.sentences: list[str] = []
        self.num_lines = 0
        self.num_sentences = 0
        self._capacity = capacity
        self._random = random.Random(seed)

    def add(self, line: str) -> None:
        """Offer a line; a blank one is ignored."""
        if is_blank(line):
            return
        self.num_lines += 1
        if len(line) <= MAX_SENTENCE_CHARS:
            self._offer(line)
        else:
            for sentence in cut_line(line):
                self._offer(sentence)

    def sha256(self) -> str:
        """Hash of the sample, in hex."""
        digest = hashlib.sha256()
        for sentence in self.sentences:
            digest.update(sentence.encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    def _offer(self, sentence: str) -> None:
        self.num_sentences += 1
        if self._capacity is None or len(self.sentences) < self._capacity:
            self.sentences.append(sentence)
            return
        place = self._random.randrange(self.num_sentences)
        if place < self._capacity:
            self.sentences[place] = sentence


def cut_line(line: str, *, limit: int = MAX_SENTENCE_CHARS) -> Iterator[str]:
    """Cut a line into pieces of at most `limit` characters: at the last space that fits, which is dropped, else wherever the limit is."""
    start = 0
    while len(line) - start > limit:
        end = line.rfind(" ", start + 1, start + limit + 1)
        if end < 0:
            end = start + limit
            yield line[start:end]
            start = end
        else:
            yield line[start:end]
            start = end + 1
    yield line[start:]
