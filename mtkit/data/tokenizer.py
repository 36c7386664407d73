"""The tokenizer: text <-> ids through sentencepiece, trained, saved and loaded.

All segmentation of mtkit goes through `Tokenizer`. One tokenizer serves both sides, with one shared model (joint) or one model for each. Ids are
bare here: the beginning- and end-of-sentence ids are added by whoever builds batches, and text never yields them, whatever it says.
"""

import functools
import hashlib
import io
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import sentencepiece

from mtkit.artefacts import atomic_directory, verify_directory
from mtkit.config import from_dict, to_dict
from mtkit.data.model_file import MAX_VOCAB_SIZE, check_model, read_model
from mtkit.data.sample import MAX_SENTENCE_CHARS, SentenceSample
from mtkit.errors import ArtefactError, ConfigError, DataError, MTKitError
from mtkit.files import is_blank, one_line, read_json, write_json

Side = Literal["src", "tgt"]
SIDES: tuple[Side, Side] = ("src", "tgt")

PAD_ID = 0
UNK_ID = 1
BOS_ID = 2
EOS_ID = 3
CONTROL_PIECES = ("<pad>", "<unk>", "<s>", "</s>")
"""The pieces of the ids above, in their order."""

META_NAME = "tokenizer.json"
FORMAT = 1

# Unigram training adds up floats per thread, so its result depends on their number: it is fixed, not taken from the machine.
_TRAINING_THREADS = 16
# sentencepiece uses these two characters for itself: a space in pieces, and rare characters in training.
SPACE_MARK = "\u2581"
_RARE_MARK = "\u2585"
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """How a tokenizer is trained."""

    type: Literal["unigram", "bpe"] = "unigram"
    """Segmentation algorithm of sentencepiece."""
    vocab_size: int = 32000
    """Number of pieces, control symbols and bytes included, 8 to 1,000,000; of each side if not joint. It is met exactly or training fails."""
    joint: bool = True
    """One model for both sides; False trains one for each."""
    character_coverage: float = 0.9999
    """Share of the characters of the text, 0.98 to 1.0, that get a piece of their own; the rarest others become bytes (or unknown)."""
    byte_fallback: bool = True
    """Spell characters without a piece as UTF-8 bytes (256 pieces), so that nothing is ever unknown."""
    normalization: Literal["nmt_nfkc", "nfkc", "identity"] = "nfkc"
    """What happens to text before it is segmented; decoding gives the normalized text back.

    `nfkc` composes accents and folds compatibility characters (full-width forms, ligatures, no-break spaces; but also … to three dots and ² to 2)
    and leaves zero-width joiners and non-joiners alone, which Persian and the Indic scripts need. `nmt_nfkc` also turns tabs into spaces, removes
    control characters, and makes a space of the zero-width non-joiner. Both squeeze runs of spaces and strip the ends. `identity` changes nothing,
    spaces included: every text comes back as it was, but for U+2581, sentencepiece's own mark for a space, and blank lines, which come back empty.
    """
    user_defined_symbols: tuple[str, ...] = ()
    """Strings that are one piece wherever they occur in text, for example placeholders; no white space."""
    max_sentences: int | None = 5_000_000
    """Train on a random sample of so many lines (of both sides together if joint), at least 1; None takes all, and memory grows with the text."""
    seed: int = 1
    """Seed of the sample, at least 0."""

    def __post_init__(self) -> None:
        if not 8 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ConfigError(f"vocab_size must be 8 to {MAX_VOCAB_SIZE}, but is {self.vocab_size}")
        if not 0.98 <= self.character_coverage <= 1.0:
            raise ConfigError(f"character_coverage must be 0.98 to 1.0, but is {self.character_coverage}")
        if self.max_sentences is not None and self.max_sentences < 1:
            raise ConfigError(f"max_sentences must be at least 1 or none, but is {self.max_sentences}")
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, but is {self.seed}")
        for symbol in self.user_defined_symbols:
            if problem := _symbol_problem(symbol):
                raise ConfigError(f"user_defined_symbols must not hold {symbol!r}: {problem}")
        if len(set(self.user_defined_symbols)) < len(self.user_defined_symbols):
            raise ConfigError(f"user_defined_symbols must differ from each other, but are {list(self.user_defined_symbols)}")


def _symbol_problem(symbol: str) -> str | None:
    if not symbol:
        return "it is empty"
    if symbol in CONTROL_PIECES or _BYTE_PIECE.fullmatch(symbol):
        return "the name is taken by a control symbol or a byte"
    if any(character.isspace() or character in f"\0{SPACE_MARK}{_RARE_MARK}" for character in symbol) or one_line(symbol) != symbol:
        return "white space, NUL, U+2581 and U+2585 cannot be part of a symbol"
    if _without_surrogates(symbol) != symbol:
        return "it is not valid Unicode"
    return None


