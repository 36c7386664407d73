"""`mtkit bench`."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mtkit.cli import console
from mtkit.cli.console import DeviceOption, JsonOption, ThreadsOption
from mtkit.errors import DataError, UsageError

bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine: medians of repeats in steady state, warm-up left out.")

RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Measurements; the median counts.")]
PrecisionOption = Annotated[Literal["auto", "fp32", "bf16", "fp16", "int8"], typer.Option("--precision", help="As for `mtkit translate`.")]
EngineOption = Annotated[Literal["mtkit", "slots"], typer.Option("--engine", help="As for `mtkit translate`.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a config key, such as batch.max_tokens=4096.")]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.add_typer(bench_app, name="bench", epilog="Example: mtkit bench train --preset tiny --json")
    bench_app.command("data", epilog="Example: mtkit bench data --pairs 10000000 --json")(data)
    bench_app.command("preprocess", epilog="Example: mtkit bench preprocess --src train.en --tgt train.de --tokenizer tok")(preprocess)
    bench_app.command("search", epilog="Example: mtkit bench search --preset base --precision int8 --beam-size 4")(search)
    bench_app.command("train", epilog="Example: mtkit bench train --preset base --mean-length 27")(train)
    bench_app.command("translate", epilog="Example: mtkit bench translate runs/en-de/model --src test.en --ref test.de")(translate)


def data(
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Pairs of generated data; 200 million take 13 GB.")] = 1_000_000,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to keep the generated data, or find it again; default: removed afterwards.")
    ] = None,
    mean_length: Annotated[float, typer.Option("--mean-length", min=2, help="Target tokens of a generated pair.")] = 12.0,
    pools: Annotated[int, typer.Option("--pools", min=1, help="Pools of 131072 pairs to read for the speeds.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Time and memory to begin with a large corpus and to go on in the middle, and the speed of the batches; nothing is trained."""
    from mtkit.benchmark.data import bench_data, generate_shards

    with tempfile.TemporaryDirectory() as temporary:
        place = directory or Path(temporary) / "shards"
        generate_shards(place, num_pairs=pairs, mean_length=mean_length)
        report = bench_data(place, num_pools=pools)
    _report([dataclasses.asdict(report)], as_json=as_json)


