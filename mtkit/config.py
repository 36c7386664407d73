"""Dataclass <-> plain data: the strict codec behind every config of mtkit.

A config is a frozen dataclass whose fields are bool, int, float, str, `Literal`, another config, a tuple of such, a string-keyed dict of such, or one
of these `| None`. TOML comes in, JSON goes out, and a wrong key, type or value is an error that names the dotted key and what would be right.

TOML has no null, so the string "none" stands for None wherever the field allows None and no string that says so itself.

Layers: a config is built from several partial dicts, the later ones winning, and `Resolved.origins` tells which layer gave each value.
"""

import dataclasses
import difflib
import json
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union

from mtkit.errors import ConfigError

C = TypeVar("C")

_LARGEST_INT = 2**63 - 1
"""What torch and numpy hold."""

Tree = dict[str, Any]
"""Nested dicts with string keys, as TOML and JSON give them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Partial config data and the name of its source, for example `preset tiny` or `config.toml`."""

    name: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(Generic[C]):
    """A config and where each of its values came from.

    Attributes:
        config: The config.
        origins: Dotted key -> name of the layer that set it; a key that no layer set is absent (its default holds).
    """

    config: C
    origins: dict[str, str]


def resolve(cls: type[C], layers: Sequence[Layer]) -> Resolved[C]:
    """Build a config from layers, the later ones winning key by key.

    Raises:
        ConfigError: A layer holds an unknown key or a value that does not fit; the message names the layer.
    """
    merged: Tree = {}
    origins: dict[str, str] = {}
    for layer in layers:
        check_layer(cls, layer)
        _merge(merged, layer.data, origins=origins, name=layer.name, prefix="")
    return Resolved(config=from_dict(cls, merged, origins=origins), origins=origins)


def from_dict(cls: type[C], data: Mapping[str, Any], *, origins: Mapping[str, str] | None = None) -> C:
    """Build a config from nested dicts; missing keys take their defaults.

    Args:
        cls: The dataclass.
        data: Nested dicts with the dataclass's field names as keys.
        origins: Dotted key -> source, to be named in messages.

    Raises:
        ConfigError: Unknown key, wrong type, or a value that the dataclass refuses.
    """
    return typing.cast(C, _build(cls, data, prefix="", origins=origins or {}))


def to_dict(config: Any) -> Tree:
    """The config as nested dicts, tuples as lists: JSON-ready, and `from_dict` gives the same config back."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def read_config(path: Path) -> Tree:
    """Read a TOML file, or the JSON that a run has saved; a byte-order mark at its start is ignored.

    Raises:
        ConfigError: It is missing or neither.
    """
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_bytes().decode("utf-8-sig")
        tree = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: bad UTF-8, a number of too many digits
        hint = "A config that is YAML has to be written anew; `mtkit train ... --print-config` prints all keys as TOML."
        raise ConfigError(f"{path}: is not valid {kind}: {error}", hint=hint if path.suffix in (".yaml", ".yml") else None) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: is not a config, which has keys and values")
    return typing.cast(Tree, tree)


def is_config_of_run(tree: Tree, cls: type[Any], *, table: str) -> bool:
    """Whether what a file holds is the config of a whole training run, in which that of a part is one table among others, or that of the part alone.

    It is the former where it names a preset, has that table, or another one that the part has no field for.

    Args:
        tree: What `read_config` gave.
        cls: The dataclass of the part.
        table: Its name in a run's config.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    return "preset" in tree or isinstance(tree.get(table), dict) or any(isinstance(value, dict) and key not in names for key, value in tree.items())


def parse_override(text: str) -> Tree:
    """Turn `optim.lr=5e-4` into `{"optim": {"lr": 0.0005}}`. The value is TOML; a bare word is a string, `none` is None.

    Raises:
        ConfigError: There is no `=`, or no key.
    """
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not key or not all(key.split(".")):
        raise ConfigError(f"{text!r} is not of the form key=value", hint="For example: --set optim.lr=5e-4")
    value: Any = None
    if raw.lower() != "none":
        try:
            parsed = tomllib.loads(f"value = {raw}")
            value = parsed["value"] if len(parsed) == 1 else raw
        except (ValueError, RecursionError):
            value = raw
    for part in reversed(key.split(".")):
        value = {part: value}
    return typing.cast(Tree, value)


