"""Translation with one model, or with an ensemble: by the kernels, by torch, or in slots."""

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from mtkit.data.tokenizer import Tokenizer
from mtkit.decoding.engine.rows import RowModel, fits
from mtkit.decoding.engine.slots import SlotSearches
from mtkit.decoding.lines import BATCH_TOKENS, WINDOW_LINES, LineTranslator, SearchConfig, Sentence, named_lines
from mtkit.decoding.prefixes import Prefixes, with_prefixes
from mtkit.decoding.sampling import greedy_search, sample
from mtkit.decoding.search import Hypothesis, beam_search
from mtkit.decoding.steps import in_eval_mode, inference, model_step, pad_sources
from mtkit.errors import ResourceError
from mtkit.model.transformer import Transformer

SMALLEST_SHARE = 8
"""Lines that one of several workers gets at least: with fewer, a step hardly gets cheaper."""

SMALLEST_THREADED_WIDTH = 512
"""Width of a model from which one batch alone is searched faster by several threads."""


class Translator(LineTranslator):
    """Translates lines of text with one model, or with several that share a tokenizer; see `LineTranslator`.

    On a CPU, the search of one model is done by the kernels of `mtkit.native` where there are any and they fit, see `mtkit.decoding.engine.rows`.

    Args:
        models: At least one; several are an ensemble that averages probabilities. They are used without dropout, whatever mode they are in.
        tokenizer: Theirs.
        search: How to search.
        device: Where the models are.
        batch_tokens: Source positions of a batch, padding included.
        window_lines: Lines that are sorted by length together.
        in_slots: Search as `mtkit.decoding.engine.slots` does, for one model and method beam.
        workers: Batches that are searched at the same time, on a CPU; None = one, with the threads that torch has. Each has one thread: products of
            this size gain little from more, and threads that wait for each other at every product are many times slower where other programs run
            too. Few lines are divided among the workers; without kernels, a single one gets all threads if the model is wide.
        description: What computes, for a person.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        tokenizer: Tokenizer,
        *,
        search: SearchConfig | None = None,
        device: torch.device | str = "cpu",
        batch_tokens: int = BATCH_TOKENS,
        window_lines: int = WINDOW_LINES,
        workers: int | None = None,
        in_slots: bool = False,
        description: str = "",
    ) -> None:
        super().__init__(tokenizer, search=search, batch_tokens=batch_tokens, window_lines=window_lines, description=description)
        self._models = list(models)
        self._device = device
        self._workers = workers
        self._slots: SlotSearches | None = None
        self._rows: RowModel | None = None
        if not in_slots and self.search.method == "beam" and len(self._models) == 1 and fits(self._models[0]):
            self._rows = RowModel(self._models[0])
        if in_slots:
            config = self.search
            assert len(self._models) == 1
            assert config.method == "beam"
            self.takes_prefixes = False
            self._slots = SlotSearches(
                self._models[0],
                config.max_length,
                beam_size=config.beam_size,
                n_best=config.n_best,
                length_penalty=config.length_penalty,
                penalty=config.penalty,
                forbidden_ids=self._forbidden_ids,
            )

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        batches = super()._batches(lengths)
        parts = min(self._workers or 1, -(-len(lengths) // SMALLEST_SHARE))
        if len(batches) >= parts:
            return batches
        by_length = list(itertools.chain.from_iterable(batches))
        return [by_length[first::parts] for first in range(parts)]

    def _search_all(self, batches: Sequence[Sequence[Sentence]]) -> Iterator[list[list[Hypothesis]]]:
        if self._workers is None:
            yield from super()._search_all(batches)
        elif len(batches) < 2 or self._workers < 2:
            is_wide = min(model.config.d_model for model in self._models) >= SMALLEST_THREADED_WIDTH
            before = torch.get_num_threads()
            torch.set_num_threads(self._workers if is_wide else 1)
            try:
                yield from super()._search_all(batches)
            finally:
                torch.set_num_threads(before)
        else:
            threads = ThreadPoolExecutor(self._workers, thread_name_prefix="mtkit-search", initializer=torch.set_num_threads, initargs=(1,))
            with in_eval_mode(self._models):  # here once for all threads, which share the models
                try:
                    running = [threads.submit(self._search, batch) for batch in batches]
                    for search in running:
                        yield search.result()
                finally:
                    threads.shutdown(cancel_futures=True)

    def _search(self, batch: Sequence[Sentence]) -> list[list[Hypothesis]]:
        """The hypotheses of some sentences."""
        config, device = self.search, self._device
        sources = [sentence.source for sentence in batch]
        max_lengths = [config.max_length(len(sentence.source)) + len(sentence.prefix) for sentence in batch]
        prefixes = Prefixes([sentence.prefix for sentence in batch], device=device) if any(sentence.prefix for sentence in batch) else None
        try:
            with inference(self._models):
                if self._slots is not None:
                    return self._slots.run(sources)
                forbidden, alpha, penalty = self._forbidden_ids, config.length_penalty, config.penalty
                if self._rows is not None:
                    search = functools.partial(self._rows.search, sources, prefixes=prefixes)
                else:
                    step = model_step(self._models, *pad_sources(sources, device=device))
                    step = step if prefixes is None else with_prefixes(step, prefixes)
                    if config.method == "sample":
                        return sample(
                            step,
                            max_lengths=max_lengths,
                            seeds=[_line_seed(config.seed, sentence.line) for sentence in batch],
                            num_samples=config.n_best,
                            length_penalty=alpha,
                            penalty=penalty,
                            temperature=config.temperature,
                            top_k=config.top_k,
                            top_p=config.top_p,
                            forbidden_ids=forbidden,
                            device=device,
                        )
                    if config.beam_size == 1:
                        return greedy_search(
                            step, max_lengths=max_lengths, length_penalty=alpha, penalty=penalty, forbidden_ids=forbidden, device=device
                        )
                    search = functools.partial(beam_search, step, device=device)
                return search(
                    max_lengths=max_lengths,
                    beam_size=config.beam_size,
                    length_penalty=alpha,
                    penalty=penalty,
                    n_best=config.n_best,
                    forbidden_ids=forbidden,
                )
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"{named_lines(batch)}: a batch of {len(batch)} sentences does not fit into the memory of {device}",
                hint=f"Use smaller batches; now they have {self._batch_tokens} tokens (--batch-tokens).",
            ) from error


def _line_seed(seed: int, line: int) -> int:
    """Independent seeds for the lines of one run, below 2^63."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{line}".encode()).digest()[:8], "big") >> 1
