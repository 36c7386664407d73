import hashlib
import io
import json
import pickle
import random
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from mtkit.artefacts import atomic_directory
from mtkit.config import from_dict, to_dict
from mtkit.data import model_file
from mtkit.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, SIDES, UNK_ID, Side, Tokenizer, TokenizerConfig, train_on_lines, train_tokenizer
from mtkit.errors import ArtefactError, ConfigError, DataError, MTKitError
from mtkit.files import is_blank
from tests.helpers import shared_data

Rule = Literal["nmt_nfkc", "nfkc", "identity"]

NOUNS = ("dog", "cat", "house", "river", "teacher", "window", "garden", "bridge", "letter", "engine")
VERBS = ("sees", "likes", "opens", "crosses", "paints", "follows")
NOMEN = ("Hund", "Baum", "Garten", "Lehrer", "Brief", "Motor", "Fluss", "Stuhl", "Ofen", "Käse")
VERBEN = ("sieht", "mag", "öffnet", "überquert", "malt", "verfolgt")


def make_pairs(count: int = 400) -> list[tuple[str, str]]:
    choose = random.Random(3).choice
    return [
        (f"The {choose(NOUNS)} {choose(VERBS)} the {choose(NOUNS)}, too.", f"Der {choose(NOMEN)} {choose(VERBEN)} den {choose(NOMEN)} auch.")
        for _ in range(count)
    ]


def train_largest(lines: Iterable[tuple[Side, str]], **values: Any) -> Tokenizer:
    """Train with the largest vocabulary that the lines allow."""
    lines = list(lines)
    try:
        return train_on_lines(lines, TokenizerConfig(vocab_size=30_000, **values))
    except ConfigError as error:
        return train_on_lines(lines, TokenizerConfig(vocab_size=int(error.message.split()[-1]), **values))


PAIRS = make_pairs()


@pytest.fixture(scope="module")
def tokenizers() -> dict[Rule, Tokenizer]:
    rules: tuple[Rule, ...] = ("nmt_nfkc", "nfkc", "identity")
    return {rule: train_tokenizer(PAIRS, TokenizerConfig(vocab_size=320, normalization=rule)) for rule in rules}


@pytest.fixture(scope="module")
def joint(tokenizers: dict[Rule, Tokenizer]) -> Tokenizer:
    return tokenizers["nfkc"]


@pytest.fixture(scope="module")
def separate() -> Tokenizer:
    return train_tokenizer(PAIRS, TokenizerConfig(vocab_size=340, joint=False, type="bpe"))


@pytest.fixture(scope="module")
def normalizers(tokenizers: dict[Rule, Tokenizer], tmp_path_factory: pytest.TempPathFactory) -> dict[Rule, Callable[[str], str]]:
    """What sentencepiece itself says that each model's normalization makes of a text."""
    functions: dict[Rule, Callable[[str], str]] = {}
    for rule, tokenizer in tokenizers.items():
        directory = tmp_path_factory.mktemp(rule)
        tokenizer.write_files(directory)
        functions[rule] = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model")).normalize
    return functions


