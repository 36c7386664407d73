"""From model directories to a translator: loads models, and picks the precision and the threads that are fast where it runs."""

from collections.abc import Sequence
from pathlib import Path

import torch

from mtkit.checkpoint.format import load_model
from mtkit.data.tokenizer import Tokenizer
from mtkit.decoding.engine import slots
from mtkit.decoding.quantize import quantize_linear_layers
from mtkit.decoding.translator import BATCH_TOKENS, SearchConfig, Translator
from mtkit.distributed import num_cores
from mtkit.errors import ArtefactError, UsageError
from mtkit.model.device import InferencePrecisionName, keep_freed_memory, resolve_device, resolve_inference_precision
from mtkit.model.transformer import Transformer
from mtkit.native import kernels

SMALLEST_INT8_WIDTH = 256
"""Width of a model from which products of 8-bit integers are faster on any CPU; those of narrower models are too small for it."""


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
    models, tokenizer = load_models(paths)
    models, name = in_precision(models, precision, place)
    workers = None
    if place.type == "cpu":
        keep_freed_memory()
        workers = threads or num_cores()
    if in_slots and workers is not None:
        torch.set_num_threads(workers)
    where = str(place) if workers is None else f"{workers} thread{'s' if workers != 1 else ''} of the CPU"
    translator = Translator(
        models,
        tokenizer,
        search=search,
        device=place,
        batch_tokens=batch_tokens or (slots.BATCH_TOKENS if in_slots else BATCH_TOKENS),
        workers=None if in_slots else workers,
        in_slots=in_slots,
        description=f"{name} on {where}" + (", in slots" if in_slots else "") + _missing_kernels(place, in_slots=in_slots),
    )
    return translator, tokenizer


def _missing_kernels(device: torch.device, *, in_slots: bool) -> str:
    """A remark for whoever could have it faster."""
    if device.type != "cpu" or in_slots or kernels.available():
        return ""
    return f"; several times slower than it could be, since the kernels are not compiled: {kernels.reason()}"


def in_precision(models: Sequence[Transformer], precision: InferencePrecisionName, device: torch.device) -> tuple[list[Transformer], str]:
    """Bring models to where and how they translate; they cannot be trained or stored afterwards.

    Args:
        models: In fp32.
        precision: See `load_translator`.
        device: Where they go.

    Returns:
        The models, and the name of the precision, with the reason where it was picked.

    Raises:
        UsageError: The device has no such precision.
    """
    if precision == "int8" and device.type != "cpu":
        raise UsageError("precision int8 is for CPUs", hint=f"On {device} use fp16, or --device cpu.")
    reason = ""
    if precision == "auto" and device.type == "cpu":
        width = min(model.config.d_model for model in models)
        precision = "int8" if width >= SMALLEST_INT8_WIDTH else "fp32"
        reason = f" (faster at width {width}; --precision fp32 is exact)" if precision == "int8" else f" (width {width} is too small for int8)"
    if precision == "int8":
        return [quantize_linear_layers(model) for model in models], f"int8{reason}"
    resolved = resolve_inference_precision(precision, device)
    return [model.to(device, resolved.dtype) for model in models], f"{resolved.name}{reason}"


def load_models(paths: Sequence[Path | str]) -> tuple[list[Transformer], Tokenizer]:
    """Load one model, or several for an ensemble, on the CPU in fp32.

    Args:
        paths: Model, checkpoint or run directories.

    Raises:
        ArtefactError: One cannot be loaded, or their tokenizers differ.
    """
    loaded = [load_model(path) for path in paths]
    first = loaded[0]
    for other in loaded[1:]:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise ArtefactError(
                f"{first.path} and {other.path} have different tokenizers "
                f"({first.tokenizer.fingerprint[:16]} and {other.tokenizer.fingerprint[:16]}), so they cannot translate together",
                hint="The models of an ensemble must be trained with one tokenizer.",
            )
    return [item.model for item in loaded], first.tokenizer
