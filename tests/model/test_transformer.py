import dataclasses
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mtkit.data.loader import collate, pack
from mtkit.data.packing import PackedShape
from mtkit.errors import ConfigError
from mtkit.model.config import MODEL_PRESETS, ModelConfig
from mtkit.model.device import GRID
from mtkit.model.layers import DecoderLayer, EncoderLayer, sinusoids
from mtkit.model.transformer import Transformer
from tests.model.reference import assert_same_gradients, copy_weights, stack_pairs

PAD, BOS, EOS = 0, 2, 3
CONFIG = ModelConfig(d_model=16, ffn_dim=24, num_heads=4, num_encoder_layers=3, num_decoder_layers=2, dropout=0.0)

Tie = Literal["none", "decoder", "three-way"]


def build(*, src_vocab_size: int = 37, tgt_vocab_size: int = 37, **values: Any) -> Transformer:
    """A small model in float64, with biases and norms that are not at their start."""
    model = Transformer(dataclasses.replace(CONFIG, **values), src_vocab_size=src_vocab_size, tgt_vocab_size=tgt_vocab_size).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def batch(*, lengths: list[int], vocab_size: int = 37, extra_padding: int = 0) -> tuple[Tensor, Tensor]:
    """Random sentences of these lengths, EOS at the end, padded at the right."""
    tokens = torch.full((len(lengths), max(lengths) + extra_padding), PAD)
    for row, length in enumerate(lengths):
        tokens[row, : length - 1] = torch.randint(4, vocab_size, (length - 1,))
        tokens[row, length - 1] = EOS
    return tokens, torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]


