"""`mtkit score`: how good translations are, or how probable a model finds them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtkit import files
from mtkit.cli import console
from mtkit.cli.corpora import require_one_stdin
from mtkit.errors import UsageError

if TYPE_CHECKING:
    from mtkit.evaluation.checks import NamedLines
    from mtkit.evaluation.metrics import Score, SentenceScores
    from mtkit.evaluation.testsets import TestSet
    from mtkit.model.device import InferencePrecisionName

EPILOG = (
    "Examples: mtkit score -r test.de hyp.de  ·  mtkit score --test-set wmt14/full -l en-de base.de big.de  ·  "
    "mtkit score --model runs/x --src test.en --tgt hyp.de"
)


_NAMED_LINES = 10
_MANY_WORDS = 300
"""In a line: TER takes seconds for it, and minutes for one of a thousand."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("score", epilog=EPILOG)(score)


def score(
    hyps: Annotated[list[str] | None, typer.Argument(metavar="HYP", help="Translations, one file per system; - is stdin.")] = None,
    *,
    refs: Annotated[list[str] | None, typer.Option("--ref", "-r", metavar="FILE", help="Raw reference text; give it once per reference.")] = None,
    test_set: Annotated[str | None, typer.Option("--test-set", "-t", help="References of a public test set: wmt14/full, wmt22 ...")] = None,
    lang_pair: Annotated[str | None, typer.Option("--lang-pair", "-l", help="Its languages: en-de.")] = None,
    tgt_lang: Annotated[str | None, typer.Option("--tgt-lang", help="Target language; zh, ja and ko have their own BLEU tokenizers.")] = None,
    metrics: Annotated[str, typer.Option("--metrics", "-m", help="Among bleu, chrf, chrf++, ter, with commas.")] = "bleu,chrf",
    tokenize: Annotated[str | None, typer.Option("--tokenize", help="BLEU's tokenizer: 13a, intl, zh, char, flores200, none ...")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    bootstrap: Annotated[int, typer.Option("--bootstrap", min=0, help="Resamples for intervals and p-values, at least 40; 0 for none.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the resampling.")] = 12345,
    sentence: Annotated[bool, typer.Option("--sentence", help="Print one line of scores per sentence.")] = False,
    src: Annotated[str | None, typer.Option("--src", "-s", metavar="FILE", help="Source text: for --model, or to notice untranslated text.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Print this model's log-probability of each pair of --src and --tgt.")] = None,
    tgt: Annotated[str | None, typer.Option("--tgt", metavar="FILE", help="Target text for --model.")] = None,
    device: console.DeviceOption = "auto",
    threads: console.ThreadsOption = None,
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "int8"],
        typer.Option("--precision", help="With --model: fp32 is exact; auto computes as `mtkit translate` does by default."),
    ] = "fp32",
    force: Annotated[bool, typer.Option("--force", help="Score even text that looks wrong.")] = False,
    as_json: console.JsonOption = False,
    quiet: console.QuietOption = False,
) -> None:
    """Score translations against raw references with sacreBLEU: BLEU, chrF, TER, 95 % intervals, signatures.

    Prints one line per metric: name, score, 95 % interval, parts, signature. Several systems are also compared with the first by paired
    bootstrap (p-value). With --model, prints per line the log-probability of the target (natural logarithm, the sum over its tokens) and the
    number of its tokens, end of sentence included, separated by a tab. The text is segmented anew: where a search has spelt a translation in other
    pieces, or was cut at its length limit, its own log-probability is another.
    """
    if model is not None:
        if hyps or refs or test_set:
            raise UsageError("--model scores the pairs of --src and --tgt and takes no other texts")
        if src is None or tgt is None:
            raise UsageError("--model needs --src and --tgt")
        _score_pairs(model, src, tgt, device=device, precision=precision, threads=threads, as_json=as_json, quiet=quiet)
        return
    if tgt is not None:
        raise UsageError("--tgt belongs to --model", hint="Give translations as plain arguments and references with --ref.")
    if not hyps:
        raise UsageError("there is nothing to score", hint="Give a file of translations, or - for stdin.")
    from mtkit.evaluation.metrics import parse_metrics, sentence_scores, system_scores, target_language, tokenizer_for

    names = parse_metrics(metrics)
    references, source, public = _references(refs or [], test_set, lang_pair, src, hyps)
    target_lang = tgt_lang or (target_language(lang_pair) if lang_pair else None)
    systems = [_read(hyp) for hyp in hyps]
    warnings = _check(systems, references, source, tokenize=tokenize or tokenizer_for(target_lang), lowercase=lowercase, force=force)
    for warning in warnings:
        console.warn(warning)

    if "ter" in names:
        _warn_of_slow_lines([*systems, *references])
    ref_lines = [ref.lines for ref in references]
    items = {"test": public.name, "lang": public.lang_pair} if public else None
    settings: dict[str, Any] = {"metrics": names, "tokenize": tokenize, "lowercase": lowercase, "target_lang": target_lang, "signature_items": items}
    table = system_scores([system.lines for system in systems], ref_lines, num_bootstrap=bootstrap, seed=seed, **settings)
    by_sentence = [sentence_scores(system.lines, ref_lines, **settings) for system in systems] if sentence else []
    if as_json:
        console.print_json(_document(systems, references, table, by_sentence, warnings))
        return
    with files.open_output(files.STDIO) as output:
        if sentence:
            _write_sentences(output, by_sentence)
        else:
            for line in _lines(systems, table):
                output.write(line)
    if sentence:
        for line in [*_columns(systems, by_sentence), *_lines(systems, table)]:
            console.say(line, quiet=quiet)


