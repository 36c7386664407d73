"""The files of a model and of a checkpoint: safetensors and JSON, nothing that can run code.

A model directory (kind `model`) is all that a user needs to copy:

    config.json         the model's config, its vocabulary sizes, where it came from
    model.safetensors   one tensor per parameter, fp32 unless exported narrower (`narrow.py`); a tied one is stored once, under its first name
    tokenizer/          the tokenizer, byte for byte
    README.md           a card for people

A checkpoint directory (kind `checkpoint`) holds the same and what a training run needs to go on: `optimizer.safetensors`, `state.json`, and
`trained.safetensors` where `model.safetensors` holds a moving average of the trained weights.
"""

import contextlib
import dataclasses
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mtkit import config as codec
from mtkit.artefacts import atomic_directory, verify_directory
from mtkit.checkpoint.layout import CARD_NAME, CONFIG_NAME, MODEL_NAME, SCALE_SUFFIX, TOKENIZER_NAME, find_model, read_open_header, read_tensor_header
from mtkit.checkpoint.narrow import STORED_PRECISIONS, StoredPrecision, narrow, stored_shapes, stored_type, widen
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError, ConfigError, MTKitError, ResourceError
from mtkit.files import read_json, write_json
from mtkit.model.config import MAX_SIZE, ModelConfig
from mtkit.model.transformer import Transformer

FORMAT = 1
_MODEL_PARTS = (MODEL_NAME, CONFIG_NAME, TOKENIZER_NAME)
"""What a model consists of, also where it is a part of a checkpoint."""

