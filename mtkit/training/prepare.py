"""From what the user named to what a run trains on: shards, which are made of raw text below the run directory, or the text itself as a stream."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtkit import config as codec
from mtkit.artefacts import MANIFEST_NAME
from mtkit.checkpoint.layout import DATA_NAME, SHARDS_NAME, TOKENIZER_NAME, load_tokenizer
from mtkit.data.corpus import HUB_PREFIX, Corpus, check_directions, parse_corpus
from mtkit.data.order import MixedOrder, Order
from mtkit.data.pools import PoolSource, ShardPools
from mtkit.data.preprocess import preprocess, read_held_out
from mtkit.data.shards import ShardSet
from mtkit.data.stream import StreamPools
from mtkit.data.subword import SampledPools, SubwordSampler, require_unigram
from mtkit.data.tokenizer import Tokenizer, train_tokenizer
from mtkit.errors import ArtefactError, ConfigError, DataError, UsageError
from mtkit.files import STDIO, read_json, sha256_file, write_json
from mtkit.training.config import TrainConfig, require_tying_fits
from mtkit.training.initial import InitialModel, open_initial
from mtkit.training.run import SOURCE_NAME, RunDirectory, is_same_start
from mtkit.training.validate import DevSet

Say = Callable[[str], None]

_MISSING = "warning: {}: no longer there; the run goes on with its own copy"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """What a run trains on.

    Attributes:
        source: The training pairs.
        dev: The dev set.
        tokenizer: Of both.
        fingerprint: Equal for equal data.
    """

    source: PoolSource
    dev: DevSet
    tokenizer: Tokenizer
    fingerprint: str


def prepare_data(config: TrainConfig, output: Path, *, num_workers: int, world_size: int = 1, say: Say) -> None:
    """Make the shards that a run needs, or find those made before from the same text and config. Of a stream nothing is made.

    A tokenizer or text of which the run has a copy, in finished shards or in a checkpoint, may be gone when it goes on. Text that turns out to be
    unusable leaves nothing behind.

    Args:
        config: Names shards, or text, or a data set.
        output: The run directory; what is made lies below `data/` in it.
        num_workers: Processes for preprocessing.
        world_size: Processes that are going to train.
        say: Gets a line now and then.

    Raises:
        UsageError: Neither shards nor text is named, or text without a dev set, or a stream that cannot be read as it would have to be.
        DataError: The text cannot be used.
        ConfigError: What was made before comes from other text or another config, or the run is to begin with a model of another architecture.
        ArtefactError: The run is to begin with a model that cannot be read, or that does not fit the shards.
    """
    initial = None if RunDirectory(path=output).has_checkpoints() else open_initial(config)
    if config.data.shards is not None:
        if initial is not None:
            initial.require_tokenizer(ShardSet.open(Path(config.data.shards)).tokenizer, Path(config.data.shards))
        if config.data.dev and _corpus(config, config.data.dev, split="validation").is_pipe:
            raise UsageError("a dev set beside shards cannot be a pipe: it is read anew when the run goes on", hint="Write the text to a file.")
        return
    if not config.data.train:
        raise UsageError("no training data was given", hint="For example: --train train.en train.de --dev dev.en dev.de")
    if not config.data.dev:
        raise UsageError("no dev set was given", hint="Give some hundred pairs that are not in the training data: --dev dev.en dev.de")
    train, dev = _corpus(config, config.data.train, split="train"), _corpus(config, config.data.dev, split="validation")
    check_directions({"the training corpus": train, "dev": dev})
    if initial is not None and config.data.tokenizer is not None:
        initial.require_tokenizer(load_tokenizer(Path(config.data.tokenizer)), Path(config.data.tokenizer))
    if config.data.stream:
        _require_streamable(config, train, world_size=world_size)
        if _tokenizer_place(config, output) == output:
            say(_MISSING.format(_named_tokenizer(config)))
        return
    directory, shards = output / DATA_NAME, shards_directory(config, output)
    _require_a_weight_each(config, len(train.sources), where="data.train")
    is_finished = (shards / MANIFEST_NAME).is_file()
    if not is_finished:
        records, _ = train.check(), dev.check()  # unequal sides show now, not after a tokenizer was trained on them
        if not dev.is_pipe:
            read_held_out(dev, name="dev")
        pipe = next((record.name for record in records if record.fingerprint is None), None)
        if pipe is not None and config.data.tokenizer is config.training.init_from is None:
            raise UsageError(
                f"{pipe}: is a pipe, which can be read only once, but the text is needed twice: for a tokenizer, and to be encoded",
                hint="Write the text to a file. Or train a tokenizer on a part of it, and train on the pipe with --stream --tokenizer DIR, "
                "or let `mtkit preprocess` read it and train with --shards.",
            )
    made_from = read_json(directory / SOURCE_NAME) if (directory / SOURCE_NAME).exists() else {}
    source = _describe_source(config, made_from)
    changes = _changes(made_from, source) if made_from else []
    if is_finished and changes:
        raise ConfigError(
            f"{directory}: was made from other text or with another config: " + "; ".join(changes),
            hint="Choose another --output for the new data, or remove the old run.",
        )
    if is_finished:
        if missing := _missing(config):
            say(_MISSING.format(" ".join(missing)))
        return
    given = _given_tokenizer(config, initial or open_initial(config), say=say)
    if given is not None:
        require_fitting(config, given)
    if changes:  # of an unfinished attempt
        _discard(directory)  # only now, for the tokenizer that was given may be the one in there
    try:
        tokenizer = _tokenizer(train, config, given=given, directory=directory, source=source, say=say)
        say(f"preprocessing into {shards}")
        report = preprocess(
            train,
            held_out={"dev": dev},
            tokenizer=tokenizer,
            output=shards,
            config=config.preprocess,
            num_workers=num_workers,
        )
    except DataError:
        _discard(directory)
        raise
    say(report.summary())


def open_data(config: TrainConfig, output: Path) -> RunData:
    """Open what `prepare_data` has prepared.

    Args:
        config: Of the run.
        output: The run directory.

    Raises:
        ArtefactError: The shards or the tokenizer are damaged, or there is no dev set.
        DataError: The text of a stream cannot be used.
        ConfigError: The data cannot be drawn as the config says.
    """
    data = _open_stream(config, output) if config.data.stream else _open_shards(config, shards_directory(config, output))
    if config.training.subword_alpha is None:
        return data
    sampler = SubwordSampler(data.tokenizer, alpha=config.training.subword_alpha)
    return dataclasses.replace(data, source=SampledPools(data.source, sampler, seed=config.seed))


def require_fitting(config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with which the model cannot be built, or from which segmentations cannot be drawn.

    Raises:
        ConfigError: Says why.
    """
    require_tying_fits(config.model, joint=tokenizer.joint)
    if config.training.subword_alpha is not None:
        require_unigram(tokenizer, alpha=config.training.subword_alpha)