def pad_more(tokens: Tensor, mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return nn.functional.pad(tokens, (0, count), value=PAD), nn.functional.pad(mask, (0, count), value=False)


def torch_transformer(norm: str, activation: Any) -> nn.Transformer:
    """torch's own model; it has final norms even for post-norm layers, which the paper does not, so these are taken out."""
    reference = nn.Transformer(
        CONFIG.d_model,
        CONFIG.num_heads,
        CONFIG.num_encoder_layers,
        CONFIG.num_decoder_layers,
        CONFIG.ffn_dim,
        dropout=0.0,
        activation=activation,
        batch_first=True,
        norm_first=norm == "pre",
        dtype=torch.float64,
    )
    if norm == "post":
        assert isinstance(reference.encoder, nn.TransformerEncoder)
        assert isinstance(reference.decoder, nn.TransformerDecoder)
        reference.encoder.norm = reference.decoder.norm = None
    return reference


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_whole_model_equals_torch(norm: str, activation: str) -> None:
    reference = torch_transformer(norm, activation)
    model = build(norm=norm, activation=activation)
    pairs = copy_weights(stack_pairs(model, reference), len(list(model.parameters())) - 1)
    src_BS, src_mask_BS = batch(lengths=[7, 4, 1])
    tgt_BT, _ = batch(lengths=[5, 6, 2])
    weight = torch.randn(3, 6, 37, dtype=torch.float64)

    logits = model(src_BS, src_mask_BS, tgt_BT)
    torch.autograd.backward((logits * weight).sum())
    gradient = model.src_weight.grad
    model.src_weight.grad = None

    table = model.src_weight
    embed = [table[tokens] * 16**0.5 + sinusoids(tokens.shape[1], 16) for tokens in (src_BS, tgt_BT)]
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    hidden = reference(*embed, tgt_mask=causal, src_key_padding_mask=~src_mask_BS, memory_key_padding_mask=~src_mask_BS)
    expected = hidden @ table[:37].T
    torch.autograd.backward((expected * weight).sum())

    torch.testing.assert_close(logits, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(gradient, table.grad, rtol=1e-7, atol=1e-8)
    assert_same_gradients(pairs)


ALL_CONFIGS = [
    {"norm": norm, "activation": activation, "tie_embeddings": tie}
    for norm, activation, tie in (
        ("post", "relu", "three-way"),
        ("post", "gelu", "decoder"),
        ("post", "swiglu", "none"),
        ("pre", "relu", "decoder"),
        ("pre", "gelu", "none"),
        ("pre", "swiglu", "three-way"),
    )
]


@pytest.mark.parametrize("values", ALL_CONFIGS)
@pytest.mark.parametrize("grad", [True, False])
def test_more_padding_changes_nothing(grad: bool, values: dict[str, Any]) -> None:
    model = build(**values)
    src, src_mask = batch(lengths=[7, 4, 2])
    tgt, tgt_mask = batch(lengths=[5, 3, 6])
    with torch.set_grad_enabled(grad):
        logits = model(src, src_mask, tgt, tgt_mask)
        wide_src, wide_src_mask = pad_more(src, src_mask, 9)
        wide_tgt, wide_tgt_mask = pad_more(tgt, tgt_mask, 5)
        wide = model(wide_src, wide_src_mask, wide_tgt, wide_tgt_mask)[:, : tgt.shape[1]]
        torch.testing.assert_close(wide[tgt_mask], logits[tgt_mask], rtol=0, atol=1e-12)
        unmasked = model(wide_src, wide_src_mask, wide_tgt)[:, : tgt.shape[1]]
        torch.testing.assert_close(unmasked[tgt_mask], logits[tgt_mask], rtol=0, atol=1e-12)
        for row, (src_length, tgt_length) in enumerate(zip(src_mask.sum(1).tolist(), tgt_mask.sum(1).tolist(), strict=True)):
            alone = model(src[row : row + 1, :src_length], src_mask[row : row + 1, :src_length], tgt[row : row + 1, :tgt_length])
            torch.testing.assert_close(alone[0], logits[row, :tgt_length], rtol=0, atol=1e-12)


@pytest.mark.parametrize("values", ALL_CONFIGS)
def test_packed_sentences_are_as_padded_ones(values: dict[str, Any]) -> None:
    model = build(**values)
    src, tgt = ([torch.randint(4, 37, (length,)).numpy() for length in lengths] for lengths in ([6, 0, 2, 4], [3, 5, 0, 1]))
    # 5 and 7 positions are left over on the two sides: sentences of padding, more of them on one side than on the other.
    shape = PackedShape(src_tokens=21, tgt_tokens=20, max_sentences=6, max_length=6)
    padded, packed = collate(src, tgt), pack(src, tgt, shape)
    weight = torch.randn(padded.num_tgt_tokens, 16, dtype=torch.float64)

    memory_MD = model.encode_packed(packed.src_M, packed.src)
    hidden_ND = model.decode_packed(packed.tgt_in_N, packed.tgt, memory_MD, packed.src)
    torch.autograd.backward((hidden_ND[: padded.num_tgt_tokens] * weight).sum())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    memory_BSD = model.encode(padded.src_BS, padded.src_mask_BS)
    hidden_BTD = model.decode(padded.tgt_in_BT, memory_BSD, padded.src_mask_BS)
    torch.autograd.backward((hidden_BTD[padded.tgt_mask_BT] * weight).sum())

    torch.testing.assert_close(memory_MD[: padded.num_src_tokens], memory_BSD[padded.src_mask_BS], rtol=0, atol=1e-12)
    torch.testing.assert_close(hidden_ND[: padded.num_tgt_tokens], hidden_BTD[padded.tgt_mask_BT], rtol=0, atol=1e-12)
    assert hidden_ND.isfinite().all()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-11)


def test_packed_sentences_do_not_see_each_other() -> None:
    model = build()
    src, tgt = ([torch.randint(4, 30, (length,)).numpy() for length in (4, 5, 3)] for _ in range(2))
    shape = PackedShape(src_tokens=20, tgt_tokens=20, max_sentences=4, max_length=8)

    def hidden() -> list[Tensor]:
        batch = pack(src, tgt, shape)
        hidden_ND = model.decode_packed(batch.tgt_in_N, batch.tgt, model.encode_packed(batch.src_M, batch.src), batch.src)
        return [hidden_ND[:5], hidden_ND[5:11], hidden_ND[11:15]]

    before = hidden()
    src[1] = src[1] + 3
    tgt[1] = tgt[1] + 3
    after = hidden()
    assert (after[1] - before[1]).abs().max() > 1e-3
    for sentence in (0, 2):
        torch.testing.assert_close(after[sentence], before[sentence], rtol=0, atol=1e-12)


def test_a_target_mask_hides_tokens_before_real_ones() -> None:
    model = build()
    src, src_mask = batch(lengths=[6, 3])
    tgt = torch.randint(4, 30, (2, 5))
    other = tgt.clone()
    other[:, 1] = 33
    mask = torch.tensor([True, False, True, True, True]).expand(2, 5)
    real = [0, 2, 3, 4]
    hidden = model(src, src_mask, tgt, mask)[:, real]
    torch.testing.assert_close(model(src, src_mask, other, mask)[:, real], hidden, rtol=0, atol=1e-12)
    assert (model(src, src_mask, other)[:, 2:] - model(src, src_mask, tgt)[:, 2:]).abs().amin(dim=(0, 1)).max() > 1e-6


def test_padding_has_no_gradient() -> None:
    model = build(tie_embeddings="none")
    src, src_mask = batch(lengths=[7, 4])
    tgt, tgt_mask = batch(lengths=[5, 3])
    torch.autograd.backward(model(src, src_mask, tgt)[tgt_mask].square().sum())
    for weight in (model.src_weight, model.tgt_weight):
        assert weight.grad is not None
        assert weight.grad[PAD].abs().max() == 0
        assert weight.grad[EOS].abs().max() > 0


@pytest.mark.parametrize("values", ALL_CONFIGS)
def test_a_position_sees_earlier_ones_and_none_later(values: dict[str, Any]) -> None:
    model = build(**values)
    src, src_mask = batch(lengths=[6, 3])
    memory = model.encode(src, src_mask).detach()
    seen: list[Tensor] = []
    model.decoder.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    hidden = model.decode(torch.randint(4, 37, (2, 8)), memory, src_mask)
    (embedded,) = seen
    for position in range(8):
        (gradient,) = torch.autograd.grad(hidden[:, position].pow(3).sum(), embedded, retain_graph=True)
        size_BT = gradient.abs().amax(-1)
        assert (size_BT[:, position + 1 :] == 0).all()
        assert (size_BT[:, : position + 1] > 1e-9).all()


def test_every_source_token_is_seen_and_padding_is_not() -> None:
    model = build()
    src, src_mask = batch(lengths=[6, 3])
    seen: list[Tensor] = []
    model.encoder.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    logits = model(src, src_mask, torch.randint(4, 37, (2, 4)))
    (gradient,) = torch.autograd.grad(logits[:, 0].pow(3).sum(), seen[0])
    assert torch.equal(gradient.abs().amax(-1) > 1e-9, src_mask)


@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
def test_an_all_padding_source_spoils_nothing(mode: str) -> None:
    model = build(norm="pre")
    model.train(mode == "train")
    src, src_mask = batch(lengths=[6, 3, 4])
    tgt, _ = batch(lengths=[5, 5, 5])
    expected = model(src, src_mask, tgt)
    src_mask[1] = False
    with torch.inference_mode(mode == "inference"):
        logits = model(src, src_mask, tgt)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-12)
    if mode == "train":
        torch.autograd.backward(logits.square().sum())
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()