def _score_pairs(
    model_path: Path,
    src: str,
    tgt: str,
    *,
    device: str,
    precision: "InferencePrecisionName",
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the log-probability that a model gives to each target line."""
    import math

    import torch

    from mtkit.checkpoint.format import load_model
    from mtkit.cores import num_threads
    from mtkit.decoding.loading import in_precision
    from mtkit.decoding.scoring import MAX_TARGET_LENGTH, score_pairs
    from mtkit.decoding.steps import MAX_SOURCE_LENGTH
    from mtkit.evaluation.checks import check_line_counts, find_markup
    from mtkit.model.device import resolve_device

    require_one_stdin([src, tgt])
    texts = [_read(src), _read(tgt)]
    check_line_counts(texts)
    for markup in filter(None, map(find_markup, texts)):
        console.warn(f"{markup.message}; its tags are scored as text")
    torch.set_num_threads(threads or num_threads())
    place = resolve_device(device)
    loaded = load_model(model_path)
    model, _ = in_precision(loaded.model, precision, place)
    scores = score_pairs(model, loaded.tokenizer, texts[0].lines, texts[1].lines)
    sides = ((item.is_source_cut for item in scores), (item.is_target_cut for item in scores))
    for text, side, limit in zip(texts, sides, (MAX_SOURCE_LENGTH, MAX_TARGET_LENGTH), strict=True):
        if cut := [number for number, is_cut in enumerate(side, start=1) if is_cut]:
            named, more = ", ".join(map(str, cut[:_NAMED_LINES])), len(cut) - _NAMED_LINES
            lines = f"line{'s' if len(cut) > 1 else ''} {named}{f' and {more} more' if more > 0 else ''}"
            console.warn(f"{text.name}: {lines} longer than {limit} tokens, and scored by the first {limit}")
    log_prob, num_tokens = math.fsum(item.log_prob for item in scores), sum(item.num_tokens for item in scores)
    perplexity = math.exp(min(-log_prob / num_tokens, 700.0))
    if as_json:
        pairs = [
            {"log_prob": item.log_prob, "num_tokens": item.num_tokens, "source_cut": item.is_source_cut, "target_cut": item.is_target_cut}
            for item in scores
        ]
        console.print_json({"model": str(loaded.path), "log_prob": log_prob, "num_tokens": num_tokens, "perplexity": perplexity, "pairs": pairs})
        return
    with files.open_output(files.STDIO) as output:
        for item in scores:
            output.write(f"{item.log_prob:.6f}\t{item.num_tokens}")
    console.say(
        f"{len(scores)} pairs, {num_tokens} target tokens, log-probability {log_prob:.2f}, perplexity per token {perplexity:.3f}", quiet=quiet
    )


def _references(
    refs: list[str], test_set: str | None, lang_pair: str | None, src: str | None, hyps: list[str]
) -> "tuple[list[NamedLines], NamedLines | None, TestSet | None]":
    """The references, the source where it is known, and the public test set if they come from one."""
    require_one_stdin([*refs, *hyps, src or ""])
    if test_set is None:
        if not refs:
            raise UsageError("there are no references", hint="Give --ref FILE, or --test-set NAME -l SRC-TGT.")
        return [_read(ref) for ref in refs], _read(src) if src else None, None
    if refs or src:
        raise UsageError("--test-set brings its own source and references; leave out --ref and --src")
    if lang_pair is None:
        raise UsageError("--test-set needs the languages", hint="Give --lang-pair, such as -l en-de.")
    from mtkit.evaluation.testsets import load_test_set

    public = load_test_set(test_set, lang_pair)
    return public.references, public.source, public


def _read(path: str) -> "NamedLines":
    from mtkit.evaluation.checks import NamedLines

    with files.open_lines(path) as reader:
        lines = list(reader)
    if reader.num_bad_utf8:
        console.warn(f"{reader.name}: {reader.num_bad_utf8} lines hold bytes that are not UTF-8; they became U+FFFD")
    if reader.num_cut:
        console.warn(f"{reader.name}: {reader.num_cut} lines are longer than {files.MAX_LINE_BYTES} bytes and were cut there")
    return NamedLines(name=reader.name, lines=lines)


def _check(
    systems: "list[NamedLines]",
    references: "list[NamedLines]",
    source: "NamedLines | None",
    *,
    tokenize: str,
    lowercase: bool,
    force: bool,
) -> list[str]:
    """Refuse what cannot be scored, and return warnings about the rest."""
    from mtkit.evaluation.checks import check_line_counts, find_mistakes, refuse

    check_line_counts([*references, *([source] if source else []), *systems])
    findings = find_mistakes(systems, references, source=source, tokenize=tokenize, lowercase=lowercase)
    if not force:
        refuse(findings)
    return [f"{finding.message}. {finding.hint}" for finding in findings]


def _warn_of_slow_lines(texts: "list[NamedLines]") -> None:
    """TER tries to move every run of words, which takes long where there are many in a line."""
    for text in texts:
        if slow := [number for number, line in enumerate(text.lines, start=1) if line.count(" ") >= _MANY_WORDS]:
            more = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
            console.warn(
                f"{text.name}: TER takes long for lines of more than {_MANY_WORDS} words, as line {slow[0]}{more}; leave it out of --metrics"
            )


def _lines(systems: "list[NamedLines]", table: "list[list[Score]]") -> list[str]:
    """One line per system and metric."""
    width = max(len(system.name) for system in systems)
    lines = []
    for number, (system, scores) in enumerate(zip(systems, table, strict=True)):
        for item in scores:
            words = [f"{item.name} {item.value:.2f}"]
            if item.low is not None and item.high is not None:
                words[0] += f" [{item.low:.2f}, {item.high:.2f}]"
            if len(systems) > 1:
                words.insert(0, f"{system.name:<{width}}")
                if item.p_value is not None:
                    words.append(f"p={item.p_value:.3f}")
                elif item.low is not None and number == 0:
                    words.append("baseline")
            if item.metric == "bleu":
                details = item.details
                ratio = details["hyp_length"] / max(1, details["ref_length"])
                precisions = "/".join(f"{precision:.1f}" for precision in details["precisions"])
                words.append(f"{precisions} BP={details['brevity_penalty']:.3f} ratio={ratio:.3f}")
            lines.append("  ".join([*words, item.signature]))
    return lines


def _columns(systems: "list[NamedLines]", by_sentence: "list[list[SentenceScores]]") -> list[str]:
    """What the columns of the sentence scores mean."""
    columns = [(system.name, item) for system, scores in zip(systems, by_sentence, strict=True) for item in scores]
    return [f"column {number}: {name}  {item.name}  {item.signature}" for number, (name, item) in enumerate(columns, start=1)]


def _write_sentences(output: files.LineWriter, by_sentence: "list[list[SentenceScores]]") -> None:
    columns = [item.values for scores in by_sentence for item in scores]
    for row in zip(*columns, strict=True):
        output.write("\t".join(f"{value:.4f}" for value in row))


def _document(
    systems: "list[NamedLines]",
    references: "list[NamedLines]",
    table: "list[list[Score]]",
    by_sentence: "list[list[SentenceScores]]",
    warnings: list[str],
) -> dict[str, Any]:
    entries = []
    for number, (system, scores) in enumerate(zip(systems, table, strict=True)):
        entry: dict[str, Any] = {"name": system.name, "scores": [_entry(item) for item in scores]}
        if by_sentence:
            entry["sentences"] = [
                {"metric": item.metric, "name": item.name, "signature": item.signature, "scores": item.values} for item in by_sentence[number]
            ]
        entries.append(entry)
    return {
        "num_sentences": len(references[0].lines),
        "references": [ref.name for ref in references],
        "systems": entries,
        "warnings": warnings,
    }


def _entry(item: "Score") -> dict[str, Any]:
    return {
        "metric": item.metric,
        "name": item.name,
        "score": item.value,
        "low": item.low,
        "high": item.high,
        "p_value": item.p_value,
        "signature": item.signature,
        **item.details,
    }
