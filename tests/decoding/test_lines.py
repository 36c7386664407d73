"""How a search is asked for, and what is asked of lines. (What becomes of lines: test_translator.py, and test_prefixes.py.)"""

from typing import Any

import pytest

from mtkit.decoding.lines import SearchConfig
from mtkit.decoding.translator import Translator
from mtkit.errors import ConfigError
from tests.decoding.builders import random_model, tiny_tokenizer


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_size": 0}, "beam_size must be at least 1, but is 0"),
        ({"n_best": 0}, "n_best must be at least 1, but is 0"),
        ({"n_best": 5}, "n_best must be at most beam_size, but is 5 with beam_size 4"),
        ({"length_penalty": -0.1}, "length_penalty must be at least 0, but is -0.1"),
        ({"length_penalty": float("nan")}, "length_penalty must be at least 0, but is nan"),
        ({"max_length_ratio": float("inf")}, "max_length_ratio must be at least 0, but is inf"),
        ({"max_length_constant": -1}, "max_length_constant must be at least 0, but is -1"),
        ({"max_source_length": 0}, "max_source_length must be at least 1, but is 0"),
        ({"seed": -1}, "seed must be at least 0, but is -1"),
        ({"beam_size": 1001}, "beam_size must be at most 1000, but is 1001"),
        ({"n_best": 10_001}, "n_best must be at most 10000, but is 10001"),
        ({"length_penalty": 10.5}, "length_penalty must be at most 10, but is 10.5"),
        ({"max_length_ratio": 1e300}, "max_length_ratio must be at most 100, but is 1e+300"),
        ({"max_length_constant": 100_001}, "max_length_constant must be at most 100000, but is 100001"),
        ({"max_source_length": 100_001}, "max_source_length must be at most 100000, but is 100001"),
        ({"method": "sample", "temperature": 0.0}, "temperature must be above 0, but is 0.0"),
        ({"method": "sample", "top_k": 0}, "top_k must be at least 1 or none, but is 0"),
        ({"method": "sample", "top_p": 1.1}, "top_p must be above 0 and at most 1, or none, but is 1.1"),
        ({"method": "sample", "beam_size": 8}, "beam_size is for method beam, but method is sample"),
        ({"temperature": 0.5}, "temperature is for method sample, but method is beam"),
        ({"top_k": 5}, "top_k is for method sample, but method is beam"),
        ({"top_p": 0.5}, "top_p is for method sample, but method is beam"),
        ({"seed": 2}, "seed is for method sample, but method is beam"),
    ],
)
def test_a_bad_setting_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SearchConfig(**values)
    assert raised.value.message == message


def test_sampling_may_ask_for_more_than_the_beam() -> None:
    assert SearchConfig(method="sample", n_best=50).n_best == 50


def test_one_text_is_no_list_of_lines() -> None:
    with pytest.raises(TypeError, match="translate takes lines"):
        Translator([random_model(4)], tiny_tokenizer()).translate("baki")