def test_permuting_the_batch_permutes_the_result() -> None:
    model = build()
    src, src_mask = batch(lengths=[6, 3, 4])
    tgt, tgt_mask = batch(lengths=[5, 6, 2])
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(
        model(src[order], src_mask[order], tgt[order], tgt_mask[order]), model(src, src_mask, tgt, tgt_mask)[order], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("tie", "matrices"), [("three-way", 1), ("decoder", 2), ("none", 3)])
def test_tied_matrices_are_one_parameter(tie: Tie, matrices: int) -> None:
    model = build(tie_embeddings=tie)
    assert (model.tgt_weight is model.src_weight) == (tie == "three-way")
    assert (model.output_weight is model.tgt_weight) == (tie != "none")
    layers = sum(parameter.numel() for stack in (model.encoder, model.decoder) for parameter in stack.parameters())
    assert model.num_parameters() == layers + matrices * 40 * 16
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state) == len(list(model.parameters()))


@pytest.mark.parametrize(("tie", "sources"), [("three-way", {"src", "tgt", "out"}), ("decoder", {"tgt", "out"}), ("none", {"out"})])
def test_the_output_matrix_learns_from_all_its_uses(tie: Tie, sources: set[str]) -> None:
    """A piece that only occurs in one place has a gradient beyond that of the softmax exactly if the matrices are tied there."""
    model = build(tie_embeddings=tie)
    src, tgt = torch.tensor([[10, EOS]]), torch.tensor([[BOS, 20]])
    logits = model(src, torch.ones_like(src, dtype=torch.bool), tgt)
    torch.autograd.backward(logits[..., 30].sum())  # as an output, only piece 30 has a gradient
    gradient = model.output_weight.grad
    assert gradient is not None
    moved = {name for name, piece in (("src", 10), ("tgt", 20), ("out", 30)) if gradient[piece].abs().max() > 0}
    assert moved == sources


