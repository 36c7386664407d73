"""CTranslate2 as an engine: lines through the same front end as with mtkit's own search, with an export of `mtkit.checkpoint.ctranslate2`.

The model is the same, and so are the candidates of each step of the beam. What CTranslate2 does otherwise:

- It ends a sentence when `beam_size` hypotheses have ended (with `length_penalty` 0: and the best candidate with them). Our own search goes on while
  a live hypothesis can still win, so now and then it finds a better one.
- It ranks what has ended by log-probability / n^alpha, which is our `power` penalty. It returns `beam_size` hypotheses of a sentence, and they are
  ranked anew here, by our penalty and with those that have ended first.
- It leaves forbidden pieces out before the softmax, we after it. So the log-probabilities of its search are higher than ours, by up to 0.02 for a
  sentence of Multi30k. Where scores are wanted, the best hypotheses are scored again over the whole vocabulary; then they are those of our search.

A worker is one thread with one batch at a time: on a CPU, two workers are several times as fast as one with two threads.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtkit.artefacts import MANIFEST_NAME, Manifest, read_manifest, verify_directory
from mtkit.checkpoint.ctranslate2 import COMPUTE_TYPES, WEIGHTS_NAME, import_ctranslate2, pieces_in_order
from mtkit.checkpoint.layout import CONFIG_NAME, EXPORT_KIND, TOKENIZER_NAME
from mtkit.cores import num_threads
from mtkit.data.batching import batches_by_length
from mtkit.data.tokenizer import EOS_ID, Tokenizer
from mtkit.decoding.lines import BATCH_TOKENS, LineTranslator, SearchConfig, Sentence, named_lines
from mtkit.decoding.scoring import length_penalty, refuse_nan
from mtkit.decoding.search import Hypothesis
from mtkit.errors import ArtefactError, ConfigError, MTKitError, ResourceError, UsageError
from mtkit.model.device import InferencePrecisionName

CPU_BATCH_TOKENS = 512
"""Source positions of a batch on a CPU, by default: there, larger batches are slower. On a GPU they are as for our own search."""

_BATCHES_PER_WORKER = 8
"""Batches of a worker that are handed over together, so that few workers wait for the last one."""

_IMPOSSIBLE = -1e30
"""Below this log-probability, a hypothesis contains a piece that was forbidden."""


class CTranslate2Translator(LineTranslator):
    """Translates lines of text with CTranslate2; see `LineTranslator`.

    Args:
        runtime: A `ctranslate2.Translator`.
        tokenizer: The export's.
        search: How to search; `beam` only.
        max_positions: Positions that the export has encodings for. No translation is longer, whatever `search` allows.
        workers: Batches that the runtime works on at the same time.
        exact_scores: Score the best hypotheses again, as our own search would; without it, translating is a little faster.
        batch_tokens: Source positions of a batch, padding included.
        description: What the runtime is, for a person.

    Attributes:
        description: As above.

    Raises:
        UsageError: CTranslate2 cannot search like this.
    """

    takes_prefixes = False

    def __init__(
        self,
        runtime: Any,
        tokenizer: Tokenizer,
        *,
        search: SearchConfig,
        max_positions: int,
        workers: int,
        exact_scores: bool = True,
        batch_tokens: int = CPU_BATCH_TOKENS,
        description: str = "CTranslate2",
    ) -> None:
        if search.method != "beam":
            raise UsageError(
                "--sample does not go with --engine ct2: CTranslate2 has no random numbers of its own for each line",
                hint="Leave out --engine ct2 and give the model that was exported.",
            )
        if search.max_source_length >= max_positions:
            raise ConfigError(
                f"max_source_length must be below {max_positions} with --engine ct2, but is {search.max_source_length}",
                hint="The export has no encodings for later positions.",
            )
        super().__init__(tokenizer, search=search, batch_tokens=batch_tokens * workers * _BATCHES_PER_WORKER, description=description)
        self._runtime = runtime
        self._worker_tokens = batch_tokens
        self._max_length = max_positions - 1  # BOS takes a position too
        self._exact_scores = exact_scores
        self._src_pieces = pieces_in_order(tokenizer, "src")
        self._tgt_pieces = pieces_in_order(tokenizer, "tgt")
        self._tgt_ids = {piece: index for index, piece in enumerate(self._tgt_pieces)}
        self._options = {
            "beam_size": search.beam_size,
            "length_penalty": search.length_penalty,
            "num_hypotheses": search.beam_size,
            "suppress_sequences": [[piece] for piece in tokenizer.pieces(self._forbidden_ids, "tgt")],
            "return_end_token": True,
            "return_scores": True,
            "max_input_length": 0,  # they are cut already
        }

    def _search(self, batch: Sequence[Sentence]) -> list[list[Hypothesis]]:
        """The hypotheses of so many sentences that every worker has several batches of them."""
        sources = [sentence.source for sentence in batch]
        caps = [min(self.search.max_length(len(ids)), self._max_length) for ids in sources]
        batches = batches_by_length([len(ids) + 1 for ids in sources], max_tokens=self._worker_tokens)
        try:
            found = self._run(sources, batches, caps)
            # A batch is searched up to its largest cap. A sentence that went beyond its own is searched again, with those of the same cap.
            late = [index for index, hypotheses in found.items() if any(len(entry.tokens) + entry.finished > caps[index] for entry in hypotheses)]
            found |= self._run(sources, [[index for index in late if caps[index] == cap] for cap in {caps[index] for index in late}], caps)
            best = [_ranked(found[index])[: self.search.n_best] for index in range(len(sources))]
            return self._scored_again(sources, best) if self._exact_scores else best
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise MTKitError(f"{named_lines(batch)}: CTranslate2 failed: {error}") from error
            raise ResourceError(
                f"{named_lines(batch)}: CTranslate2 has not enough memory: {error}",
                hint=f"Use smaller batches; now they have {self._worker_tokens} tokens (--batch-tokens).",
            ) from error

    def _run(self, sources: Sequence[Sequence[int]], batches: Sequence[Sequence[int]], caps: Sequence[int]) -> dict[int, list[Hypothesis]]:
        """The hypotheses of the sources with these indices."""
        pending = [
            self._runtime.translate_batch(
                [[self._src_pieces[token] for token in sources[index]] for index in batch],
                max_decoding_length=max(caps[index] for index in batch),
                asynchronous=True,
                **self._options,
            )
            for batch in batches
        ]
        return {
            index: self._hypotheses(result.result())
            for batch, results in zip(batches, pending, strict=True)
            for index, result in zip(batch, results, strict=True)
        }

    def _scored_again(self, sources: Sequence[Sequence[int]], hypotheses: Sequence[Sequence[Hypothesis]]) -> list[list[Hypothesis]]:
        """The same hypotheses, with log-probabilities over the whole vocabulary."""
        scores = iter(
            self._runtime.score_batch(
                [[self._src_pieces[token] for token in ids] for ids, entries in zip(sources, hypotheses, strict=True) for _ in entries],
                [[self._tgt_pieces[token] for token in entry.tokens] for entries in hypotheses for entry in entries],
                max_batch_size=self._worker_tokens,
                batch_type="tokens",
                max_input_length=0,
            )
        )
        return [_ranked([self._with_log_prob(entry, next(scores).log_probs) for entry in entries]) for entries in hypotheses]

    def _with_log_prob(self, hypothesis: Hypothesis, log_probs: Sequence[float]) -> Hypothesis:
        """The hypothesis with the sum of the log-probabilities of its tokens; EOS, the last of them, counts if the hypothesis has ended."""
        num_tokens = len(hypothesis.tokens) + hypothesis.finished
        log_prob = sum(log_probs[:num_tokens])
        score = log_prob / length_penalty(num_tokens, self.search.length_penalty, self.search.penalty)
        return replace(hypothesis, log_prob=log_prob, score=score)

    def _hypotheses(self, result: Any) -> list[Hypothesis]:
        """All that CTranslate2 returned for a sentence, with our length penalty."""
        hypotheses = []
        alpha = self.search.length_penalty
        for pieces, score in zip(result.hypotheses, result.scores, strict=True):
            if math.isnan(score):
                refuse_nan()
            log_prob = score * len(pieces) ** alpha
            if log_prob < _IMPOSSIBLE:
                continue
            tokens = tuple(self._tgt_ids[piece] for piece in pieces)
            is_finished = tokens[-1] == EOS_ID
            hypotheses.append(
                Hypothesis(
                    tokens=tokens[:-1] if is_finished else tokens,
                    score=log_prob / length_penalty(len(tokens), alpha, self.search.penalty),
                    log_prob=log_prob,
                    finished=is_finished,
                )
            )
        return hypotheses


def load_ctranslate2(
    path: Path,
    *,
    search: SearchConfig,
    device: str = "auto",
    precision: InferencePrecisionName = "auto",
    threads: int | None = None,
    exact_scores: bool = True,
    batch_tokens: int | None = None,
) -> tuple[CTranslate2Translator, Tokenizer]:
    """Load an export.

    Args:
        path: A directory that `mtkit export --format ctranslate2` wrote.
        search: How to search.
        device: `auto` (a GPU if CTranslate2 sees one, else the CPU), `cpu`, `cuda` or `cuda:N`.
        precision: `auto` is what the weights are stored in, or the nearest that the device is good at.
        threads: Workers on a CPU; None = as many as torch would take threads.
        exact_scores: Score the best hypotheses again, as our own search would.
        batch_tokens: Source positions of a batch, padding included; None = what suits the device.

    Returns:
        The translator and its tokenizer.

    Raises:
        MTKitError: CTranslate2 is not installed.
        ArtefactError: It is no export, or damaged.
        UsageError: A setting is not possible with CTranslate2 or on this device.
    """
    ctranslate2 = import_ctranslate2()
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{os.fsencode(path)!r}: CTranslate2 can open only what has a name in UTF-8", hint="Rename it, or make a link to it."
        ) from error
    manifest = _verify_export(path)
    tokenizer = Tokenizer.read_files(path / TOKENIZER_NAME)
    if tokenizer.fingerprint != manifest.config.get("tokenizer"):
        raise ArtefactError(f"{path}: its tokenizer is not the one that it was exported with", hint="Copy the whole directory anew.")
    kind, index = _resolve_place(device, num_gpus=ctranslate2.get_cuda_device_count())
    workers = (threads or num_threads()) if kind == "cpu" else 1
    try:
        runtime = ctranslate2.Translator(
            str(path),
            device=kind,
            device_index=index,
            compute_type=COMPUTE_TYPES.get(precision, "default"),
            inter_threads=workers,
            intra_threads=1,
        )
    except ValueError as error:
        raise UsageError(f"--precision {precision} does not go with --engine ct2 on {kind}: {error}", hint="Use --precision auto.") from error
    except RuntimeError as error:
        raise ArtefactError(f"{path}: CTranslate2 cannot load it: {error}") from error
    translator = CTranslate2Translator(
        runtime,
        tokenizer,
        search=search,
        max_positions=int(manifest.config["max_positions"]),
        workers=workers,
        exact_scores=exact_scores,
        batch_tokens=batch_tokens or (CPU_BATCH_TOKENS if kind == "cpu" else BATCH_TOKENS),
        description=f"CTranslate2 {ctranslate2.__version__} on {kind}, {runtime.compute_type}, {workers} at a time",
    )
    return translator, tokenizer


def _ranked(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The best first; those that have ended before those that have not."""
    return sorted(hypotheses, key=lambda entry: (not entry.finished, -entry.score))