_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """What `config.json` says of a model.

    Attributes:
        model: The architecture.
        src_vocab_size: Source pieces.
        tgt_vocab_size: Target pieces.
        tokenizer: Fingerprint of the tokenizer that the model was trained with.
        provenance: Where it came from: step, scores, training config, data; JSON-ready.
        precision: In which the weights are stored.
    """

    model: ModelConfig
    src_vocab_size: int
    tgt_vocab_size: int
    tokenizer: str
    provenance: dict[str, Any]
    precision: StoredPrecision = "fp32"

    def to_json(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "format": FORMAT,
            "model": codec.to_dict(self.model),
            "src_vocab_size": self.src_vocab_size,
            "tgt_vocab_size": self.tgt_vocab_size,
            "tokenizer": self.tokenizer,
            "provenance": self.provenance,
            "precision": self.precision,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model with all that is needed to use it.

    Attributes:
        model: In eval mode, on the device asked for, fp32.
        tokenizer: The one it was trained with.
        description: Its `config.json`.
        path: The directory it came from.
    """

    model: Transformer
    tokenizer: Tokenizer
    description: ModelDescription
    path: Path


def describe(model: Transformer, tokenizer: Tokenizer, *, provenance: Mapping[str, Any]) -> ModelDescription:
    """The description of a model in memory."""
    return ModelDescription(
        model=model.config,
        src_vocab_size=model.src_vocab_size,
        tgt_vocab_size=model.tgt_vocab_size,
        tokenizer=tokenizer.fingerprint,
        provenance=dict(provenance),
    )


def parameters_by_name(model: torch.nn.Module) -> dict[str, Tensor]:
    """Each parameter once, detached, under its first name: what a model file holds."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save_model(
    directory: Path,
    *,
    tensors: Mapping[str, Tensor],
    description: ModelDescription,
    tokenizer: Tokenizer,
    inputs: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model directory.

    Args:
        directory: Where; it appears only when complete.
        tensors: Each parameter once, as `parameters_by_name` gives them.
        description: What goes into `config.json`.
        tokenizer: Bundled byte for byte.
        inputs: Fingerprints of what the model was made from, for the manifest.
        overwrite: Replace a model that is there already.

    Raises:
        MTKitError: The directory exists or cannot be written.
        ResourceError: The disk is full.
    """
    with atomic_directory(directory, kind="model", config=description.to_json(), inputs=inputs, overwrite=overwrite) as temporary:
        write_model_files(temporary, tensors=tensors, description=description, tokenizer=tokenizer)


def save_narrow_model(loaded: LoadedModel, directory: Path, *, precision: StoredPrecision) -> None:
    """Write a model with its weights in fewer bits.

    Args:
        loaded: The model.
        directory: Where; it appears only when complete, and must not exist.
        precision: Of the stored weights.

    Raises:
        MTKitError: The directory exists or cannot be written, or the weights exceed the range of the precision.
        ResourceError: The disk is full.
    """
    save_model(
        directory,
        tensors=parameters_by_name(loaded.model),
        description=dataclasses.replace(loaded.description, precision=precision),
        tokenizer=loaded.tokenizer,
        inputs={"model": str(loaded.path)},
    )


def write_model_files(directory: Path, *, tensors: Mapping[str, Tensor], description: ModelDescription, tokenizer: Tokenizer) -> None:
    """Write the files of a model into a directory that somebody else seals."""
    try:
        stored = narrow(tensors, description.precision)
    except ValueError as error:
        raise MTKitError(f"the model cannot be stored in {description.precision}: {error}", hint="Use bf16 or int8.") from error
    write_tensors(directory / MODEL_NAME, stored)
    write_json(directory / CONFIG_NAME, description.to_json())
    (directory / TOKENIZER_NAME).mkdir()
    tokenizer.write_files(directory / TOKENIZER_NAME)
    (directory / CARD_NAME).write_text(_model_card(description, sum(tensor.numel() for tensor in tensors.values())), encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file.

    Raises:
        ResourceError: The disk is full.
    """
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        text = str(error)
        if "No space left" in text or "StorageFull" in text or "File too large" in text or "FileTooLarge" in text:
            raise ResourceError(f"{path}: cannot be written: {text}", hint="Free some space; nothing was half-written.") from error
        raise MTKitError(f"{path}: cannot be written: {text}") from error


def read_tensors(path: Path, *, shapes: Mapping[str, torch.Size] | None = None) -> dict[str, Tensor]:
    """Read a safetensors file into memory (a mapped file: pages are read when touched).

    Args:
        path: The file.
        shapes: The names and shapes that it has to hold, or None for any.

    Raises:
        ArtefactError: It is damaged, or its names or shapes are others; the message names the first that differs.
    """
    with _explained(path):
        if shapes is not None:
            check_shapes(path, shapes)
        return load_file(path)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """A block that reads a safetensors file."""
    try:
        yield
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise ArtefactError(f"{path}: is damaged: {error}", hint="Copy or make it anew.") from error


def check_shapes(path: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Compare the header of a safetensors file in fp32 with the names and shapes that it should hold, without reading a tensor."""
    _check_header(path, read_tensor_header(path), shapes, precision="fp32")


def _check_header(path: Path, header: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size], *, precision: StoredPrecision) -> None:
    found = {name: tuple(entry["shape"]) for name, entry in header.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if name not in found:
            raise ArtefactError(f"{path}: has no tensor {name}")
        if name not in shapes:
            raise ArtefactError(f"{path}: holds a tensor that the model lacks: {name!r}")
        if found[name] != tuple(shapes[name]):
            raise ArtefactError(f"{path}: {name} has the shape {list(found[name])}, and {list(shapes[name])} is needed")
        needed = stored_type(shapes[name], precision)
        if header[name].get("dtype") != needed:
            raise ArtefactError(f"{path}: {name} has the type {header[name].get('dtype')!r}, and {needed} is needed")


def read_description(directory: Path) -> ModelDescription:
    """Read `config.json` of a model or checkpoint directory.

    Raises:
        ArtefactError: It is missing, damaged or of another format.
    """
    path = directory / CONFIG_NAME
    value = read_json(path)
    try:
        if value["format"] != FORMAT:
            raise ArtefactError(f"{path}: has format {value['format']!r}, this mtkit reads format {FORMAT}")
        description = ModelDescription(
            model=codec.from_dict(ModelConfig, value["model"]),
            src_vocab_size=int(value["src_vocab_size"]),
            tgt_vocab_size=int(value["tgt_vocab_size"]),
            tokenizer=str(value["tokenizer"]),
            provenance=dict(value["provenance"]),
            precision=value.get("precision", "fp32"),
        )
    except ConfigError as error:
        raise ArtefactError(f"{path}: {error.message}", hint=error.hint) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ArtefactError(f"{path}: is not the config of a model: {error!r}") from error
    if description.precision not in STORED_PRECISIONS:
        raise ArtefactError(f"{path}: has weights in {description.precision!r}, this mtkit reads {', '.join(STORED_PRECISIONS)}")
    for key in ("src_vocab_size", "tgt_vocab_size"):
        if not 0 <= (size := getattr(description, key)) <= MAX_SIZE:
            raise ArtefactError(f"{path}: {key} is {size}, and 0 to {MAX_SIZE} are supported")
    return description


BuildFn = Callable[[ModelDescription, "StoredWeights"], Transformer]
"""Makes a model of a description and its weights."""


def load_model(path: Path | str, *, build: BuildFn | None = None) -> LoadedModel:
    """Load a model for use, after all of its files were compared with their manifest: a damaged one could translate as if it were whole.

    Args:
        path: A model directory, a checkpoint directory, or a run directory.
        build: What makes the model of its weights, on the CPU; None = `build_model`.

    Raises:
        ArtefactError: There is no model, it is damaged, or its parts do not fit each other.
    """
    directory = find_model(Path(path))
    manifest = verify_directory(directory, level="full", parts=_MODEL_PARTS)
    required = {MODEL_NAME, CONFIG_NAME}
    if not required <= manifest.files.keys():
        raise ArtefactError(f"{directory}: its manifest lacks {', '.join(sorted(required - manifest.files.keys()))}")
    description = read_description(directory)
    tokenizer = Tokenizer.read_files(directory / TOKENIZER_NAME)
    require_fitting_tokenizer(tokenizer, description, directory)
    model = (build or build_model)(description, StoredWeights(directory / MODEL_NAME, description))
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, description=description, path=directory)


class StoredWeights(Mapping[str, Tensor]):
    """The weights of a model file in fp32, by name. Each is read when it is asked for, anew each time: its memory is free again with the tensor.

    Args:
        path: The safetensors file. Its names, shapes and types are compared with the description first, so that its size bounds the memory.
        description: Of the model.

    Raises:
        ArtefactError: It is damaged, or not of this model.
    """

    def __init__(self, path: Path, description: ModelDescription) -> None:
        shapes = {name: parameter.shape for name, parameter in model_without_weights(description).named_parameters()}
        self._names = list(shapes)
        self._stored = stored_shapes(shapes, description.precision)
        self._path = path
        with _explained(path):
            # One open file from here on: whatever happens to its name, all weights are of one model.
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            with open(self._descriptor, "rb", closefd=False) as stream:
                self._header = read_open_header(stream, path)
                self._start = stream.tell()
            self._size = os.fstat(self._descriptor).st_size
            _check_header(path, self._header, self._stored, precision=description.precision)

    def __getitem__(self, name: str) -> Tensor:
        return widen(self._read(name))[name]

    def rounded(self, name: str) -> tuple[Tensor, Tensor] | None:
        """A matrix as it is stored in int8: its rows, and what each is multiplied by, fp32; None if it is not stored so."""
        stored = self._read(name)
        return (stored[name], stored[name + SCALE_SUFFIX]) if len(stored) == 2 else None

    def _read(self, name: str) -> dict[str, Tensor]:
        if name not in self._names:
            raise KeyError(name)
        with _explained(self._path):
            return {key: self._map(key) for key in (name, name + SCALE_SUFFIX) if key in self._stored}

    def _map(self, key: str) -> Tensor:
        """A tensor whose pages are read when touched."""
        dtype, shape = _STORED_DTYPES[self._header[key]["dtype"]], self._stored[key]
        first, end = self._header[key]["data_offsets"]
        if end - first != shape.numel() * dtype.itemsize or self._start + end > self._size or first < 0:
            raise ValueError(f"{key} is not where the header says")
        first += self._start
        skipped = first % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(self._descriptor, skipped + shape.numel() * dtype.itemsize, access=mmap.ACCESS_COPY, offset=first - skipped)
        return torch.frombuffer(pages, dtype=dtype, count=shape.numel(), offset=skipped).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def build_model(description: ModelDescription, tensors: Mapping[str, Tensor]) -> Transformer:
    """A model in fp32 of the given weights themselves, not of copies, in training mode."""
    model = model_without_weights(description)
    model.load_state_dict(dict(tensors), assign=True)
    return model


def model_without_weights(description: ModelDescription) -> Transformer:
    """A model that knows the names and shapes of its weights and takes no memory for them."""
    with torch.device("meta"), _NoRandomNumbers():
        return Transformer(description.model, src_vocab_size=description.src_vocab_size, tgt_vocab_size=description.tgt_vocab_size)


class _NoRandomNumbers(TorchFunctionMode):
    """Leaves weights as they are where they would be drawn. Drawing those that take no memory makes torch import its compiler, for seconds."""

    _DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.uniform_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in self._DRAWS:
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


@torch.no_grad()
def copy_parameters(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same names; tied parameters stay tied."""
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name])