def test_three_way_tying_needs_equal_vocabularies() -> None:
    message = "^tie_embeddings is three-way, which needs one vocabulary .*, but the source has 50 pieces and the target 37\n.*joint tokenizer"
    with pytest.raises(ConfigError, match=message):
        build(src_vocab_size=50)
    assert build(src_vocab_size=50, tie_embeddings="decoder").src_weight.shape == (56, 16)


@pytest.mark.parametrize("tie", ["none", "decoder", "three-way"])
@pytest.mark.parametrize("vocab_size", [33, 40])
def test_padding_rows_are_zero_stay_zero_and_are_never_predicted(vocab_size: int, tie: Tie) -> None:
    model = Transformer(dataclasses.replace(CONFIG, tie_embeddings=tie), src_vocab_size=vocab_size, tgt_vocab_size=vocab_size)
    src, src_mask = batch(lengths=[6, 3], vocab_size=vocab_size)
    tgt, _ = batch(lengths=[5, 4], vocab_size=vocab_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        logits = model(src, src_mask, tgt)
        assert logits.shape == (2, 5, vocab_size)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tgt.flatten()))
        optimizer.step()
    for weight in (model.src_weight, model.tgt_weight, model.output_weight):
        assert weight.shape[0] == 40
        assert (weight[vocab_size:] == 0).all()
        assert (weight[:vocab_size] != 0).any(-1).all()


def test_initial_values() -> None:
    model = Transformer(dataclasses.replace(MODEL_PRESETS["small"], tie_embeddings="none"), src_vocab_size=4000, tgt_vocab_size=4000)
    d, ffn = 256, 1024
    layer = model.decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    for weight in (model.src_weight, model.tgt_weight, model.output_weight):
        assert weight.std().item() == pytest.approx(d**-0.5, rel=0.02)
        assert weight.mean().item() == pytest.approx(0.0, abs=0.001)
        assert weight.abs().max().item() > 4 * d**-0.5  # a normal distribution, not a uniform one
    square, quarter = (6 / (2 * d)) ** 0.5, (6 / (d + ffn)) ** 0.5
    for weight, bound in (
        (layer.self_attention.in_proj.weight, square / 2**0.5),
        (layer.cross_attention.q_proj.weight, square / 2**0.5),
        (layer.cross_attention.kv_proj.weight, square / 2**0.5),
        (layer.self_attention.out_proj.weight, square),
        (layer.cross_attention.out_proj.weight, square),
        (layer.feed_forward.in_proj.weight, quarter),
        (layer.feed_forward.out_proj.weight, quarter),
    ):
        assert 0.99 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name