def dump_toml(config: Any, *, origins: Mapping[str, str] | None = None) -> str:
    """Write a config as TOML that `read_config` and `from_dict` turn into the same config.

    None is written as "none", or as a comment where that would be an ordinary string; such a field should have None as its default.

    Args:
        config: The config.
        origins: If given, each line ends with a comment that names the value's source (`default` for none).
    """
    lines: list[str] = []
    _dump_table(config, prefix="", origins=origins, lines=lines)
    return "\n".join(lines).strip() + "\n"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    """Compare two configs given as nested dicts; one line per differing key: `optim.lr: 0.001 -> 0.002`."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        left, right = old.get(key), new.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            lines += differences(left, right, prefix=f"{prefix}{key}.")
        elif left != right:
            lines.append(f"{prefix}{key}: {_show(left)} -> {_show(right)}")
    return lines


def check_layer(cls: type[Any], layer: Layer) -> None:
    """Refuse keys of a layer that the dataclass does not have.

    Raises:
        ConfigError: Names the layer, the key and the nearest one that exists.
    """
    try:
        check_keys(cls, layer.data)
    except ConfigError as error:
        raise ConfigError(f"{layer.name}: {error.message}", hint=error.hint) from None


def check_keys(cls: type[Any], data: Mapping[str, Any], *, prefix: str = "") -> None:
    """Refuse keys that the dataclass does not have.

    Raises:
        ConfigError: Names the key and the nearest one that exists.
    """
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    for key, value in data.items():
        if key not in names:
            close = [prefix + name for name in _places(cls, key) or difflib.get_close_matches(key, names, n=1)]
            hint = f"Did you mean {' or '.join(close)}?" if close else f"Known keys: {', '.join(prefix + name for name in names)}"
            raise ConfigError(f"unknown key {prefix}{key}", hint=hint)
        nested = next((option for option in _options(hints[key]) if dataclasses.is_dataclass(option)), None)
        if nested is not None and isinstance(value, Mapping):
            check_keys(typing.cast(type[Any], nested), value, prefix=f"{prefix}{key}.")


def _places(cls: type[Any], name: str) -> list[str]:
    """The dotted keys below a dataclass that end in a name, the least deep ones first."""
    places, hints = [], typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        for option in _options(hints[field.name]):
            if dataclasses.is_dataclass(option):
                nested = typing.cast(type[Any], option)
                places += [f"{field.name}.{name}"] * (name in {other.name for other in dataclasses.fields(nested)})
                places += [f"{field.name}.{place}" for place in _places(nested, name)]
    return sorted(places, key=lambda place: place.count("."))


def _merge(target: Tree, source: Mapping[str, Any], *, origins: dict[str, str], name: str, prefix: str) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping):
            child = target.get(key)
            if not isinstance(child, dict):
                child = target[key] = {}
            _merge(child, value, origins=origins, name=name, prefix=f"{prefix}{key}.")
        else:
            target[key] = value
            origins[prefix + key] = name


def _build(cls: type[Any], data: Mapping[str, Any], *, prefix: str, origins: Mapping[str, str]) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{prefix.rstrip('.')} must be a table, but is {_show(data)}")
    check_keys(cls, data, prefix=prefix)
    hints = typing.get_type_hints(cls)
    values = {key: _convert(hints[key], value, key=prefix + key, origins=origins) for key, value in data.items()}
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{prefix}{missing[0]} is required and was not given")
    try:
        return cls(**values)
    except ConfigError as error:
        name, _, rest = error.message.partition(" ")
        if name in hints:
            raise ConfigError(f"{prefix}{name}{_source(prefix + name, origins)} {rest}", hint=error.hint) from None
        raise ConfigError(f"{prefix.rstrip('.')}: {error.message}" if prefix else error.message, hint=error.hint) from None


def _convert(kind: Any, value: Any, *, key: str, origins: Mapping[str, str]) -> Any:
    options = _options(kind)
    for option in options:
        matched, result = _try_convert(option, value, key=key, origins=origins)
        if matched:
            return result
    if value == "none" and type(None) in options:
        return None
    if value is None and str not in options and _takes_word_none(kind):
        return "none"  # `--set norm=none`, where none is one of the choices
    hint = None
    if isinstance(value, str) and value.startswith("[") and any(typing.get_origin(option) is tuple for option in options):
        hint = f"""Strings in a list need quotes, and the list as a whole, for the shell: --set '{key}=["a", "b"]'"""
    raise ConfigError(f"{key}{_source(key, origins)} must be {_describe(kind)}, but is {_show(value)}", hint=hint)


def _takes_word_none(kind: Any) -> bool:
    """Whether the string "none" is a value of its own, not None."""
    return any(option is str or (typing.get_origin(option) is Literal and "none" in typing.get_args(option)) for option in _options(kind))


def _source(key: str, origins: Mapping[str, str]) -> str:
    return f" ({origins[key]})" if key in origins else ""


def _try_convert(kind: Any, value: Any, *, key: str, origins: Mapping[str, str]) -> tuple[bool, Any]:
    origin = typing.get_origin(kind)
    if kind is type(None):
        return value is None, None
    if dataclasses.is_dataclass(kind):
        return (True, _build(typing.cast(type[Any], kind), value, prefix=f"{key}.", origins=origins)) if isinstance(value, Mapping) else (False, None)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(kind)), value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False, None
        items = typing.get_args(kind)
        if items[-1] is Ellipsis:
            items = (items[0],) * len(value)
        elif len(items) != len(value):
            return False, None
        return True, tuple(
            _convert(item, entry, key=f"{key}[{index}]", origins=origins) for index, (item, entry) in enumerate(zip(items, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            return False, None
        item = typing.get_args(kind)[1]
        return True, {str(name): _convert(item, entry, key=f"{key}.{name}", origins=origins) for name, entry in value.items()}
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        return is_number, float(value) if is_number else None
    if kind is int:
        is_whole = not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
        fits = is_whole and abs(value) <= _LARGEST_INT
        return fits, int(value) if fits else None
    return isinstance(value, kind), value


def _options(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def _describe(kind: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "none"}
    parts = []
    for option in _options(kind):
        origin = typing.get_origin(option)
        if origin is Literal:
            parts.append("one of " + ", ".join(str(choice) for choice in typing.get_args(option)))
        elif origin is tuple:
            items = typing.get_args(option)
            parts.append("a list" if items[-1] is Ellipsis else f"a list of {len(items)}")
        elif origin is dict or dataclasses.is_dataclass(option):
            parts.append("a table")
        else:
            parts.append(names[option])
    return " or ".join(parts)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return value


def _dump_table(config: Any, *, prefix: str, origins: Mapping[str, str] | None, lines: list[str]) -> None:
    hints = typing.get_type_hints(type(config))
    tables = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            tables.append((field.name, value))
            continue
        is_silent = value is None and _takes_word_none(hints[field.name])
        line = f"# {field.name} = none" if is_silent else f"{field.name} = {_toml_value(_plain(value))}"
        if origins is not None:
            source = origins.get(prefix + field.name, "default")
            line = f"{line:<44} # {''.join(character if character.isprintable() else ' ' for character in source)}"
        lines.append(line)
    for name, value in tables:
        lines += ["", f"[{prefix}{name}]"]
        _dump_table(value, prefix=f"{prefix}{name}.", origins=origins, lines=lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_value(name)} = {_toml_value(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, float):
        return repr(value)
    if value is None:
        return '"none"'
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _show(value: Any) -> str:
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        return f"{value}, which is too large"
    return "none" if value is None else repr(value)