def preprocess(
    src: Annotated[Path | None, typer.Option("--src", help="Source text; default: generated.")] = None,
    tgt: Annotated[Path | None, typer.Option("--tgt", help="Target text.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A tokenizer, model or run; default: one of 8000 pieces, trained on the text.")
    ] = None,
    pairs: Annotated[int, typer.Option("--pairs", min=50_000, help="Pairs of generated text, enough for the tokenizer.")] = 200_000,
    workers: Annotated[list[int] | None, typer.Option("--workers", min=1, help="Repeatable; default: 1 and one per core.")] = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Lines per second, both sides counted, from text files to a finished shard set."""
    from mtkit.benchmark.preprocess import bench_preprocess
    from mtkit.benchmark.synthetic import synthetic_text
    from mtkit.checkpoint.layout import load_tokenizer
    from mtkit.cores import num_cores
    from mtkit.data.tokenizer import TokenizerConfig, train_tokenizer
    from mtkit.files import open_output, read_lines

    if (src is None) != (tgt is None):
        raise UsageError("--src and --tgt go together")
    with tempfile.TemporaryDirectory() as directory:
        if src is None or tgt is None:
            src, tgt = Path(directory) / "text.src", Path(directory) / "text.tgt"
            with open_output(src) as src_writer, open_output(tgt) as tgt_writer:
                for left, right in synthetic_text(pairs):
                    src_writer.write(left)
                    tgt_writer.write(right)
        if tokenizer is None:
            sample = zip(read_lines(src)[:50_000], read_lines(tgt)[:50_000], strict=False)
            loaded = train_tokenizer(sample, TokenizerConfig(vocab_size=8000))
        else:
            loaded = load_tokenizer(tokenizer)
        counts = workers or sorted({1, num_cores()})
        _report([dataclasses.asdict(speed) for speed in bench_preprocess((src, tgt), loaded, workers=counts, repeats=repeats)], as_json=as_json)


def train(
    preset: Annotated[str, typer.Option("--preset", help="tiny, small, base, big or deep.")] = "base",
    shards: Annotated[Path | None, typer.Option("--shards", help="Real data that `mtkit preprocess` wrote; default: generated.")] = None,
    mean_length: Annotated[float, typer.Option("--mean-length", min=2, help="Target tokens of a generated pair: WMT14 has 27, Multi30k 15.")] = 27.0,
    updates: Annotated[int, typer.Option("--updates", min=1, help="Updates of each repeat.")] = 20,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Updates left out before the first repeat.")] = 5,
    overrides: SetOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Target tokens per second, padding not counted, and how far they are from what matrix products alone would allow."""
    import torch

    from mtkit.benchmark.train import bench_train
    from mtkit.cli.train import resolve_config
    from mtkit.data.pools import ShardPools
    from mtkit.data.shards import ShardSet
    from mtkit.model.device import resolve_device

    config = resolve_config(preset=preset, config_file=None, overrides=overrides or [], flags={}).config
    if threads is not None:
        torch.set_num_threads(threads)
    data = None if shards is None else ShardSet.open(shards)
    report = bench_train(
        config,
        device=resolve_device(device),
        pairs=None if data is None else ShardPools(data, seed=config.seed).read(0, 0),
        vocab_sizes=None if data is None else (data.tokenizer.src_vocab_size, data.tokenizer.tgt_vocab_size),
        mean_length=mean_length,
        updates=updates,
        warmup_updates=warmup,
        repeats=repeats,
    )
    _report([dataclasses.asdict(report)], as_json=as_json)


def search(
    preset: Annotated[str, typer.Option("--preset", help="Architecture: tiny, small, base, big or deep.")] = "base",
    vocab_size: Annotated[int, typer.Option("--vocab-size", min=8, help="Pieces of both languages.")] = 32_000,
    beam_size: Annotated[int, typer.Option("--beam-size", min=1, help="1 is greedy search.")] = 4,
    sentences: Annotated[int, typer.Option("--sentences", min=1, help="In each repeat.")] = 128,
    batch_sentences: Annotated[int, typer.Option("--batch-sentences", min=1, help="Searched together.")] = 32,
    engine: EngineOption = "mtkit",
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    threads: ThreadsOption = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Target tokens per second of the search alone: random weights, sources of 20 to 30 tokens, translations of 25."""
    from mtkit.benchmark.search import bench_search
    from mtkit.cores import num_threads
    from mtkit.model.config import MODEL_PRESETS
    from mtkit.model.device import resolve_device

    if preset not in MODEL_PRESETS:
        raise UsageError(f"there is no preset {preset!r}", hint=f"There are {', '.join(MODEL_PRESETS)}.")
    place = resolve_device(device)
    report = bench_search(
        MODEL_PRESETS[preset],
        vocab_size=vocab_size,
        device=place,
        precision=precision,
        threads=(threads or num_threads()) if place.type == "cpu" else 1,
        beam_size=beam_size,
        sentences=sentences,
        batch_sentences=batch_sentences,
        in_slots=engine == "slots",
        repeats=repeats,
    )
    _report([dataclasses.asdict(report)], as_json=as_json)


def translate(
    model: Annotated[list[Path], typer.Argument(help="A model, checkpoint or run directory; several are an ensemble.")],
    src: Annotated[Path, typer.Option("--src", help="Source text.")],
    ref: Annotated[Path | None, typer.Option("--ref", help="Reference, for BLEU beside the speed.")] = None,
    tgt_lang: Annotated[str | None, typer.Option("--tgt-lang", help="Language of the reference, which picks BLEU's tokenizer.")] = None,
    beam_size: Annotated[int | None, typer.Option("--beam-size", min=1, help="1 is greedy search. [default: 4]")] = None,
    batch_tokens: Annotated[int | None, typer.Option("--batch-tokens", min=1, help="Source positions of a batch.")] = None,
    engine: EngineOption = "mtkit",
    overrides: SetOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    threads: ThreadsOption = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Sentences and target tokens per second of `mtkit translate`, model loading not counted."""
    from mtkit import config as codec
    from mtkit.benchmark.translate import bench_translate
    from mtkit.decoding.lines import SearchConfig
    from mtkit.decoding.loading import load_translator
    from mtkit.files import read_lines
    from mtkit.model.device import resolve_device

    layers = [codec.Layer(name=f"--set {text}", data=codec.parse_override(text)) for text in overrides or []]
    layers += [] if beam_size is None else [codec.Layer(name="--beam-size", data={"beam_size": beam_size})]
    config = codec.resolve(SearchConfig, layers).config
    translator, tokenizer = load_translator(
        model, search=config, device=device, precision=precision, threads=threads, batch_tokens=batch_tokens, in_slots=engine == "slots"
    )
    lines = read_lines(src)
    if not lines:
        raise DataError(f"{src}: is empty")
    references = None if ref is None else read_lines(ref)
    if references is not None and len(references) != len(lines):
        raise UsageError(f"{src} has {len(lines)} lines, but {ref} has {len(references)}")
    report = bench_translate(translator, tokenizer, lines, device=resolve_device(device), references=references, tgt_lang=tgt_lang, repeats=repeats)
    _report([{"computes_in": translator.description, **dataclasses.asdict(report)}], as_json=as_json)


def _report(reports: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        console.print_json(reports if len(reports) > 1 else reports[0])
        return
    for report in reports:
        for key, value in report.items():
            console.say(f"{key:<28} {_show(key, value)}")


def _show(key: str, value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"median", "lowest", "highest", "repeats"}:
        return f"{value['median']:,.1f}   (lowest {value['lowest']:,.1f}, highest {value['highest']:,.1f}, {value['repeats']} repeats)"
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    if isinstance(value, float):
        is_share = key.endswith("_share") or key == "utilization"
        return f"{value:.2%}" if is_share else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return str(value)
