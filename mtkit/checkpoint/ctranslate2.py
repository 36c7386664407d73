"""A model in the format of CTranslate2 (https://github.com/OpenNMT/CTranslate2), a C++ runtime for Transformers; needs its Python package.

An export (kind `ctranslate2`) is a directory that CTranslate2 loads as it is:

    model.bin, config.json       the weights and settings, as CTranslate2's own serializer writes them
    *_vocabulary.json            the pieces, in the order of their ids
    tokenizer/                   the tokenizer, byte for byte
    README.md                    how to use it

Every architecture of `ModelConfig` can be expressed; dropout, which is for training, is left out. What has to be told to CTranslate2:

- It stores matrices as torch does, [outputs, inputs]. Q, K and V of self-attention are one matrix, K and V of cross-attention too, in our order.
- Its own sinusoids have all sines before all cosines, ours alternate. So the position encodings are stored, for the first `MAX_POSITIONS` positions,
  and longer sentences are beyond an export.
- A vocabulary has as many rows as pieces: the rows that pad our matrices are cut. Tied matrices are stored once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from mtkit.artefacts import atomic_directory, read_manifest
from mtkit.checkpoint.format import LoadedModel
from mtkit.checkpoint.layout import CARD_NAME, EXPORT_KIND, TOKENIZER_NAME
from mtkit.config import to_dict
from mtkit.data.tokenizer import BOS_ID, CONTROL_PIECES, EOS_ID, UNK_ID, Side, Tokenizer, model_names
from mtkit.errors import MTKitError
from mtkit.model.config import Activation
from mtkit.model.layers import DecoderLayer, EncoderLayer, FeedForward, sinusoids
from mtkit.model.transformer import Decoder, Encoder, Transformer

WEIGHTS_NAME = "model.bin"

MAX_POSITIONS = 2048
"""Positions that an export has encodings for: tokens of a source with EOS, tokens of a translation with BOS."""

ExportPrecision = Literal["fp32", "fp16", "bf16", "int8"]

COMPUTE_TYPES: Mapping[str, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""Our names of number formats -> CTranslate2's."""

ACTIVATIONS: Mapping[Activation, str] = {"relu": "RELU", "gelu": "GELU", "swiglu": "SWISH"}
"""Our names of activations -> members of CTranslate2's `Activation`; with `swiglu`, that of the gate."""

_Matrix = NDArray[np.float32]


def import_ctranslate2() -> Any:
    """The package `ctranslate2`.

    Raises:
        MTKitError: It is not installed.
    """
    try:
        import ctranslate2
    except ImportError as error:
        raise MTKitError(f"CTranslate2 cannot be used: {error}", hint="Install it: pip install 'mtkit[ct2]'") from error
    return ctranslate2


def export_ctranslate2(loaded: LoadedModel, output: Path, *, precision: ExportPrecision = "fp32") -> None:
    """Write a model as a directory that CTranslate2 loads.

    Args:
        loaded: The model; it stays as it is.
        output: The directory to make.
        precision: How weights are stored. `int8` is one scale for each row of a matrix, and leaves biases, LayerNorms and positions in fp32.

    Raises:
        MTKitError: CTranslate2 is not installed, or the directory exists or cannot be written.
        ResourceError: The disk is full.
    """
    spec = _specification(loaded.model, loaded.tokenizer)
    spec.validate()
    spec.optimize(quantization=COMPUTE_TYPES[precision])
    config = {
        "model": to_dict(loaded.description.model),
        "tokenizer": loaded.tokenizer.fingerprint,
        "precision": precision,
        "max_positions": MAX_POSITIONS,
        "provenance": loaded.description.provenance,
    }
    inputs = {"model": read_manifest(loaded.path).fingerprint}
    with atomic_directory(output, kind=EXPORT_KIND, config=config, inputs=inputs) as temporary:
        spec.save(str(temporary))
        (temporary / TOKENIZER_NAME).mkdir()
        loaded.tokenizer.write_files(temporary / TOKENIZER_NAME)
        (temporary / CARD_NAME).write_text(_card(loaded, precision), encoding="utf-8", errors="backslashreplace")  # names of files may be any bytes


def pieces_in_order(tokenizer: Tokenizer, side: Side) -> list[str]:
    """The pieces of one side in the order of their ids: what CTranslate2 calls a vocabulary."""
    size = tokenizer.src_vocab_size if side == "src" else tokenizer.tgt_vocab_size
    return tokenizer.pieces(range(size), side)