def pair_order(config: TrainConfig, shards: ShardSet) -> Order | None:
    """The order in which pairs are drawn from several corpora with weights, or None to take all pairs equally.

    Args:
        config: With `data.weights` or `data.temperature`.
        shards: Know which pairs are from which corpus.

    Raises:
        ConfigError: The weights are not as many as the corpora, or the share of a corpus is too small.
    """
    sizes, weights, temperature = shards.corpora, config.data.weights, config.data.temperature
    if weights is None and temperature is None:
        return None
    _require_a_weight_each(config, len(sizes), where=str(shards.directory))
    if 0 in sizes:
        raise ConfigError(
            f"{shards.directory}: nothing is left of corpus {sizes.index(0) + 1} of {len(sizes)}, so none can be drawn from it",
            hint="Leave it out, or loosen the filters.",
        )
    if weights is None:
        weights = tuple((size / max(sizes)) ** (1.0 / (temperature or 1.0)) for size in sizes)
    try:
        return MixedOrder(sizes, weights=weights, seed=config.seed)
    except ValueError as error:
        smallest = weights.index(min(weights)) + 1
        raise ConfigError(
            f"{shards.directory}: too little would be drawn from corpus {smallest} of {len(sizes)}: {error}",
            hint="Raise its weight or the temperature, or put it into one file with another corpus.",
        ) from error


def shards_directory(config: TrainConfig, output: Path) -> Path:
    """Where the shards of a run are: those that the config names, or else those that `prepare_data` makes below the run directory."""
    return output / DATA_NAME / SHARDS_NAME if config.data.shards is None else Path(config.data.shards)


def stored_dev_set(shards: ShardSet) -> DevSet:
    """The dev set that shards hold.

    Raises:
        ArtefactError: They are damaged or hold none.
    """
    if "dev" not in shards.held_out_names:
        raise ArtefactError(f"{shards.directory}: holds no dev set", hint="Add --dev dev.en dev.de.")
    dev = DevSet.of(zip(*shards.held_out("dev"), strict=True))
    if not dev.src_lines:
        raise ArtefactError(f"{shards.directory}: its dev set holds no pair with text on both sides")
    return dev