def _verify_export(path: Path) -> Manifest:
    """The manifest of an export that is whole."""
    kind = read_manifest(path).kind if (path / MANIFEST_NAME).is_file() else None
    if kind != EXPORT_KIND:
        what = f"is of kind {kind}" if kind else f"has no {MANIFEST_NAME}" if path.exists() else "does not exist"
        raise ArtefactError(
            f"{path}: {what}, and --engine ct2 needs an export for CTranslate2",
            hint="Make one with `mtkit export MODEL --format ctranslate2 --output DIR`, or leave out --engine ct2 to use a model of mtkit.",
        )
    manifest = verify_directory(path, kind=EXPORT_KIND, level="full")
    missing = {WEIGHTS_NAME, CONFIG_NAME} - manifest.files.keys()
    if missing or not isinstance(manifest.config.get("max_positions"), int):
        raise ArtefactError(f"{path}: its manifest lacks {', '.join(sorted(missing)) or 'max_positions'}")
    return manifest


def _resolve_place(name: str, *, num_gpus: int) -> tuple[str, int]:
    """`cpu` or `cuda`, and the number of the GPU. Torch is not asked: it may be built without CUDA where CTranslate2 is not."""
    kind, colon, number = name.partition(":")
    if name == "auto":
        return ("cuda" if num_gpus else "cpu"), 0
    if name == "cpu":
        return "cpu", 0
    if kind != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise UsageError(f"device must be auto, cpu, cuda or cuda:N, but is {name!r}")
    if int(number or 0) >= num_gpus:
        raise UsageError(f"device {name} is not there: CTranslate2 sees {num_gpus} GPUs", hint="Use --device cpu.")
    return "cuda", int(number or 0)