# --- the tokenizer --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingText:
    """What one model was trained on.

    Attributes:
        num_lines: Non-blank lines of the text.
        num_sentences: Sentences used: all, or a sample; an over-long line is several.
        sha256: Hash of those sentences.
    """

    num_lines: int
    num_sentences: int
    sha256: str


class Tokenizer:
    """Turns text into ids and back, for both sides of a corpus.

    Args:
        config: What it was trained with.
        models: Serialized sentencepiece models by file name: `tokenizer.model` if joint, else `src.model` and `tgt.model`.
        trained_on: What each model was trained on, by the same names.

    Attributes:
        config: As above.
        trained_on: As above.
        fingerprint: sha256 of the model, or over those of both models; equal fingerprints mean equal ids.
        src_vocab_size: Number of pieces of the source side.
        tgt_vocab_size: Number of pieces of the target side.

    Raises:
        ArtefactError: A model is damaged or not one that mtkit trained.
    """

    def __init__(self, config: TokenizerConfig, models: Mapping[str, bytes], *, trained_on: Mapping[str, TrainingText]) -> None:
        self.config = config
        self.trained_on = dict(trained_on)
        self._models = dict(models)
        processors = {name: _open_model(model, name=name) for name, model in models.items()}
        self._processors = {side: processors[_model_name(side, joint=config.joint)] for side in SIDES}
        digests = [hashlib.sha256(models[name]).digest() for name in model_names(config)]
        self.fingerprint = (digests[0] if config.joint else hashlib.sha256(b"".join(digests)).digest()).hex()
        self.src_vocab_size = self._processors["src"].get_piece_size()
        self.tgt_vocab_size = self._processors["tgt"].get_piece_size()

    @property
    def joint(self) -> bool:
        """Whether both sides share one model."""
        return self.config.joint

    def encode(self, lines: Sequence[str], side: Side, *, num_threads: int = 1) -> list[list[int]]:
        """Segment lines.

        Args:
            lines: One text each, without line breaks. A lone surrogate counts as U+FFFD.
            side: Which side they belong to.
            num_threads: Threads of sentencepiece; worth it for thousands of lines on idle cores.

        Returns:
            The ids of each line, without BOS and EOS. A line that shows nothing (`files.is_blank`) has none.
        """
        processor = self._processors[side]
        try:
            rows: list[list[int]] = processor.encode(list(lines), num_threads=num_threads)
        except TypeError:  # what sentencepiece makes of a lone surrogate
            rows = processor.encode([_without_surrogates(line) for line in lines], num_threads=num_threads)
        return [[] if is_blank(line) else row for line, row in zip(lines, rows, strict=True)]

    def decode(self, ids: Sequence[Sequence[int]], side: Side) -> list[str]:
        """Turn ids back into text.

        Args:
            ids: The ids of each line. PAD, BOS and EOS are ignored; bytes that are not UTF-8 become U+FFFD.
            side: Which side they belong to.

        Returns:
            One text for each row. It may hold line breaks if `forbidden_ids` was not respected; write it through `files.one_line`.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        if len(ids) == 0:
            return []
        texts: list[str] = self._processors[side].decode([self._checked(row, side) for row in ids], num_threads=1)
        return texts

    def pieces(self, ids: Sequence[int], side: Side) -> list[str]:
        """The pieces of ids, as sentencepiece spells them; for people to look at, never to be joined into text.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        pieces: list[str] = self._processors[side].id_to_piece(self._checked(ids, side))
        return pieces

    def piece_ids(self, pieces: Sequence[str], side: Side) -> list[int]:
        """The ids of pieces, the inverse of `pieces`.

        Raises:
            ValueError: There is no such piece.
        """
        processor = self._processors[side]
        ids = []
        for piece in pieces:
            index = processor.piece_to_id(_without_surrogates(piece))
            if index == UNK_ID and piece != CONTROL_PIECES[UNK_ID]:
                raise ValueError(f"{piece!r} is not a piece of the {side} vocabulary")
            ids.append(index)
        return ids

    def piece_scores(self, side: Side) -> list[float | None]:
        """The log-probability of each piece of a unigram model; None for control symbols, bytes and user-defined symbols, which have none."""
        processor = self._processors[side]
        fixed = set(self.config.user_defined_symbols)
        return [
            None
            if index < len(CONTROL_PIECES) or processor.is_byte(index) or processor.id_to_piece(index) in fixed
            else float(processor.get_score(index))
            for index in range(processor.get_piece_size())
        ]

    def _checked(self, ids: Sequence[int], side: Side) -> list[int]:
        size = self.src_vocab_size if side == "src" else self.tgt_vocab_size
        plain = [int(index) for index in ids]  # they may be numpy's
        if plain and not (min(plain) >= 0 and max(plain) < size):
            bad = next(index for index in plain if not 0 <= index < size)
            raise ValueError(f"id {bad} is outside the {side} vocabulary of {size} pieces")
        return plain

    def forbidden_ids(self, side: Side) -> list[int]:
        """The ids that a decoder must never emit: PAD, BOS, UNK if bytes can spell everything, and what would break a line. EOS is not among them."""
        processor = self._processors[side]
        forbidden = [PAD_ID, BOS_ID]
        if self.config.byte_fallback:
            forbidden.append(UNK_ID)
        for index in range(len(CONTROL_PIECES), processor.get_piece_size()):
            piece = processor.id_to_piece(index)
            if processor.is_byte(index):
                value = int(piece[3:5], 16)
                piece = chr(value) if value < 0x80 else ""  # the other bytes are parts of characters
            if one_line(piece) != piece:
                forbidden.append(index)
        return sorted(forbidden)

    def save(self, directory: Path) -> None:
        """Write an artefact of kind `tokenizer`.

        Raises:
            MTKitError: `directory` exists or cannot be written.
        """
        inputs = {name: text.sha256 for name, text in self.trained_on.items()}
        with atomic_directory(directory, kind="tokenizer", config=to_dict(self.config), inputs=inputs) as temporary:
            self.write_files(temporary)

    def write_files(self, directory: Path) -> None:
        """Write the tokenizer's files into an existing directory, without a manifest: for a part of another artefact."""
        records = {}
        for name, model in self._models.items():
            (directory / name).write_bytes(model)
            records[name] = {
                "vocab_size": self.src_vocab_size if name != "tgt.model" else self.tgt_vocab_size,
                "sha256": hashlib.sha256(model).hexdigest(),
                "trained_on": asdict(self.trained_on[name]),
            }
        write_json(directory / META_NAME, {"format": FORMAT, "config": to_dict(self.config), "models": records})

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read an artefact of kind `tokenizer`, or the tokenizer of a model, checkpoint or shard set.

        Raises:
            ArtefactError: It is missing, damaged or something else.
        """
        bundled = directory / "tokenizer"
        is_bundled = (bundled / META_NAME).is_file()
        verify_directory(directory, kind=None if is_bundled else "tokenizer")
        return cls.read_files(bundled if is_bundled else directory)

    @classmethod
    def read_files(cls, directory: Path) -> Self:
        """Read the files that `write_files` wrote.

        Raises:
            ArtefactError: A file is missing or damaged, or of another format version.
        """
        path = directory / META_NAME
        meta = read_json(path)
        try:
            if meta["format"] != FORMAT:
                raise ArtefactError(f"{path}: has format {meta['format']!r}, this mtkit reads format {FORMAT}")
            config = from_dict(TokenizerConfig, meta["config"])
            records = {name: meta["models"][name] for name in model_names(config)}
            trained_on = {name: TrainingText(**record["trained_on"]) for name, record in records.items()}
            models = {name: read_model(directory / name, sha256=str(record["sha256"])) for name, record in records.items()}
            sizes = {name: int(record["vocab_size"]) for name, record in records.items()}
        except ConfigError as error:
            raise ArtefactError(f"{path}: {error.message}", hint=error.hint) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtefactError(f"{path}: does not describe a tokenizer of mtkit: {error!r}") from error
        try:
            tokenizer = cls(config, models, trained_on=trained_on)
        except ArtefactError as error:
            raise ArtefactError(f"{directory}/{error.message}", hint=error.hint) from error
        for side, found in zip(SIDES, (tokenizer.src_vocab_size, tokenizer.tgt_vocab_size), strict=True):
            name = _model_name(side, joint=config.joint)
            if found != sizes[name]:
                raise ArtefactError(f"{directory / name}: holds {found} pieces, but {META_NAME} says {sizes[name]}")
        return tokenizer


def model_names(config: TokenizerConfig) -> tuple[str, ...]:
    """The names of the model files of such a tokenizer."""
    return tuple(dict.fromkeys(_model_name(side, joint=config.joint) for side in SIDES))


def _model_name(side: Side, *, joint: bool) -> str:
    return "tokenizer.model" if joint else f"{side}.model"


def _open_model(model: bytes, *, name: str) -> sentencepiece.SentencePieceProcessor:
    try:
        check_model(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
    except (RuntimeError, ValueError) as error:
        raise ArtefactError(f"{name}: is not a sentencepiece model: {error}") from error
    if ids != (PAD_ID, UNK_ID, BOS_ID, EOS_ID):
        raise ArtefactError(f"{name}: has the ids {ids} for {', '.join(CONTROL_PIECES)}, and mtkit needs {(PAD_ID, UNK_ID, BOS_ID, EOS_ID)}")
    return processor


def _without_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# --- training -------------------------------------------------------------------------------------------------------------------------


def train_tokenizer(pairs: Iterable[tuple[str, str]], config: TokenizerConfig) -> Tokenizer:
    """Train a tokenizer on a parallel corpus.

    Args:
        pairs: Source and target lines; read once, never kept as a whole.
        config: What to train. The same pairs and config give the same bytes.

    Raises:
        ConfigError: The vocabulary size does not suit the text; the message says what would.
        DataError: There is no text.
    """
    return train_on_lines(((side, line) for pair in pairs for side, line in zip(SIDES, pair, strict=True)), config)


def train_on_lines(lines: Iterable[tuple[Side, str]], config: TokenizerConfig) -> Tokenizer:
    """Train a tokenizer on lines that need not be pairs.

    Args:
        lines: Lines with the side that each belongs to, in any order and number; read once. If joint, the side does not matter.
        config: What to train. The same lines and config give the same bytes.

    Raises:
        ConfigError: The vocabulary size does not suit the text; the message says what would.
        DataError: There is no text.
    """
    samples = {name: SentenceSample(capacity=config.max_sentences, seed=config.seed) for name in model_names(config)}
    add = {side: samples[_model_name(side, joint=config.joint)].add for side in SIDES}
    for side, line in lines:
        add[side](line)
    places = {"tokenizer.model": "the text", "src.model": "the source text", "tgt.model": "the target text"}
    for name, sample in samples.items():
        if not sample.sentences:
            raise DataError(f"{places[name]} is empty: there is nothing to train a tokenizer on")
    models = {name: _train_model(sample.sentences, config, place=places[name]) for name, sample in samples.items()}
    trained_on = {
        name: TrainingText(num_lines=sample.num_lines, num_sentences=len(sample.sentences), sha256=sample.sha256())
        for name, sample in samples.items()
    }
    return Tokenizer(config, models, trained_on=trained_on)


def _train_model(sentences: Sequence[str], config: TokenizerConfig, *, place: str) -> bytes:
    # sentencepiece would skip a line that holds its own mark for rare characters without a word.
    cleaned = (_without_surrogates(sentence).replace(_RARE_MARK, " ") for sentence in sentences)
    writer = io.BytesIO()
    train = functools.partial(
        sentencepiece.SentencePieceTrainer.train,
        sentence_iterator=cleaned,
        model_writer=writer,
        model_type=config.type,
        vocab_size=config.vocab_size,
        character_coverage=config.character_coverage,
        byte_fallback=config.byte_fallback,
        normalization_rule_name=config.normalization,
        remove_extra_whitespaces=config.normalization != "identity",
        user_defined_symbols=list(config.user_defined_symbols),
        pad_id=PAD_ID,
        unk_id=UNK_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        max_sentence_length=4 * MAX_SENTENCE_CHARS,  # bytes; a longer line would be skipped
        num_threads=_TRAINING_THREADS,
        minloglevel=3,
    )
    try:
        _run_interruptibly(train)
    except RuntimeError as error:
        raise _explain_training_error(str(error), config, place=place) from error
    return writer.getvalue()


def _run_interruptibly(function: Callable[[], object]) -> None:
    """Call a function that takes minutes without coming back to Python, which alone can react to signals: one ends the waiting for it."""
    done: Future[object] = Future()

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, name="mtkit-tokenizer", daemon=True).start()
    done.result()


def _explain_training_error(message: str, config: TokenizerConfig, *, place: str) -> MTKitError:
    where = "It is --vocab-size of `mtkit tokenizer train` and tokenizer.vocab_size in the config of a training run"
    if match := re.search(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)", message):
        return ConfigError(
            f"vocab_size {config.vocab_size} is too large for {place}: the largest possible size is {match[1]}",
            hint=f"{where}. More text allows more pieces.",
        )
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"vocab_size {config.vocab_size} is too small for {place}: the smallest possible size is {match[1]}",
            hint=f"{where}. A lower character_coverage needs fewer pieces"
            + (f", and {len(config.user_defined_symbols)} of them are user_defined_symbols." if config.user_defined_symbols else "."),
        )
    if "!sentences_.empty()" in message or "(all_chars_count) > (0)" in message:
        return DataError(f"{place} is empty after normalization ({config.normalization}): there is nothing to train a tokenizer on")
    return MTKitError(f"sentencepiece could not train a tokenizer on {place}: {message}")