def _open_shards(config: TrainConfig, path: Path) -> RunData:
    shards = ShardSet.open(path)
    source = ShardPools(shards, seed=config.seed, order=pair_order(config, shards))
    if config.data.shards is None or not config.data.dev:
        return RunData(source=source, dev=stored_dev_set(shards), tokenizer=shards.tokenizer, fingerprint=shards.fingerprint)
    dev = _named_dev_set(config)
    return RunData(source=source, dev=dev, tokenizer=shards.tokenizer, fingerprint=_fingerprint_with(shards.fingerprint, dev))


def _named_dev_set(config: TrainConfig) -> DevSet:
    return DevSet.of(read_held_out(_corpus(config, config.data.dev, split="validation"), name="dev"))


def _fingerprint_with(data: str, dev: DevSet) -> str:
    """The fingerprint of training data and a dev set that does not belong to it."""
    return hashlib.sha256(json.dumps([data, list(dev.src_lines), list(dev.tgt_lines)]).encode()).hexdigest()


def _open_stream(config: TrainConfig, output: Path) -> RunData:
    dev = _named_dev_set(config)
    tokenizer = load_tokenizer(_tokenizer_place(config, output))
    # A pair that no batch can hold is dropped with the others, so that there is no pool of such pairs only.
    longest = min(config.preprocess.filters.max_length or config.batch.max_tokens, config.batch.max_tokens - 1)
    filters = dataclasses.replace(config.preprocess.filters, max_length=max(1, longest))
    source = StreamPools(_corpus(config, config.data.train, split="train"), tokenizer=tokenizer, filters=filters)
    return RunData(source=source, dev=dev, tokenizer=tokenizer, fingerprint=_fingerprint_with(source.fingerprint, dev))


def _require_streamable(config: TrainConfig, train: Corpus, *, world_size: int) -> None:
    """Refuse a stream that has no tokenizer, or that would have to be read more than once and cannot."""
    if config.data.tokenizer is config.training.init_from is None:
        raise UsageError(
            "a stream needs a tokenizer, which cannot be learnt from text that is read as it is used",
            hint="Train one on a part of the text with `mtkit tokenizer train`, and add --tokenizer DIR",
        )
    if STDIO in config.data.train and STDIO in config.data.dev:
        raise UsageError("stdin cannot be both the training text and the dev set")
    if world_size > 1 and train.is_pipe:
        raise UsageError(
            f"{train.name}: is a pipe, which one process only can read, but each of the {world_size} reads the whole stream",
            hint="Write the text to a file, or leave out --nproc.",
        )


def _named_tokenizer(config: TrainConfig) -> Path:
    """What holds the tokenizer that a config names, itself or with the model to begin with."""
    named = config.data.tokenizer or config.training.init_from
    assert named is not None
    return Path(named)


def _tokenizer_place(config: TrainConfig, output: Path) -> Path:
    """What holds the tokenizer of a stream: what the config names, or the run, once that is gone."""
    named = _named_tokenizer(config)
    return output if not named.exists() and RunDirectory(path=output).has_checkpoints() else named


def _require_a_weight_each(config: TrainConfig, num_corpora: int, *, where: str) -> None:
    weights = config.data.weights
    if weights is not None and len(weights) != num_corpora:
        raise ConfigError(
            f"data.weights has {len(weights)} numbers, but {where} is made of {num_corpora} corpora",
            hint="Give one weight for each file pair, file or data set of the training data, in the same order.",
        )


def _corpus(config: TrainConfig, specs: tuple[str, ...], *, split: str) -> Corpus:
    return parse_corpus(specs, src_lang=config.data.src_lang, tgt_lang=config.data.tgt_lang, split=split, stream=config.data.stream)


def _given_tokenizer(config: TrainConfig, initial: InitialModel | None, *, say: Say) -> Tokenizer | None:
    """The tokenizer that a config names, itself or with the model to begin with; None where it is to be learnt, or is gone and the run has it."""
    if initial is not None:
        say(f"taking the tokenizer of {initial.path}")
        return initial.tokenizer
    if config.data.tokenizer is None or not Path(config.data.tokenizer).exists():
        return None
    return load_tokenizer(Path(config.data.tokenizer))


