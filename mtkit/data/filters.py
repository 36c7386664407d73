"""Which pairs are unfit for training, and why.

A pair is dropped for the first reason that holds, in the order of `REASONS`, so the counts add up: read = kept + all dropped. The first three
look at the text, the next ones at the tokens, and only pairs that have passed all of these are compared for duplicates.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtkit.errors import ConfigError
from mtkit.files import is_blank

EMPTY = "empty"
IDENTICAL = "identical"
NONPRINTING = "nonprinting"
TOO_LONG = "too_long"
LENGTH_RATIO = "length_ratio"
DUPLICATE = "duplicate"
REASONS = (EMPTY, IDENTICAL, NONPRINTING, TOO_LONG, LENGTH_RATIO, DUPLICATE)
_SETTINGS = {
    IDENTICAL: "drop_identical",
    NONPRINTING: "max_nonprinting_share",
    TOO_LONG: "max_length",
    LENGTH_RATIO: "max_length_ratio",
    DUPLICATE: "drop_duplicates",
}

# Controls that are not white space, surrogates, private use, and the replacement character. Format characters (category Cf) are not among them:
# ZWNJ, ZWJ and direction marks belong to the spelling of Persian, Indic and Hebrew text and of emoji. Nor are unassigned code points, whose set
# differs between versions of Python.
_NONPRINTING = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ud800-\udfff\ue000-\uf8ff\ufffd\U000f0000-\U0010ffff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """What makes a training pair unfit. Pairs with an empty side are always dropped. Dev and test sets are not filtered, but validation leaves out
    such pairs."""

    max_length: int | None = 250
    """Tokens that either side may have, without EOS; at least 1. None: any number."""

    max_length_ratio: float | None = 9.0
    """How many times as many tokens as its partner a side may have; at least 1. The default is that of Moses' `clean-corpus-n`. None: any."""

    max_nonprinting_share: float | None = 0.25
    """Share of a side's characters that may be controls, private-use or replacement characters; 0 to 1. None: any."""

    drop_identical: bool = False
    """Drop pairs whose two sides are the same text. Off, because names and numbers translate to themselves."""

    drop_duplicates: bool = False
    """Keep only the first of equal pairs; costs about 24 bytes of memory per pair. Off, so that a corpus can be repeated to weigh it more."""

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length must be at least 1, but is {self.max_length}")
        if self.max_length_ratio is not None and self.max_length_ratio < 1:
            raise ConfigError(f"max_length_ratio must be at least 1, but is {self.max_length_ratio}")
        if self.max_nonprinting_share is not None and not 0 <= self.max_nonprinting_share <= 1:
            raise ConfigError(f"max_nonprinting_share must be between 0 and 1, but is {self.max_nonprinting_share}")

    def active_reasons(self) -> tuple[str, ...]:
        """The reasons for which this config may drop a pair, in order."""
        is_on = {
            EMPTY: True,
            IDENTICAL: self.drop_identical,
            NONPRINTING: self.max_nonprinting_share is not None,
            TOO_LONG: self.max_length is not None,
            LENGTH_RATIO: self.max_length_ratio is not None,
            DUPLICATE: self.drop_duplicates,
        }
        return tuple(reason for reason in REASONS if is_on[reason])


def describe_drops(dropped: Mapping[str, int]) -> tuple[str, str]:
    """Why no pair was left, and what to do about it.

    Args:
        dropped: Reason -> number of pairs dropped for it; at least one of them is above 0.
    """
    counts = ", ".join(f"{reason} {number}" for reason, number in dropped.items() if number)
    setting = _SETTINGS.get(max(dropped, key=dropped.__getitem__))
    hint = "Look at the text" + (f"; what dropped most is the setting filters.{setting}." if setting else ": is one of its sides blank?")
    return counts, hint


def text_reason(src: str, tgt: str, config: FilterConfig) -> str | None:
    """Why the text of a pair is unfit, or None."""
    if is_blank(src) or is_blank(tgt):
        return EMPTY
    if config.drop_identical and src.strip() == tgt.strip():
        return IDENTICAL
    limit = config.max_nonprinting_share
    if limit is not None and (nonprinting_share(src) > limit or nonprinting_share(tgt) > limit):
        return NONPRINTING
    return None


def nonprinting_share(text: str) -> float:
    """Share of the characters of a text that are no writing: controls other than white space, private use, U+FFFD, surrogates."""
    if text.isprintable() and "\ufffd" not in text:  # tells most lines apart many times faster than the search
        return 0.0
    return len(_NONPRINTING.findall(text)) / len(text)


def token_reasons(src_lengths_N: NDArray[np.int32], tgt_lengths_N: NDArray[np.int32], config: FilterConfig) -> dict[str, NDArray[np.bool_]]:
    """For each reason that looks at tokens, which pairs it holds for and none before it does.

    Args:
        src_lengths_N: Tokens of the source sides, without EOS.
        tgt_lengths_N: Tokens of the target sides, without EOS.
        config: The limits.
    """
    shorter_N = np.minimum(src_lengths_N, tgt_lengths_N)
    longer_N = np.maximum(src_lengths_N, tgt_lengths_N)
    masks = {EMPTY: shorter_N == 0}
    if config.max_length is not None:
        masks[TOO_LONG] = longer_N > config.max_length
    if config.max_length_ratio is not None:
        masks[LENGTH_RATIO] = longer_N > config.max_length_ratio * shorter_N
    is_dropped_N = np.zeros(len(src_lengths_N), dtype=np.bool_)
    for reason, mask_N in masks.items():
        masks[reason] = mask_N & ~is_dropped_N
        is_dropped_N |= mask_N
    return masks


def hash_pairs(pairs: Sequence[tuple[str, str]]) -> NDArray[np.uint64]:
    """A 64-bit hash of each pair's text without outer white space.

    Among 40 million different pairs, the odds that any two share a hash are 1 to 20,000.
    """
    digests = [hashlib.blake2b(f"{src.strip()}\n{tgt.strip()}".encode(), digest_size=8).digest() for src, tgt in pairs]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


class SeenHashes:
    """The set of hashes seen so far, in 8 bytes each (up to 28 while two parts are merged).

    It is a list of sorted arrays, each more than twice as long as the next, so that a hash takes part in few merges and a lookup is a binary
    search in each of a few arrays.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def add(self, hashes_N: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add hashes, and tell for each whether it was new: neither seen before nor earlier among these."""
        values, first = np.unique(hashes_N, return_index=True)
        is_known = np.zeros(len(values), dtype=np.bool_)
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, values), len(run) - 1)
            is_known |= run[place] == values
        is_new_N = np.zeros(len(hashes_N), dtype=np.bool_)
        is_new_N[first[~is_known]] = True
        self._push(values[~is_known])
        return is_new_N

    def _push(self, run: NDArray[np.uint64]) -> None:
        if not len(run):
            return
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")  # merges sorted parts in linear time
        self._runs.append(run)
