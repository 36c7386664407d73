"""The codec: what goes out comes back, and whatever does not fit is named."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtkit.config import Layer, differences, dump_toml, from_dict, is_config_of_run, parse_override, read_config, resolve, to_dict
from mtkit.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    lr: float = 5e-4
    warmup_steps: int = 4000
    max_steps: int | None = 100
    schedule: Literal["inverse-sqrt", "linear", "none"] = "inverse-sqrt"
    betas: tuple[float, float] = (0.9, 0.98)

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"lr must be above 0, but is {self.lr}", hint="Try 5e-4.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    seed: int = 1
    verbose: bool = False
    name: str = "run"
    revision: str | None = None
    patience: int | None = None
    dropout: float | None = 0.1
    level: Literal[1, 2, "none"] | None = None
    symbols: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    stages: tuple[Optim, ...] = ()
    optim: Optim = field(default_factory=Optim)
    warm: Optim | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Needy:
    path: str
    optim: Optim = field(default_factory=Optim)

    def __post_init__(self) -> None:
        if self.path == "both":
            raise ConfigError("path and optim do not fit")


text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
whole_numbers = st.integers(-(2**63) + 1, 2**63 - 1)
number = st.floats(allow_nan=False, allow_infinity=False)
optims = st.builds(
    Optim,
    lr=st.floats(min_value=1e-300, max_value=1e300),
    warmup_steps=whole_numbers,
    max_steps=st.none() | whole_numbers,
    schedule=st.sampled_from(["inverse-sqrt", "linear", "none"]),
    betas=st.tuples(number, number),
)
trains = st.builds(
    Train,
    seed=whole_numbers,
    verbose=st.booleans(),
    name=text,
    revision=st.none() | text,
    patience=st.none() | whole_numbers,
    dropout=st.none() | number,
    level=st.sampled_from([None, 1, 2, "none"]),
    symbols=st.lists(text).map(tuple),
    weights=st.dictionaries(text, number),
    stages=st.lists(optims, max_size=2).map(tuple),
    optim=optims,
    warm=st.none() | optims,
)


# --- round trips ----------------------------------------------------------------------------------------------------------------------


@given(trains)
def test_what_goes_out_as_json_comes_back(config: Train) -> None:
    assert from_dict(Train, to_dict(config)) == config


@given(trains)
def test_what_goes_out_as_toml_comes_back(config: Train) -> None:
    assert from_dict(Train, tomllib.loads(dump_toml(config))) == config


@given(trains, st.lists(text, min_size=1, max_size=3))
def test_origins_do_not_disturb_the_toml(config: Train, names: list[str]) -> None:
    origins = dict(zip(["seed", "optim.lr", "name"], names, strict=False))

    assert tomllib.loads(dump_toml(config, origins=origins)) == tomllib.loads(dump_toml(config))


def test_the_toml_is_made_for_reading() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Small:
        revision: str | None = None
        patience: int | None = None
        optim: Optim = field(default_factory=Optim)

    lines = dump_toml(Small(), origins={"optim.lr": "--set"}).split("\n")

    assert [line.rstrip() for line in lines] == [
        "# revision = none                            # default",
        'patience = "none"                            # default',
        "",
        "[optim]",
        "lr = 0.0005                                  # --set",
        "warmup_steps = 4000                          # default",
        "max_steps = 100                              # default",
        'schedule = "inverse-sqrt"                    # default',
        "betas = [0.9, 0.98]                          # default",
        "",
    ]


def test_plain_data_is_json_ready() -> None:
    data = to_dict(Train(symbols=("a",), stages=(Optim(),)))

    assert data["symbols"] == ["a"]
    assert data["stages"][0]["betas"] == [0.9, 0.98]
    assert data["warm"] is None


# --- what does not fit ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ({"optim": {"lrr": 1.0}}, "unknown key optim.lrr", "Did you mean optim.lr?"),
        ({"sed": 1}, "unknown key sed", "Did you mean seed?"),
        ({"warm": {"warmup": 1}}, "unknown key warm.warmup", "Did you mean warm.warmup_steps?"),
        ({"stages": [{}, {"zzz": 1}]}, r"unknown key stages\[1\].zzz", r"Known keys: stages\[1\].lr, stages\[1\].warmup_steps, .*"),
        ({"schedule": "x"}, "unknown key schedule", "Did you mean optim.schedule or warm.schedule?"),
        ({"optim.lr": 1.0}, "unknown key optim.lr", ".*"),
        ({"": 1}, "unknown key ", "Known keys: seed, .*"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(data: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}\n{hint}$".replace("?", r"\?")):
        from_dict(Train, data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"seed": "7"}, "seed must be a whole number, but is '7'"),
        ({"seed": 1.5}, "seed must be a whole number, but is 1.5"),
        ({"seed": True}, "seed must be a whole number, but is True"),
        ({"seed": None}, "seed must be a whole number, but is none"),
        ({"seed": float("inf")}, "seed must be a whole number, but is inf"),
        ({"seed": 2**63}, "seed must be a whole number, but is 9223372036854775808, which is too large"),
        ({"seed": 1e19}, r"seed must be a whole number, but is 1e\+19"),
        ({"verbose": 1}, "verbose must be true or false, but is 1"),
        ({"name": 3}, "name must be a string, but is 3"),
        ({"patience": "soon"}, "patience must be a whole number or none, but is 'soon'"),
        ({"dropout": float("nan")}, "dropout must be a number or none, but is nan"),
        ({"dropout": float("inf")}, "dropout must be a number or none, but is inf"),
        ({"dropout": 10**400}, "dropout must be a number or none, but is 1000.*"),
        ({"dropout": True}, "dropout must be a number or none, but is True"),
        ({"level": 3}, "level must be one of 1, 2, none or none, but is 3"),
        ({"level": True}, "level must be one of .*, but is True"),
        ({"level": 1.0}, "level must be one of .*, but is 1.0"),
        ({"level": []}, r"level must be one of .*, but is \[\]"),
        ({"symbols": "ab"}, "symbols must be a list, but is 'ab'"),
        ({"symbols": "[ab]"}, r"""symbols must be a list, but is '\[ab\]'\nStrings in a list need quotes.* --set 'symbols=\["a", "b"\]'"""),
        ({"symbols": ["a", 1]}, r"symbols\[1\] must be a string, but is 1"),
        ({"weights": []}, r"weights must be a table, but is \[\]"),
        ({"weights": {"de": "1"}}, "weights.de must be a number, but is '1'"),
        ({"optim": 3}, "optim must be a table, but is 3"),
        ({"optim": None}, "optim must be a table, but is none"),
        ({"warm": 3}, "warm must be a table or none, but is 3"),
        ({"optim": {"lr": "fast"}}, "optim.lr must be a number, but is 'fast'"),
        ({"optim": {"schedule": "cosine"}}, "optim.schedule must be one of inverse-sqrt, linear, none, but is 'cosine'"),
        ({"optim": {"betas": [0.9]}}, r"optim.betas must be a list of 2, but is \[0.9\]"),
        ({"optim": {"betas": [0.9, 0.9, 0.9]}}, r"optim.betas must be a list of 2, but is .*"),
        ({"optim": {"betas": [0.9, "x"]}}, r"optim.betas\[1\] must be a number, but is 'x'"),
        ({"optim": {"lr": 0}}, "optim.lr must be above 0, but is 0.0\nTry 5e-4."),
        ({"stages": [{"lr": -1}]}, r"stages\[0\].lr must be above 0, but is -1.0\nTry 5e-4."),
    ],
)
def test_a_value_that_does_not_fit_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        from_dict(Train, data)


def test_a_required_key_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="^path is required and was not given$"):
        from_dict(Needy, {})


def test_a_fault_of_several_keys_keeps_its_words() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Outer:
        needy: Needy

    with pytest.raises(ConfigError, match="^path and optim do not fit$"):
        from_dict(Needy, {"path": "both"})
    with pytest.raises(ConfigError, match="^needy.path and optim do not fit$"):
        from_dict(Outer, {"needy": {"path": "both"}})


def test_numbers_and_lists_become_what_the_field_is() -> None:
    config = from_dict(Train, {"seed": 3.0, "dropout": 1, "symbols": ["a"], "weights": {"de": 2}})

    assert (type(config.seed), type(config.dropout), type(config.weights["de"])) == (int, float, float)
    assert config.symbols == ("a",)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"patience": "none"}, Train(patience=None)),
        ({"warm": "none"}, Train(warm=None)),
        ({"optim": {"max_steps": "none"}}, Train(optim=Optim(max_steps=None))),
        ({"optim": {"schedule": "none"}}, Train(optim=Optim(schedule="none"))),
        ({"optim": {"schedule": None}}, Train(optim=Optim(schedule="none"))),  # as `--set optim.schedule=none` gives it
        ({"level": "none"}, Train(level="none")),
        ({"level": None}, Train(level=None)),
        ({"revision": "none"}, Train(revision="none")),
        ({"name": "none"}, Train(name="none")),
    ],
)
def test_the_word_none_is_a_string_only_where_it_may_be_one(data: dict[str, Any], expected: Train) -> None:
    assert from_dict(Train, data) == expected


# --- layers ---------------------------------------------------------------------------------------------------------------------------


def test_later_layers_win_and_every_value_has_its_origin() -> None:
    resolved = resolve(
        Train,
        [
            Layer(name="preset tiny", data={"seed": 2, "optim": {"lr": 1e-3, "warmup_steps": 10}, "symbols": ["a", "b"]}),
            Layer(name="config.toml", data={"optim": {"lr": 2e-3}, "symbols": ["c"], "weights": {"de": 1}}),
            Layer(name="--set", data={"optim": {"lr": 3e-3}, "weights": {"en": 2}}),
        ],
    )

    assert resolved.config == Train(seed=2, optim=Optim(lr=3e-3, warmup_steps=10), symbols=("c",), weights={"de": 1.0, "en": 2.0})
    assert resolved.origins == {
        "seed": "preset tiny",
        "optim.warmup_steps": "preset tiny",
        "symbols": "config.toml",
        "weights.de": "config.toml",
        "weights.en": "--set",
        "optim.lr": "--set",
    }


def test_layers_are_left_as_they_were() -> None:
    low: dict[str, Any] = {"optim": {"lr": 1.0}}
    resolve(Train, [Layer(name="low", data=low), Layer(name="high", data={"optim": {"lr": 2.0}})])

    assert low == {"optim": {"lr": 1.0}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"optim": {"lrr": 1}}, "^config.toml: unknown key optim.lrr\nDid you mean optim.lr?"),
        ({"optim": {"lr": "x"}}, r"^optim.lr \(config.toml\) must be a number"),
        ({"optim": {"lr": 0}}, r"^optim.lr \(config.toml\) must be above 0, but is 0.0\nTry 5e-4."),
    ],
)
def test_a_fault_names_its_layer(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(Train, [Layer(name="preset tiny", data={"seed": 2, "optim": {"lr": 1.0}}), Layer(name="config.toml", data=data)])


def test_a_table_replaces_none_and_none_a_table() -> None:
    table, none = Layer(name="a", data={"warm": {"lr": 1.0}}), Layer(name="b", data={"warm": None})

    assert resolve(Train, [none, table]).config.warm == Optim(lr=1.0)
    assert resolve(Train, [table, none]).config.warm is None


def test_differences() -> None:
    old, new = to_dict(Train(seed=1, warm=None)), to_dict(Train(seed=2, optim=Optim(lr=1.0), warm=Optim()))
    del new["name"]

    assert differences(old, old) == []
    lines = differences(old, new)
    assert lines[:3] == ["name: 'run' -> none", "optim.lr: 0.0005 -> 1.0", "seed: 1 -> 2"]
    assert lines[3].startswith("warm: none -> {")


# --- overrides ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lr=5e-4", {"optim": {"lr": 5e-4}}),
        ("seed=3", {"seed": 3}),
        ("seed = 3 ", {"seed": 3}),
        ("verbose=true", {"verbose": True}),
        ("name=base", {"name": "base"}),
        ('name="3"', {"name": "3"}),
        ("name=a=b", {"name": "a=b"}),
        ("name=", {"name": ""}),
        ("name=two words", {"name": "two words"}),
        ("patience=none", {"patience": None}),
        ("patience=None", {"patience": None}),
        ('revision="none"', {"revision": "none"}),
        ('symbols=["a", "b"]', {"symbols": ["a", "b"]}),
        ("weights={de = 1.5}", {"weights": {"de": 1.5}}),
        ("a.b.c=1", {"a": {"b": {"c": 1}}}),
        ("seed=1\nname=2", {"seed": "1\nname=2"}),
        ("seed=" + "9" * 5000, {"seed": "9" * 5000}),
        ("symbols=" + "[" * 100_000, {"symbols": "[" * 100_000}),
    ],
)
def test_override(word: str, expected: dict[str, Any]) -> None:
    assert parse_override(word) == expected


@pytest.mark.parametrize("word", ["", "seed", "=3", " = 3", "optim.=3", ".lr=3", "optim..lr=3"])
def test_an_override_that_is_none(word: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form key=value"):
        parse_override(word)


@given(st.text())
def test_any_override_is_parsed_or_refused(word: str) -> None:
    try:
        parse_override(f"name={word}")
    except ConfigError:
        pytest.fail("everything after = is a value")


# --- TOML files -----------------------------------------------------------------------------------------------------------------------


def test_a_byte_order_mark_and_crlf_are_no_fault(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbfseed = 2\r\n[optim]\r\nlr = 1e-3\r\n")

    assert from_dict(Train, read_config(tmp_path / "config.toml")) == Train(seed=2, optim=Optim(lr=1e-3))


@pytest.mark.parametrize(
    "data",
    [
        b"seed",
        b"seed = 1\nseed = 2",
        b"[optim]\n[optim]",
        b"name = caf\xe9",
        b"\xff\xfes\x00e\x00e\x00d\x00=\x001\x00",
        b"seed = " + b"9" * 5000,
        b"symbols = " + b"[" * 100_000,
        b"name = 'a\x00b'",
    ],
)
def test_a_file_that_is_no_toml(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.toml").write_bytes(data)

    with pytest.raises(ConfigError, match="config.toml: is not valid TOML"):
        read_config(tmp_path / "config.toml")


def test_a_config_may_be_the_json_that_was_saved(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('\ufeff{"seed": 1, "optim": {"lr": null}}')
    assert read_config(tmp_path / "config.json") == {"seed": 1, "optim": {"lr": None}}
    for text, message in (("{", "is not valid JSON"), ("[1]", "is not a config")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=f"config.json: {message}"):
            read_config(tmp_path / "config.json")


@pytest.mark.parametrize(("name", "has_hint"), [("config.yaml", True), ("config.toml", False)])
def test_a_config_of_another_kind_is_told_what_to_do(tmp_path: Path, name: str, has_hint: bool) -> None:
    (tmp_path / name).write_text('{"seed": 1}')
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / name)
    assert ("--print-config" in (caught.value.hint or "")) == has_hint


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config.toml: cannot be read: No such file or directory"):
        read_config(tmp_path / "config.toml")


@pytest.mark.parametrize("value", ["1979-05-27", "07:32:00", "__import__('os').system('false')", "{}", "[[1]]", "nan"])
def test_values_of_other_kinds_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="seed must be a whole number"):
        from_dict(Train, parse_override(f"seed={value}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("size = 3", False),
        ("[owner]\nsize = 3\n[other]\nsize = 4", True),
        ("[other]\nsize = 4", True),
        ('preset = "tiny"', True),
        ("siez = 3", False),
    ],
)
def test_a_file_holds_one_config_or_that_of_a_whole_run(tmp_path: Path, text: str, expected: bool) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Owner:
        size: int = 1

    (tmp_path / "config.toml").write_text(text)
    assert is_config_of_run(read_config(tmp_path / "config.toml"), Owner, table="owner") == expected
