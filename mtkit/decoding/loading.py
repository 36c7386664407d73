"""From model directories to a translator: loads models, and picks the precision and the threads that are fast where it runs."""

from collections.abc import Sequence
from pathlib import Path

import torch

from mtkit.checkpoint.format import BuildFn, build_model, load_model, read_description
from mtkit.checkpoint.layout import find_model
from mtkit.cores import num_threads
from mtkit.data.tokenizer import Tokenizer
from mtkit.decoding.engine import slots
from mtkit.decoding.lines import BATCH_TOKENS, SearchConfig
from mtkit.decoding.quantize import NarrowPrecision, build_quantized, quantize_linear_layers
from mtkit.decoding.translator import SMALLEST_THREADED_WIDTH, Translator
from mtkit.errors import ArtefactError, UsageError
from mtkit.model.device import InferencePrecisionName, keep_freed_memory, resolve_device, resolve_inference_precision
from mtkit.model.transformer import Transformer
from mtkit.native import kernels

SMALLEST_INT8_WIDTH = 256
"""Width of a model from which int8 is the default on a CPU. Narrower ones are fast enough to be exact: what they translate is what validation saw."""


WIDE_BATCH_TOKENS = 768
"""Source positions of a batch of a wide model on a CPU, by default."""


def load_translator(
    paths: Sequence[Path | str],
    *,
    search: SearchConfig | None = None,
    device: str = "auto",
    precision: InferencePrecisionName = "auto",
    threads: int | None = None,
    batch_tokens: int | None = None,
    in_slots: bool = False,
) -> tuple[Translator, Tokenizer]:
    """Load one model, or several for an ensemble, and set up the fastest way to translate with them.

    Args:
        paths: Model, checkpoint or run directories.
        search: How to search.
        device: auto, cpu, cuda or cuda:N.
        precision: `auto` is fp16 on a GPU; on a CPU int8, or fp32 for a model narrower than `SMALLEST_INT8_WIDTH`.
        threads: On a CPU; None = one per core.
        batch_tokens: Source positions of a batch; None = the default.
        in_slots: Search as `mtkit.decoding.engine.slots` does.

    Returns:
        The translator, whose description tells what was picked, and the models' tokenizer.

    Raises:
        ArtefactError: A model cannot be loaded, or their tokenizers differ.
        UsageError: There is no such device, or it has no such precision; or slots with several models or sampling.
    """
    if in_slots and (len(paths) > 1 or (search or SearchConfig()).method != "beam"):
        raise UsageError("--engine slots is for one model and a beam", hint="Leave it out for ensembles and for sampling.")
    place = resolve_device(device)
    widths = [read_description(find_model(Path(path))).model.d_model for path in paths]
    chosen, reason = choose_precision(precision, place, width=min(widths))
    narrow = _narrow(chosen, place)
    models, tokenizer = load_models(paths, build=build_model if narrow is None else build_quantized(narrow))
    if narrow is None:
        assert chosen != "int8"
        models = [model.to(place, resolve_inference_precision(chosen, place).dtype) for model in models]
    workers = None
    if place.type == "cpu":
        keep_freed_memory()
        workers = threads or num_threads()
    if in_slots and workers is not None:
        torch.set_num_threads(workers)
    where = str(place) if workers is None else f"{workers} thread{'s' if workers != 1 else ''} of the CPU"
    translator = Translator(
        models,
        tokenizer,
        search=search,
        device=place,
        batch_tokens=batch_tokens or (slots.BATCH_TOKENS if in_slots else _usual_batch_tokens(place, width=min(widths))),
        workers=None if in_slots else workers,
        in_slots=in_slots,
        description=f"{chosen}{reason} on {where}" + (_in_slots(place) if in_slots else "") + _missing_kernels(place, in_slots=in_slots),
    )
    return translator, tokenizer


def _in_slots(device: torch.device) -> str:
    return ", in slots" + ("; made for GPUs, --engine mtkit is several times faster on a CPU" if device.type == "cpu" else "")


def _usual_batch_tokens(device: torch.device, *, width: int) -> int:
    """On a CPU smaller batches of wide models are as fast, and their hypotheses take much memory: 12 KB a token with the `base` preset."""
    return WIDE_BATCH_TOKENS if device.type == "cpu" and width >= SMALLEST_THREADED_WIDTH else BATCH_TOKENS


def _missing_kernels(device: torch.device, *, in_slots: bool) -> str:
    """A remark for whoever could have it faster."""
    if device.type != "cpu" or in_slots or kernels.available():
        return ""
    return f"; several times slower than it could be, since the kernels are not compiled: {kernels.reason()}"


def choose_precision(precision: InferencePrecisionName, device: torch.device, *, width: int) -> tuple[InferencePrecisionName, str]:
    """The number format to translate in.

    Args:
        precision: See `load_translator`.
        device: Where.
        width: Of the narrowest model.

    Returns:
        Its name, never `auto`, and why it was picked, for a person; empty if it was asked for or is the only one to think of.

    Raises:
        UsageError: The device has no such precision.
    """
    if precision == "int8" and device.type != "cpu":
        raise UsageError("precision int8 is for CPUs", hint=f"On {device} use fp16, or --device cpu.")
    if precision == "int8":
        return "int8", ""
    if precision == "auto" and device.type == "cpu":
        if width >= SMALLEST_INT8_WIDTH:
            return "int8", " (the fastest here; --precision fp32 is exact)"
        faster = kernels.int8_level() > 0
        return "fp32", f" (exact; at width {width} --precision int8 is faster)" if faster else f" (width {width} is too small for int8)"
    return resolve_inference_precision(precision, device).name, ""


def in_precision(model: Transformer, precision: InferencePrecisionName, device: torch.device) -> tuple[Transformer, str]:
    """Bring a model to where and how it translates; it cannot be trained or stored afterwards.

    Args:
        model: In fp32.
        precision: See `load_translator`.
        device: Where it goes.

    Returns:
        The model, and the name of the precision, with the reason where it was picked.

    Raises:
        UsageError: The device has no such precision.
    """
    chosen, reason = choose_precision(precision, device, width=model.config.d_model)
    if (narrow := _narrow(chosen, device)) is not None:
        return quantize_linear_layers(model, narrow), f"{chosen}{reason}"
    assert chosen != "int8"
    return model.to(device, resolve_inference_precision(chosen, device).dtype), f"{chosen}{reason}"


def _narrow(chosen: InferencePrecisionName, device: torch.device) -> NarrowPrecision | None:
    """The precision if it is one of linear layers only; None if it is one of the whole model."""
    if chosen == "int8":
        return "int8"
    return "bf16" if chosen == "bf16" and device.type == "cpu" and kernels.has_bf16() else None


def load_models(paths: Sequence[Path | str], *, build: BuildFn = build_model) -> tuple[list[Transformer], Tokenizer]:
    """Load one model, or several for an ensemble, on the CPU.

    Args:
        paths: Model, checkpoint or run directories.
        build: What makes them of their weights; in fp32 by default.

    Raises:
        ArtefactError: One cannot be loaded, or their tokenizers differ.
    """
    loaded = [load_model(path, build=build) for path in paths]
    first = loaded[0]
    for other in loaded[1:]:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise ArtefactError(
                f"{first.path} and {other.path} have different tokenizers "
                f"({first.tokenizer.fingerprint[:16]} and {other.tokenizer.fingerprint[:16]}), so they cannot translate together",
                hint="The models of an ensemble must be trained with one tokenizer.",
            )
    return [item.model for item in loaded], first.tokenizer