def _tokenizer(corpus: Corpus, config: TrainConfig, *, given: Tokenizer | None, directory: Path, source: dict[str, Any], say: Say) -> Tokenizer:
    """The tokenizer for shards; once it is there, it is kept in `directory` together with what it was made from."""
    if (directory / TOKENIZER_NAME / MANIFEST_NAME).is_file():
        return Tokenizer.load(directory / TOKENIZER_NAME)
    if given is not None:
        tokenizer = given
    elif config.data.tokenizer is not None:
        tokenizer = load_tokenizer(Path(config.data.tokenizer))  # which says that it is gone
    else:
        say(f"training a tokenizer of {config.tokenizer.vocab_size} pieces")
        with contextlib.closing(corpus.pairs()) as pairs:
            tokenizer = train_tokenizer(pairs, config.tokenizer)
    write_json(directory / SOURCE_NAME, source)
    tokenizer.save(directory / TOKENIZER_NAME)
    return tokenizer


def _discard(directory: Path) -> None:
    """Remove what was made of text that is no longer of use."""
    for name in (TOKENIZER_NAME, SHARDS_NAME):
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / SOURCE_NAME).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it
        directory.rmdir()


def _describe_source(config: TrainConfig, made_from: Mapping[str, Any]) -> dict[str, Any]:
    """What the shards are made from: local files by their bytes, data sets by name. What is gone is described as it was in `made_from`."""
    known = made_from.get("files", {})
    return {
        "files": {spec: _fingerprint(Path(spec)) or known.get(spec) for spec in (*config.data.train, *config.data.dev)},
        "train": list(config.data.train),
        "dev": list(config.data.dev),
        "languages": [config.data.src_lang, config.data.tgt_lang],
        "tokenizer": _describe_tokenizer(config, made_from.get("tokenizer", {})),
        "preprocess": codec.to_dict(config.preprocess),
    }


def _describe_tokenizer(config: TrainConfig, made_from: dict[str, Any]) -> dict[str, Any]:
    if config.training.init_from is not None:
        is_same = "init_from" in made_from and is_same_start(made_from["init_from"], config.training.init_from)
        return made_from if is_same else {"init_from": config.training.init_from}
    if config.data.tokenizer is not None:
        place = Path(config.data.tokenizer)
        return made_from if "fingerprint" in made_from and not place.exists() else {"fingerprint": load_tokenizer(place).fingerprint}
    return codec.to_dict(config.tokenizer)


def _missing(config: TrainConfig) -> list[str]:
    """Local files and directories that a config names for the data and that are gone."""
    named = [*config.data.train, *config.data.dev, *filter(None, [config.data.tokenizer])]
    return [name for name in named if name != STDIO and not name.startswith(HUB_PREFIX) and not Path(name).exists()]


def _fingerprint(path: Path) -> str | None:
    if path.is_file():
        return sha256_file(path)
    if path.is_dir():
        names = "\n".join(f"{file.relative_to(path)} {sha256_file(file)}" for file in sorted(path.rglob("*")) if file.is_file())
        return hashlib.sha256(names.encode()).hexdigest()
    return None


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two descriptions, one line each. Files are compared by their content, so that a moved one is not a change."""
    sides = ("train", "dev")
    plain_old, plain_new = ({key: value for key, value in source.items() if key not in ("files", *sides)} for source in (old, new))
    origins = [_tokenizer_origin(source.get("tokenizer", {})) for source in (old, new)]
    if origins[0][0] != origins[1][0]:
        plain_old["tokenizer"], plain_new["tokenizer"] = (", ".join(origin) for origin in origins)
    changes = codec.differences(plain_old, plain_new)
    for side in sides:
        old_specs, new_specs = old.get(side, []), new.get(side, [])
        contents = [[source.get("files", {}).get(spec) or spec for spec in source.get(side, [])] for source in (old, new)]
        if len(old_specs) != len(new_specs):
            changes.append(f"{side}: {' '.join(old_specs)} -> {' '.join(new_specs)}")
        else:
            changes += [f"{side}: {spec} holds other text" for spec, before, after in zip(new_specs, *contents, strict=True) if before != after]
    return changes


def _tokenizer_origin(description: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a tokenizer that `_describe_tokenizer` has described comes from, and which it is, if that is told in a word."""
    if "fingerprint" in description:
        return "given", str(description["fingerprint"])[:16]
    if "init_from" in description:
        return "that of init_from", str(description["init_from"])
    return ("learnt from the text",)