# --- config ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 7}, "vocab_size must be 8 to 1000000, but is 7"),
        ({"vocab_size": 1_000_001}, "vocab_size must be 8 to 1000000, but is 1000001"),
        ({"character_coverage": 0.5}, "character_coverage must be 0.98 to 1.0, but is 0.5"),
        ({"max_sentences": 0}, "max_sentences must be at least 1 or none, but is 0"),
        ({"seed": -1}, "seed must be at least 0, but is -1"),
        ({"type": "word"}, "type must be one of unigram, bpe, but is 'word'"),
        ({"normalization": "nfc"}, "normalization must be one of nmt_nfkc, nfkc, identity, but is 'nfc'"),
        ({"user_defined_symbols": [""]}, "user_defined_symbols must not hold '': it is empty"),
        ({"user_defined_symbols": ["<s>"]}, "user_defined_symbols must not hold '<s>': the name is taken by a control symbol or a byte"),
        ({"user_defined_symbols": ["<0x0a>"]}, "user_defined_symbols must not hold '<0x0a>': the name is taken"),
        ({"user_defined_symbols": ["a b"]}, "white space, NUL, U\\+2581 and U\\+2585 cannot be part of a symbol"),
        ({"user_defined_symbols": ["a\nb"]}, "white space"),
        ({"user_defined_symbols": ["\ud800"]}, "it is not valid Unicode"),
        ({"user_defined_symbols": ["<a>", "<a>"]}, "user_defined_symbols must differ from each other"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(TokenizerConfig, values)


def test_config_survives_the_codec() -> None:
    config = TokenizerConfig(type="bpe", joint=False, user_defined_symbols=("<x>", "<y>"), max_sentences=None)
    assert from_dict(TokenizerConfig, json.loads(json.dumps(to_dict(config)))) == config


# --- training -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_the_same_text_and_config_give_the_same_bytes(kind: Literal["unigram", "bpe"], tmp_path: Path) -> None:
    config = TokenizerConfig(type=kind, vocab_size=320)
    for name in ("a", "b"):
        train_tokenizer(iter(PAIRS), config).save(tmp_path / name)
    for file in ("tokenizer.model", "tokenizer.json", "MANIFEST.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_sample_of_the_text_is_taken_by_seed() -> None:
    def train(seed: int) -> Tokenizer:
        return train_tokenizer(PAIRS, TokenizerConfig(vocab_size=300, max_sentences=60, seed=seed))

    text = train(1).trained_on["tokenizer.model"]
    assert (text.num_lines, text.num_sentences) == (800, 60)
    assert train(1).fingerprint == train(1).fingerprint
    assert train(1).trained_on != train(2).trained_on


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("is_joint", [True, False])
def test_a_size_that_does_not_suit_the_text_is_an_error_that_names_the_limit(kind: Literal["unigram", "bpe"], is_joint: bool) -> None:
    def train(size: int) -> Tokenizer:
        return train_tokenizer(PAIRS, TokenizerConfig(type=kind, vocab_size=size, joint=is_joint))

    def limit(size: int, word: str) -> int:
        with pytest.raises(ConfigError, match=f"^vocab_size {size} is too {word} for ") as caught:
            train(size)
        assert "--vocab-size" in str(caught.value)
        assert "\n" not in caught.value.message
        assert is_joint or "source text" in caught.value.message or "target text" in caught.value.message
        return int(caught.value.message.split()[-1])

    largest = limit(50_000, "large")
    smallest = limit(20, "small")
    if is_joint:  # else the limits of the two texts differ
        assert limit(smallest - 1, "small") == smallest
        assert train(smallest).src_vocab_size == smallest
        assert limit(largest + 1, "large") == largest
        assert train(largest).src_vocab_size == largest


def test_nothing_is_trained_on_empty_text() -> None:
    config = TokenizerConfig(vocab_size=300)
    with pytest.raises(DataError, match="the text is empty"):
        train_tokenizer([("", " "), ("\u3000", "")], config)
    with pytest.raises(DataError, match="the text is empty after normalization"):
        train_tokenizer([("\u2581", "\u2585")], config)
    with pytest.raises(DataError, match="the target text is empty"):
        train_tokenizer([("a", ""), ("b", " ")], TokenizerConfig(vocab_size=300, joint=False))


def test_any_other_complaint_of_sentencepiece_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_options: object) -> None:
        raise RuntimeError("INTERNAL: out of luck")

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", fail)
    with pytest.raises(MTKitError, match="sentencepiece could not train a tokenizer on the text: INTERNAL: out of luck"):
        train_tokenizer(PAIRS, TokenizerConfig(vocab_size=300))


def test_training_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(PAIRS, TokenizerConfig(vocab_size=300))
    with pytest.raises(ConfigError):
        train_tokenizer(PAIRS, TokenizerConfig(vocab_size=30_000))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize(
    "line",
    [
        "word " * 20_000 + "ω",
        "x" * 30_000 + "ω",
        "ж" * 4000 + " ω",
        "a line with \u2585 and ω",
        "a broken \ud800 character and ω",
        "literal <s> </s> <unk> and ω",
        "nul \0 and ω",
    ],
    ids=["over-long", "over-long without spaces", "long in bytes", "reserved character", "lone surrogate", "control symbols", "nul"],
)
def test_no_line_is_left_out(line: str) -> None:
    """ω occurs in this line only, and all characters that training sees get a piece."""
    tokenizer = train_largest([("src", line), ("tgt", "ab")], character_coverage=1.0)
    assert "ω" in tokenizer.pieces(tokenizer.encode(["x ω"], "src")[0], "src")[-1]


def test_user_defined_symbols_are_one_piece_wherever_they_stand() -> None:
    symbols = ("<2de>", "§a,b\"c'", "\ue000")
    tokenizer = train_tokenizer(PAIRS, TokenizerConfig(vocab_size=320, user_defined_symbols=symbols))
    text = "The dog<2de>sees §a,b\"c' \ue000."
    ids = tokenizer.encode([text], "src")[0]
    assert set(symbols) <= set(tokenizer.pieces(ids, "src"))
    assert tokenizer.decode([ids], "src") == [text]


def test_without_byte_fallback_rare_characters_are_unknown() -> None:
    tokenizer = train_tokenizer(PAIRS, TokenizerConfig(vocab_size=70, byte_fallback=False))
    assert UNK_ID in tokenizer.encode(["The 犬 sees"], "src")[0]
    assert UNK_ID not in tokenizer.forbidden_ids("src")


# --- text to ids and back -------------------------------------------------------------------------------------------------------------

AWKWARD = st.sampled_from(
    [
        "<s>",
        "</s>",
        "<pad>",
        "<unk>",
        "<0x0A>",
        "<0x41>",
        "\u2585",
        "  ",
        "\u00a0",
        "\u3000",
        "\u200c",
        "\u200d",
        "\u2028",
        "\t",
        "\0",
        "e\u0301",
        "ﬁ",
    ]
)
TEXT = st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r")), AWKWARD)).map("".join)


@given(text=TEXT)
@settings(max_examples=300, deadline=None)
def test_decoding_gives_the_normalized_text_back(text: str, tokenizers: dict[Rule, Tokenizer], normalizers: dict[Rule, Callable[[str], str]]) -> None:
    for rule, tokenizer in tokenizers.items():
        ids = tokenizer.encode([text], "src")[0]
        expected = "" if is_blank(text) else normalizers[rule](text).replace("\u2581", " ")[1:]  # the first space is a mark of every line
        assert tokenizer.decode([ids], "src") == [expected], rule
        assert not set(ids) & {PAD_ID, UNK_ID, BOS_ID, EOS_ID}
        assert tokenizer.piece_ids(tokenizer.pieces(ids, "src"), "src") == ids


@given(text=TEXT.filter(lambda text: "\u2581" not in text and not is_blank(text)))
@settings(deadline=None)
def test_identity_is_lossless(text: str, tokenizers: dict[Rule, Tokenizer]) -> None:
    tokenizer = tokenizers["identity"]
    assert tokenizer.decode(tokenizer.encode([text], "tgt"), "tgt") == [text]


@pytest.mark.parametrize(
    ("text", "nmt_nfkc", "nfkc", "identity"),
    [
        ("نمی\u200cخواهم", "نمی خواهم", "نمی\u200cخواهم", "نمی\u200cخواهم"),
        ("क्\u200dष", "क्\u200dष", "क्\u200dष", "क्\u200dष"),
        ("ﬁ ① ２ …", "fi 1 2 ...", "fi 1 2 ...", "ﬁ ① ２ …"),
        ("e\u0301", "é", "é", "e\u0301"),
        ("  a  b ", "a b", "a b", "  a  b "),
        ("a\u00a0b\u3000c", "a b c", "a b c", "a\u00a0b\u3000c"),
        ("x\u2581y", "x y", "x y", "x y"),
        ("a\u200bb\tc", "a b c", "a\u200bb\tc", "a\u200bb\tc"),
        (" \u3000 ", "", "", ""),
        ("", "", "", ""),
    ],
)
def test_what_each_rule_does_to_text(text: str, nmt_nfkc: str, nfkc: str, identity: str, tokenizers: dict[Rule, Tokenizer]) -> None:
    for rule, expected in (("nmt_nfkc", nmt_nfkc), ("nfkc", nfkc), ("identity", identity)):
        tokenizer = tokenizers[rule]  # type: ignore[index]
        assert tokenizer.decode(tokenizer.encode([text], "src"), "src") == [expected], rule


def test_nfkc_is_the_standard_one(joint: Tokenizer) -> None:
    """Every assigned character of the blocks that European text uses, against Python's own tables."""
    characters = [
        chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0x300), *range(0x370, 0x530), *range(0x2100, 0x2200), *range(0xFF01, 0xFFE7))
    ]
    assigned = [f"x{character}x" for character in characters if unicodedata.category(character) != "Cn"]
    expected = [" ".join(unicodedata.normalize("NFKC", text).split(" ")) for text in assigned]
    assert joint.decode(joint.encode(assigned, "src"), "src") == expected


