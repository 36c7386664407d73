"""What `mtkit inspect` shows to a person: what a directory is, in lines that fit on a screen."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mtkit.cli.display import format_seconds

if TYPE_CHECKING:
    from mtkit.training.inspection import Inspection

Row = tuple[str, str]

MAX_NAMES = 4
"""Of a list, so many names are shown."""

_SCORES = {"bleu": "BLEU", "chrf": "chrF", "loss": "loss", "ppl": "ppl"}
_CHECKED = {"fast": "names and sizes of all files are right", "full": "the contents of all files are right"}


def summarize(found: "Inspection") -> list[Row]:
    """Name and value of each line; values may hold anything that stands in the files.

    Args:
        found: What a directory is. Its config may lack any key, and hold values of any type.
    """
    rows = {"tokenizer": _tokenizer_rows, "shards": _shard_rows, "run": _run_rows}.get(found.kind, _model_rows)(found)
    size = f"{_bytes(found.facts['num_bytes'])} in {_count(found.facts['num_files'], 'file')}" if "num_files" in found.facts else None
    checked = f"damaged in {_count(len(found.damage), 'place')}" if found.damage else _CHECKED[found.verified]
    fingerprint = None if found.fingerprint is None else found.fingerprint[:16]
    version = None if found.mtkit_version is None else f"mtkit {found.mtkit_version}"
    ends = (("size", size), ("checked", checked), ("fingerprint", fingerprint), ("written by", version))
    return [("path", str(found.path)), ("kind", found.kind), *rows, *((name, value) for name, value in ends if value)]


# --- kinds ------------------------------------------------------------------------------------------------------------------------------


def _tokenizer_rows(found: "Inspection") -> Iterator[Row]:
    facts, config = found.facts, found.config
    yield "vocabulary", _vocabulary(facts, joint=facts["joint"], kind=facts["type"])
    yield "characters", f"coverage {config.get('character_coverage')}, the rest {'as bytes' if config.get('byte_fallback') else 'unknown'}"
    yield "normalization", str(config.get("normalization"))
    if symbols := config.get("user_defined_symbols"):
        yield "own symbols", _names(symbols)
    yield "tokenizer", str(facts["tokenizer"])[:16]
    counts = [f"{_number(text['num_sentences'])} of {_number(text['num_lines'])} lines" for text in facts["trained_on"].values()]
    yield "trained on", " and ".join(counts)


def _shard_rows(found: "Inspection") -> Iterator[Row]:
    facts = found.facts
    yield "pairs", f"{_number(facts['num_pairs'])} in {_count(facts['num_shards'], 'shard')}"
    if len(facts["corpora"]) > 1:
        yield "of corpora", _names([_number(count) for count in facts["corpora"]])
    for side, name in (("src", "source"), ("tgt", "target")):
        count, mean, longest = facts[f"num_{side}_tokens"], facts[f"mean_{side}_length"], facts[f"max_{side}_length"]
        yield name, f"{_number(count)} tokens, {mean} a sentence, {longest} the longest"
    report = facts["report"]
    dropped = [f"{reason.replace('_', ' ')} {_number(count)}" for reason, count in _tree(report, "dropped").items() if count]
    yield "dropped", f"{', '.join(dropped)} of {_number(report.get('num_read'))} pairs" if dropped else "none"
    yield "held out", ", ".join(f"{name} {_number(count)}" for name, count in facts["held_out"].items()) or "none"
    yield "made from", _names([str(_tree(source).get("name")) for source in _list(found.inputs.get("train"))])
    yield "tokenizer", str(facts["tokenizer"])[:16]


def _model_rows(found: "Inspection") -> Iterator[Row]:
    """Of a model, a checkpoint, an export, or of what is of no kind known here."""
    facts, config = found.facts, found.config
    provenance = _tree(facts, "provenance") or _tree(config, "provenance")
    trained = _tree(provenance, "config") or config
    precision = facts.get("precision") or config.get("precision")
    if "num_parameters" in facts:
        yield "parameters", f"{_number(facts['num_parameters'])} in {precision}"
    elif precision is not None:
        yield "precision", str(precision)
    yield from _architecture(config)
    yield from _languages(trained)
    if "src_vocab_size" in facts:
        yield "vocabulary", _vocabulary(facts, joint=facts["joint"], kind=None)
    state = _tree(facts, "state")
    if "averaged" in provenance:
        averaged = _list(provenance["averaged"])
        what = "the checkpoints at steps " if all(isinstance(step, int) for step in averaged) else ""
        yield "origin", f"average of {what}{_names(averaged)}"
    elif "step" in provenance:
        yield "origin", f"checkpoint at step {_number(provenance['step'])}"
    if state:
        yield "progress", _progress(state, trained)
        yield from _best(state, trained)
    if scores := _scores(_tree(provenance, "scores")):
        yield "dev set", scores
    yield from _training_text(trained)


def _run_rows(found: "Inspection") -> Iterator[Row]:
    facts, config = found.facts, found.config
    yield "state", f"finished: {facts['ended']}" if "ended" in facts else "not finished"
    if "step" in facts:
        yield "progress", _progress(facts, config)
    if last := _tree(facts, "last_train"):
        speed = f"{last['tgt_tokens_per_s']:,.0f} tokens/s" if isinstance(last.get("tgt_tokens_per_s"), float) else ""
        yield "training", f"{'  '.join(filter(None, [_scores(last), speed]))} at step {_number(last.get('step'))}"
    if valid := _tree(facts, "last_valid"):
        yield "dev set", f"{_scores(valid)} at step {_number(valid.get('step'))}"
    yield from _best(facts, config)
    names = list(facts["checkpoints"])
    yield "checkpoints", f"{len(names)}: {_names(names[::-1])}" if names else "none"
    yield "model", f"{found.path / 'model'}" if facts["has_model"] else "none yet"
    if start := _tree(facts, "last_start"):
        yield "parameters", f"{_number(start.get('parameters'))} in {start.get('precision')} on {start.get('world_size')} x {start.get('device')}"
    yield from _architecture(config)
    yield from _languages(config)
    if "src_vocab_size" in facts:
        yield "vocabulary", _vocabulary(facts, joint=facts["joint"], kind=None)
    yield from _training_text(config)
    if start and start.get("pairs") is not None:
        yield "pairs", f"{_number(start['pairs'])}, {_number(start.get('updates_per_epoch'))} updates per epoch"


# --- parts ------------------------------------------------------------------------------------------------------------------------------


def _architecture(config: Mapping[str, Any]) -> Iterator[Row]:
    model = _tree(config, "model")
    if "d_model" in model:
        value = (
            f"{model.get('num_encoder_layers')} + {model.get('num_decoder_layers')} layers, width {model['d_model']}, "
            f"feed-forward {model.get('ffn_dim')}, {model.get('num_heads')} heads, {model.get('norm')}-norm, {model.get('activation')}"
        )
        yield "architecture", value


def _languages(config: Mapping[str, Any]) -> Iterator[Row]:
    data = _tree(config, "data")
    if data.get("src_lang") or data.get("tgt_lang"):
        yield "languages", f"{data.get('src_lang') or '?'} to {data.get('tgt_lang') or '?'}"


def _training_text(config: Mapping[str, Any]) -> Iterator[Row]:
    data = _tree(config, "data")
    if text := _list(data.get("train")) or list(filter(None, [data.get("shards")])):
        yield "trained on", _names(text)
    if origin := _tree(config, "training").get("init_from"):
        yield "began as", str(origin)


def _vocabulary(facts: Mapping[str, Any], *, joint: bool, kind: str | None) -> str:
    src, tgt = facts["src_vocab_size"], facts["tgt_vocab_size"]
    sizes = f"{_number(src)} pieces, shared by both sides" if joint else f"{_number(src)} source and {_number(tgt)} target pieces"
    return sizes + (f", {kind}" if kind else "")


def _progress(state: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    limit = _tree(config, "training").get("max_steps")
    parts = [f"step {_number(state.get('step'))}" + (f" of {_number(limit)}" if limit else "")]
    if isinstance(state.get("epoch"), int):
        parts.append(f"epoch {max(1, state['epoch'] + bool(state.get('pool') or state.get('position')))}")
    if state.get("num_tgt_tokens"):
        parts.append(f"{_number(state['num_tgt_tokens'])} target tokens")
    if isinstance(state.get("elapsed_s"), int | float):
        parts.append(format_seconds(state["elapsed_s"]))
    return ", ".join(parts)


def _best(state: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Row]:
    if state.get("best_value") is not None:
        metric = str(_tree(config, "validation").get("metric"))
        yield "best", f"{_scores({metric: state['best_value']}) or _number(state['best_value'])} at step {_number(state.get('best_step'))}"


def _scores(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{label} {values[name]:.2f}" for name, label in _SCORES.items() if isinstance(values.get(name), int | float))


def _names(values: list[Any]) -> str:
    more = len(values) - MAX_NAMES
    return ", ".join(map(str, values[:MAX_NAMES])) + (f" and {more} more" if more > 0 else "")


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def _tree(value: Any, key: str | None = None) -> Mapping[str, Any]:
    """A part of a tree that has keys; empty where it is missing or something else."""
    part = value if key is None else value.get(key)
    return part if isinstance(part, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