def _specification(model: Transformer, tokenizer: Tokenizer) -> Any:
    """The model as a `TransformerSpec`, with copies of all weights."""
    specs = import_ctranslate2().specs
    config = model.config
    spec = specs.TransformerSpec.from_config(
        (config.num_encoder_layers, config.num_decoder_layers),
        config.num_heads,
        pre_norm=config.norm == "pre",
        activation=getattr(specs.common_spec.Activation, ACTIVATIONS[config.activation]),
        ffn_glu=config.activation == "swiglu",
    )
    src = _array(model.src_weight[: model.src_vocab_size])
    tgt = src if config.tie_embeddings == "three-way" else _array(model.tgt_weight[: model.tgt_vocab_size])
    output = tgt if config.tie_embeddings != "none" else _array(model.output_weight[: model.tgt_vocab_size])
    spec.encoder.embeddings[0].weight = src
    spec.decoder.embeddings.weight = tgt
    spec.decoder.projection.weight = output
    positions = _array(sinusoids(MAX_POSITIONS, config.d_model))
    for stack_spec, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        stack_spec.scale_embeddings = True  # by sqrt(D)
        stack_spec.position_encodings.encodings = positions
        _set_stack(stack_spec, stack)

    spec.register_source_vocabulary(pieces_in_order(tokenizer, "src"))
    spec.register_target_vocabulary(pieces_in_order(tokenizer, "tgt"))
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = (CONTROL_PIECES[index] for index in (UNK_ID, BOS_ID, EOS_ID))
    spec.config.decoder_start_token = CONTROL_PIECES[BOS_ID]
    spec.config.add_source_bos = False
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = cast(EncoderLayer, model.encoder.layers[0]).feed_forward_norm.eps
    return spec


def _set_stack(spec: Any, stack: Encoder | Decoder) -> None:
    """Fill in the layers of one side, and the LayerNorm after them if there is one."""
    if isinstance(stack.norm, nn.LayerNorm):
        _set_norm(spec.layer_norm, stack.norm)
    for layer_spec, module in zip(spec.layer, stack.layers, strict=True):
        layer = cast(EncoderLayer | DecoderLayer, module)
        _set_norm(layer_spec.self_attention.layer_norm, layer.self_attention_norm)
        _set_linears(layer_spec.self_attention.linear, [layer.self_attention.in_proj, layer.self_attention.out_proj])
        if isinstance(layer, DecoderLayer):
            cross = layer.cross_attention
            _set_norm(layer_spec.attention.layer_norm, layer.cross_attention_norm)
            _set_linears(layer_spec.attention.linear, [cross.q_proj, cross.kv_proj, cross.out_proj])
        _set_norm(layer_spec.ffn.layer_norm, layer.feed_forward_norm)
        _set_feed_forward(layer_spec.ffn, layer.feed_forward)


def _set_feed_forward(spec: Any, feed_forward: FeedForward) -> None:
    inner, outer = feed_forward.in_proj, feed_forward.out_proj
    _set_linears([spec.linear_1], [outer])
    if feed_forward.activation != "swiglu":
        _set_linears([spec.linear_0], [inner])
        return
    gate_and_value = zip(inner.weight.chunk(2), inner.bias.chunk(2), strict=True)
    for linear, (weight, bias) in zip((spec.linear_0, spec.linear_0_noact), gate_and_value, strict=True):
        linear.weight, linear.bias = _array(weight), _array(bias)


def _set_linears(specs: Sequence[Any], linears: Sequence[nn.Linear]) -> None:
    for spec, linear in zip(specs, linears, strict=True):
        spec.weight, spec.bias = _array(linear.weight), _array(linear.bias)


def _set_norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Tensor) -> _Matrix:
    """A copy in fp32; quantization works in place."""
    return np.array(tensor.detach().float().cpu().numpy(), order="C")


def _card(loaded: LoadedModel, precision: ExportPrecision) -> str:
    provenance = loaded.description.provenance
    languages = " → ".join(filter(None, (provenance.get("src_lang"), provenance.get("tgt_lang"))))
    names = model_names(loaded.tokenizer.config)
    variables = ["src", "tgt"] if len(names) == 2 else ["src = tgt"]
    lines = [
        f"# Translation model{' ' + languages if languages else ''} for CTranslate2",
        "",
        f"Exported by mtkit from the model `{loaded.path.name}`, with weights in {precision} ({COMPUTE_TYPES[precision]}). In Python, after",
        "`pip install ctranslate2 sentencepiece`:",
        "",
        "```python",
        "from ctranslate2 import Translator",
        "from sentencepiece import SentencePieceProcessor",
        "",
        'path = "PATH_OF_THIS_DIRECTORY"',
        *(
            f'{variable} = SentencePieceProcessor(model_file=f"{{path}}/{TOKENIZER_NAME}/{name}")'
            for variable, name in zip(variables, names, strict=True)
        ),
        'translator = Translator(path, device="cpu", inter_threads=2, intra_threads=1)',
        'pieces = src.encode(["A first sentence.", "A second one."], out_type=str)',
        "for result in translator.translate_batch(pieces, beam_size=4):",
        "    print(tgt.decode(result.hypotheses[0]))",
        "```",
        "",
        "CTranslate2 adds the beginning and the end of a sentence itself. On the command line, with mtkit's rules for lines, lengths and scores:",
        "",
        "    mtkit translate --engine ct2 PATH_OF_THIS_DIRECTORY < input.txt > output.txt",
        "",
        f"Sources and translations of up to {MAX_POSITIONS - 1} pieces have position encodings here.",
    ]
    return "\n".join(lines) + "\n"