def test_embeddings_are_scaled_and_meet_the_positions() -> None:
    model = build()
    seen: list[Tensor] = []
    model.encoder.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    src, src_mask = batch(lengths=[6, 3])
    model.encode(src, src_mask)
    torch.testing.assert_close(seen[0], 4.0 * model.src_weight[src] + sinusoids(6, 16))


def test_embedding_dropout_in_training_only() -> None:
    model = build(dropout=0.5)
    seen: list[Tensor] = []
    model.encoder.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    src, src_mask = batch(lengths=[60, 3])
    model.train().encode(src, src_mask)
    model.eval().encode(src, src_mask)
    assert 0.4 < (seen[0] == 0).double().mean() < 0.6
    assert (seen[1] == 0).double().mean() < 0.1


def test_dropout_is_off_in_eval_mode() -> None:
    model = build(dropout=0.3, attention_dropout=0.3, activation_dropout=0.3)
    src, src_mask = batch(lengths=[6, 3])
    tgt, _ = batch(lengths=[5, 4])
    without = Transformer(CONFIG, src_vocab_size=37, tgt_vocab_size=37).double()
    without.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(src, src_mask, tgt), without(src, src_mask, tgt))
    assert not torch.allclose(model.train()(src, src_mask, tgt), without(src, src_mask, tgt))


@pytest.mark.parametrize(("preset", "millions"), [("base", 65), ("big", 213)])
def test_parameter_counts_are_the_papers(preset: str, millions: int) -> None:
    """Table 3 of the paper, vocabulary about 37,000. The count depends on which biases one has and on that "about": 4 % are allowed."""
    with torch.device("meta"):
        model = Transformer(MODEL_PRESETS[preset], src_vocab_size=37_000, tgt_vocab_size=37_000)
    assert model.num_parameters() == pytest.approx(millions * 1e6, rel=0.04)


def test_parameter_count_of_base_by_hand() -> None:
    d, ffn = 512, 2048
    attention, feed_forward, norm = 4 * (d * d + d), 2 * d * ffn + ffn + d, 2 * d
    expected = 37_000 * d + 6 * (attention + feed_forward + 2 * norm) + 6 * (2 * attention + feed_forward + 3 * norm)
    with torch.device("meta"):
        model = Transformer(MODEL_PRESETS["base"], src_vocab_size=37_000, tgt_vocab_size=37_000)
    assert model.num_parameters() == expected == 63_082_496