def test_a_lone_surrogate_counts_as_the_replacement_character(joint: Tokenizer) -> None:
    lines = ["a \ud800 b", "plain", "\ud83d\ude00"]
    ids = joint.encode(lines, "src")
    assert joint.decode(ids, "src") == ["a \ufffd b", "plain", "😀"]
    assert ids[1] == joint.encode(["plain"], "src")[0]


def test_many_lines_are_as_good_as_one(joint: Tokenizer) -> None:
    lines = [line for pair in PAIRS[:50] for line in pair] + ["", " ", "x"]
    rows = joint.encode(lines, "src")
    assert rows == [joint.encode([line], "src")[0] for line in lines]
    assert rows == joint.encode(lines, "src", num_threads=3)
    assert joint.decode(rows, "src") == [joint.decode([row], "src")[0] for row in rows]
    assert joint.encode([], "src") == []
    assert joint.decode([], "src") == []


def test_decoding_ignores_control_ids_and_accepts_numpy(joint: Tokenizer) -> None:
    ids = joint.encode(["The dog"], "src")[0]
    assert joint.decode([[BOS_ID, *ids[:1], PAD_ID, *ids[1:], EOS_ID, PAD_ID]], "src") == ["The dog"]
    assert joint.decode([np.array(ids, dtype=np.uint16), ()], "src") == ["The dog", ""]  # type: ignore[list-item]
    assert joint.decode(np.array([ids]), "src") == ["The dog"]  # type: ignore[arg-type]