def require_fitting_tokenizer(tokenizer: Tokenizer, description: ModelDescription, directory: Path) -> None:
    """Refuse a tokenizer other than the one that a model was trained with.

    Raises:
        ArtefactError: Names both fingerprints, or both sizes.
    """
    if tokenizer.fingerprint != description.tokenizer:
        raise ArtefactError(
            f"{directory}: its tokenizer has the fingerprint {tokenizer.fingerprint[:16]}, the model was trained with {description.tokenizer[:16]}",
            hint="Somebody replaced the tokenizer; copy the whole directory anew.",
        )
    sizes = (tokenizer.src_vocab_size, tokenizer.tgt_vocab_size)
    if sizes != (description.src_vocab_size, description.tgt_vocab_size):
        raise ArtefactError(
            f"{directory}: its tokenizer has {sizes[0]} + {sizes[1]} pieces, "
            f"but the model has {description.src_vocab_size} + {description.tgt_vocab_size}"
        )


def _model_card(description: ModelDescription, num_parameters: int) -> str:
    model = description.model
    scores = description.provenance.get("scores") or {}
    languages = " → ".join(filter(None, (description.provenance.get("src_lang"), description.provenance.get("tgt_lang"))))
    lines = [
        f"# Translation model{' ' + languages if languages else ''}",
        "",
        f"A Transformer trained with mtkit: {model.num_encoder_layers} + {model.num_decoder_layers} layers, width {model.d_model},",
        f"{num_parameters:,} parameters, {description.src_vocab_size:,} source and {description.tgt_vocab_size:,} target pieces.",
        "",
        "    mtkit translate PATH_OF_THIS_DIRECTORY < input.txt > output.txt",
        "",
        *(f"- {name}: {value:.4g}" for name, value in sorted(scores.items())),
        *(f"- {key}: {description.provenance[key]}" for key in ("step", "averaged", "data") if description.provenance.get(key)),
    ]
    return "\n".join(lines).strip() + "\n"