LAYER_KEYS = """
encoder.layers.0.self_attention.in_proj.weight 48x16
encoder.layers.0.self_attention.in_proj.bias 48
encoder.layers.0.self_attention.out_proj.weight 16x16
encoder.layers.0.self_attention.out_proj.bias 16
encoder.layers.0.self_attention_norm.weight 16
encoder.layers.0.self_attention_norm.bias 16
encoder.layers.0.feed_forward.in_proj.weight 24x16
encoder.layers.0.feed_forward.in_proj.bias 24
encoder.layers.0.feed_forward.out_proj.weight 16x24
encoder.layers.0.feed_forward.out_proj.bias 16
encoder.layers.0.feed_forward_norm.weight 16
encoder.layers.0.feed_forward_norm.bias 16
decoder.layers.0.self_attention.in_proj.weight 48x16
decoder.layers.0.self_attention.in_proj.bias 48
decoder.layers.0.self_attention.out_proj.weight 16x16
decoder.layers.0.self_attention.out_proj.bias 16
decoder.layers.0.self_attention_norm.weight 16
decoder.layers.0.self_attention_norm.bias 16
decoder.layers.0.cross_attention.q_proj.weight 16x16
decoder.layers.0.cross_attention.q_proj.bias 16
decoder.layers.0.cross_attention.kv_proj.weight 32x16
decoder.layers.0.cross_attention.kv_proj.bias 32
decoder.layers.0.cross_attention.out_proj.weight 16x16
decoder.layers.0.cross_attention.out_proj.bias 16
decoder.layers.0.cross_attention_norm.weight 16
decoder.layers.0.cross_attention_norm.bias 16
decoder.layers.0.feed_forward.in_proj.weight 24x16
decoder.layers.0.feed_forward.in_proj.bias 24
decoder.layers.0.feed_forward.out_proj.weight 16x24
decoder.layers.0.feed_forward.out_proj.bias 16
decoder.layers.0.feed_forward_norm.weight 16
decoder.layers.0.feed_forward_norm.bias 16
"""
"""The file format: these names must not change without a new format version."""


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({"tie_embeddings": "three-way"}, "src_embedding.weight 40x16"),
        ({"tie_embeddings": "decoder"}, "src_embedding.weight 40x16\ntgt_embedding.weight 40x16"),
        ({"tie_embeddings": "none"}, "src_embedding.weight 40x16\ntgt_embedding.weight 40x16\noutput_projection.weight 40x16"),
        (
            {"norm": "pre"},
            "src_embedding.weight 40x16\nencoder.norm.weight 16\nencoder.norm.bias 16\ndecoder.norm.weight 16\ndecoder.norm.bias 16",
        ),
    ],
)
def test_state_dict_names_are_pinned(values: dict[str, Any], more: str) -> None:
    model = build(num_encoder_layers=1, num_decoder_layers=1, **values)
    keys = {f"{name} {'x'.join(map(str, tensor.shape))}" for name, tensor in model.state_dict().items()}
    assert keys == {*LAYER_KEYS.split("\n")[1:-1], *more.split("\n")}


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_bf16_autocast_keeps_sums_in_float32(norm: str) -> None:
    model = build(norm=norm).float()
    src, src_mask = batch(lengths=[6, 3])
    tgt, _ = batch(lengths=[5, 4])
    exact = model(src, src_mask, tgt)
    norms: list[torch.dtype] = []
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda _module, _args, out: norms.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(src, src_mask, tgt)
    assert logits.dtype == torch.bfloat16
    assert set(norms) == {torch.float32}
    torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.1)
    torch.autograd.backward(logits.float().square().sum())
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


def test_depths_differ_as_configured() -> None:
    model = build()
    assert [type(layer) for layer in model.encoder.layers] == [EncoderLayer] * 3
    assert [type(layer) for layer in model.decoder.layers] == [DecoderLayer] * 2


class Products(TorchDispatchMode):
    """Records the rows of all products of a batch with a weight."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("mm", "addmm") and args[-2].dtype == torch.bfloat16:
            self.rows.add(args[-2].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_in_autocast_a_cpu_multiplies_few_shapes(norm: Any) -> None:
    products = Products()
    for lengths in ([9, 4, 6], [11, 3, 2, 1], [5] * 17):
        model = build(norm=norm).float()
        src_BS, src_mask_BS = batch(lengths=lengths)
        tgt_BT, tgt_mask_BT = batch(lengths=[length + 2 for length in lengths])
        out = []
        for is_on in (False, True):
            with products, torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
                hidden_BTD = model.decode(tgt_BT, model.encode(src_BS, src_mask_BS), src_mask_BS, tgt_mask_BT)
            model.zero_grad()
            torch.autograd.backward(hidden_BTD[tgt_mask_BT].float().square().sum())
            out.append((hidden_BTD[tgt_mask_BT].detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))  # type: ignore[union-attr]
        for exact, rounded in zip(*out, strict=True):
            assert float((rounded - exact).norm() / exact.norm()) < 0.03
    assert products.rows == {GRID}