def test_bytes_are_decoded_together_and_broken_ones_replaced(joint: Tokenizer) -> None:
    euro = joint.encode(["€"], "src")[0][-3:]
    assert joint.pieces(euro, "src") == ["<0xE2>", "<0x82>", "<0xAC>"]
    assert joint.decode([euro], "src") == ["€"]
    dog = joint.encode(["dog"], "src")[0]
    assert joint.decode([dog + euro[:2]], "src") == ["dog\ufffd\ufffd"]
    assert joint.decode([euro[1:] + dog], "src") == ["\ufffd\ufffd dog"]


@pytest.mark.parametrize("index", [-1, 320, 10**12])
def test_an_id_outside_the_vocabulary_is_a_value_error(index: int, joint: Tokenizer) -> None:
    message = f"id {index} is outside the src vocabulary of 320 pieces"
    with pytest.raises(ValueError, match=message):
        joint.decode([[5], [5, index]], "src")
    with pytest.raises(ValueError, match=message):
        joint.pieces([5, index], "src")


def test_an_unknown_piece_is_a_value_error(joint: Tokenizer) -> None:
    assert joint.piece_ids(["<pad>", "<unk>", "<s>", "</s>"], "src") == [PAD_ID, UNK_ID, BOS_ID, EOS_ID]
    with pytest.raises(ValueError, match="'no such piece' is not a piece of the tgt vocabulary"):
        joint.piece_ids(["no such piece"], "tgt")
    with pytest.raises(ValueError, match="is not a piece"):
        joint.piece_ids(["\ud800"], "src")


def test_a_decoder_that_avoids_the_forbidden_ids_cannot_break_a_line() -> None:
    line = "one\u2028two three\x0bfour five\x85six \u2029 seven"
    tokenizer = train_largest([("src", line)], normalization="identity", character_coverage=1.0)
    forbidden = set(tokenizer.forbidden_ids("src"))
    assert {PAD_ID, UNK_ID, BOS_ID} <= forbidden
    assert EOS_ID not in forbidden
    pieces = dict(zip(range(tokenizer.src_vocab_size), tokenizer.pieces(range(tokenizer.src_vocab_size), "src"), strict=True))
    forbidden_pieces = {pieces[index] for index in forbidden}
    assert {"<0x0A>", "<0x0D>", "\u2028", "\x0b", "\x85", "\u2029"} <= forbidden_pieces
    assert "<0x85>" not in forbidden_pieces  # part of many characters
    for index in pieces.keys() - forbidden:
        assert len(tokenizer.decode([[index]], "src")[0].splitlines()) <= 1


# --- sides ----------------------------------------------------------------------------------------------------------------------------


def test_a_joint_tokenizer_treats_both_sides_alike(joint: Tokenizer) -> None:
    assert joint.joint
    assert joint.src_vocab_size == joint.tgt_vocab_size == 320
    assert joint.encode(["The Hund"], "src") == joint.encode(["The Hund"], "tgt")


def test_separate_tokenizers_stay_apart(separate: Tokenizer) -> None:
    assert not separate.joint
    for side, known, other in (("src", PAIRS[0][0], PAIRS[0][1]), ("tgt", PAIRS[0][1], PAIRS[0][0])):
        mine, theirs = separate.encode([known, other], side)  # type: ignore[arg-type]
        assert len(mine) < len(theirs)
    swapped = train_on_lines((({"src": "tgt", "tgt": "src"}[s], line) for p in PAIRS for s, line in zip(SIDES, p, strict=True)), separate.config)  # type: ignore[misc]
    assert swapped.encode(["Der Hund"], "src") == separate.encode(["Der Hund"], "tgt")
    assert swapped.fingerprint != separate.fingerprint


# --- files ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["joint", "separate"])
def test_saving_and_loading_change_nothing(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    tokenizer.save(tmp_path / "a")
    loaded = Tokenizer.load(tmp_path / "a")
    loaded.save(tmp_path / "b")
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    models = ["tokenizer.model"] if kind == "joint" else ["src.model", "tgt.model"]
    assert names == sorted([*models, "tokenizer.json", "MANIFEST.json"])
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for attribute in ("config", "fingerprint", "src_vocab_size", "tgt_vocab_size", "trained_on"):
        assert getattr(loaded, attribute) == getattr(tokenizer, attribute)
    for side in SIDES:
        assert loaded.encode(["The dog, der Käse"], side) == tokenizer.encode(["The dog, der Käse"], side)
    with pytest.raises(MTKitError, match="exists already"):
        tokenizer.save(tmp_path / "a")


def test_the_fingerprint_is_the_hash_of_the_model(joint: Tokenizer, tmp_path: Path) -> None:
    joint.write_files(tmp_path)
    assert joint.fingerprint == hashlib.sha256((tmp_path / "tokenizer.model").read_bytes()).hexdigest()
    assert Tokenizer.read_files(tmp_path).fingerprint == joint.fingerprint


def test_exotic_white_space_in_pieces_survives(tmp_path: Path) -> None:
    lines: list[tuple[Side, str]] = [("src", "a\u00a0b \u3000 x\u2003y z\x85")] * 30
    tokenizer = train_largest(lines, normalization="identity", character_coverage=1.0, type="bpe")
    tokenizer.save(tmp_path / "a")
    loaded = Tokenizer.load(tmp_path / "a")
    pieces = tokenizer.pieces(range(tokenizer.src_vocab_size), "src")
    assert {"\u00a0", "\u3000", "\u2003", "\x85"} <= set(pieces)
    assert loaded.pieces(range(loaded.src_vocab_size), "src") == pieces
    assert loaded.encode([lines[0][1]], "src") == tokenizer.encode([lines[0][1]], "src")


def test_a_tokenizer_can_be_sent_to_another_process(separate: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(separate))
    assert copy.fingerprint == separate.fingerprint
    assert copy.encode(["The dog"], "src") == separate.encode(["The dog"], "src")


def _foreign_model(**options: Any) -> bytes:
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line, _ in PAIRS]), model_writer=writer, vocab_size=40, minloglevel=3, **options
    )
    return writer.getvalue()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: model[: len(model) // 2], "is not a sentencepiece model"),
        (lambda model: b"garbage" * 100, "is not a sentencepiece model"),
        (lambda model: b"", "0 bytes cannot be a sentencepiece model"),
        (lambda model: _foreign_model(), r"has the ids \(-1, 0, 1, 2\)"),
        (lambda model: _foreign_model(pad_id=0, unk_id=1, bos_id=2, eos_id=3), "holds 40 pieces, but tokenizer.json says 320"),
    ],
    ids=["truncated", "garbage", "empty", "other ids", "other size"],
)
@pytest.mark.parametrize("hash_fits", [False, True])
def test_a_damaged_model_is_refused_by_name(
    damage: Callable[[bytes], bytes], message: str, hash_fits: bool, joint: Tokenizer, tmp_path: Path
) -> None:
    joint.write_files(tmp_path)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(damage(path.read_bytes()))
    if hash_fits:
        meta = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
        meta["models"]["tokenizer.model"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        (tmp_path / "tokenizer.json").write_text(json.dumps(meta), "utf-8")
    elif "bytes cannot" not in message:
        message = "its sha256 differs"
    with pytest.raises(ArtefactError, match=message) as caught:
        Tokenizer.read_files(tmp_path)
    assert str(path) in caught.value.message


def test_a_flipped_bit_is_noticed(joint: Tokenizer, tmp_path: Path) -> None:
    joint.save(tmp_path / "t")
    path = tmp_path / "t" / "tokenizer.model"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtefactError, match="its sha256 differs"):
        Tokenizer.load(tmp_path / "t")


def test_exchanged_models_are_noticed(separate: Tokenizer, tmp_path: Path) -> None:
    separate.write_files(tmp_path)
    (tmp_path / "src.model").rename(tmp_path / "x")
    (tmp_path / "tgt.model").rename(tmp_path / "src.model")
    (tmp_path / "x").rename(tmp_path / "tgt.model")
    with pytest.raises(ArtefactError, match=r"src\.model: its sha256 differs"):
        Tokenizer.read_files(tmp_path)


def _set(meta: Any, *keys: str, value: Any) -> Any:
    target = meta
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    return meta


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda meta: [], "does not describe a tokenizer"),
        (lambda meta: {}, "does not describe a tokenizer"),
        (lambda meta: _set(meta, "format", value=2), "has format 2, this mtkit reads format 1"),
        (lambda meta: _set(meta, "config", "vocab_sise", value=2), "unknown key vocab_sise"),
        (lambda meta: _set(meta, "config", "seed", value="x"), "seed must be a whole number"),
        (lambda meta: _set(meta, "config", value=3), "must be a table"),
        (lambda meta: _set(meta, "config", "joint", value=False), "does not describe a tokenizer"),
        (lambda meta: _set(meta, "models", value=[]), "does not describe a tokenizer"),
        (lambda meta: _set(meta, "models", "tokenizer.model", value=None), "does not describe a tokenizer"),
        (lambda meta: _set(meta, "models", "tokenizer.model", "vocab_size", value="x"), "does not describe a tokenizer"),
        (lambda meta: _set(meta, "models", "tokenizer.model", "trained_on", value={"x": 1}), "does not describe a tokenizer"),
    ],
)
def test_a_wrong_description_is_refused_by_name(edit: Callable[[Any], Any], message: str, joint: Tokenizer, tmp_path: Path) -> None:
    joint.write_files(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text("utf-8")))), "utf-8")
    with pytest.raises(ArtefactError, match=message) as caught:
        Tokenizer.read_files(tmp_path)
    assert str(path) in caught.value.message


def test_missing_files_are_refused_by_name(joint: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.read_files(tmp_path)
    with pytest.raises(ArtefactError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)
    joint.write_files(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ArtefactError, match=r"tokenizer\.model: cannot be read"):
        Tokenizer.read_files(tmp_path)


def test_a_huge_model_is_not_even_read(joint: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joint.write_files(tmp_path)
    with open(tmp_path / "tokenizer.model", "r+b") as stream:
        stream.truncate(model_file.MAX_MODEL_BYTES + 1)
    read: list[str] = []
    original = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(ArtefactError, match=r"tokenizer\.model: 67108865 bytes cannot be a sentencepiece model"):
        Tokenizer.read_files(tmp_path)
    assert read == ["tokenizer.json"]


# --- real text ------------------------------------------------------------------------------------------------------------------------


def test_real_text_survives() -> None:
    data = shared_data("multi30k")
    sides = [(data / f"train.{language}").read_text("utf-8").split("\n")[:-1] for language in ("en", "de")]
    tokenizer = train_tokenizer(zip(*sides, strict=True), TokenizerConfig(type="bpe", vocab_size=8000))
    assert tokenizer.src_vocab_size == 8000
    for side, lines in zip(SIDES, sides, strict=True):
        expected = [" ".join(part for part in unicodedata.normalize("NFKC", line).split(" ") if part) for line in lines]
        assert tokenizer.decode(tokenizer.encode(lines, side), side) == expected


def test_a_tokenizer_is_found_in_what_holds_one(joint: Tokenizer, tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "model", kind="model") as directory:
        (directory / "tokenizer").mkdir()
        joint.write_files(directory / "tokenizer")
    assert Tokenizer.load(tmp_path / "model").fingerprint == joint.fingerprint
    with atomic_directory(tmp_path / "other", kind="model") as directory:
        (directory / "weights").touch()
    with pytest.raises(ArtefactError, match="other: is a model, and a tokenizer is needed here"):
        Tokenizer.load(tmp_path / "other")
