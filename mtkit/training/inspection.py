"""Says what a directory of mtkit is: a tokenizer, a shard set, a checkpoint, a model or a run; its config, sizes, origin and state.

Reads headers and JSON only, never a tensor, and does not need torch.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtkit.artefacts import MANIFEST_NAME, Manifest, Verify, verify_directory
from mtkit.checkpoint.layout import (
    CHECKPOINTS_NAME,
    CONFIG_NAME,
    FINAL_MODEL_NAME,
    METRICS_NAME,
    MODEL_NAME,
    SCALE_SUFFIX,
    TOKENIZER_NAME,
    load_tokenizer,
    read_tensor_header,
)
from mtkit.checkpoint.manager import STATE_NAME, list_checkpoints
from mtkit.data.shards import REPORT_NAME, ShardSet
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError
from mtkit.files import read_json
from mtkit.training.progress import read_metrics

RUN_KIND = "run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What a directory is.

    Attributes:
        path: The directory.
        kind: `tokenizer`, `shards`, `checkpoint`, `model` or `run`.
        verified: `fast`: names and sizes of all files are right; `full`: their contents too.
        facts: What a person asks first, JSON-ready: counts, sizes, state.
        config: The resolved config that made it.
        inputs: Fingerprints of what it was made from.
        files: Size in bytes of every file that a manifest lists.
        damage: Parts of a run that are damaged, one line each; a single artefact that is damaged is an error instead.
        mtkit_version: The version that wrote it, or None for a run.
        fingerprint: Equal for directories with equal files, or None for a run.
    """

    path: Path
    kind: str
    verified: Verify
    facts: dict[str, Any]
    config: dict[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    mtkit_version: str | None = None
    fingerprint: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "verified": self.verified,
            "mtkit_version": self.mtkit_version,
            "fingerprint": self.fingerprint,
            "facts": self.facts,
            "config": self.config,
            "inputs": self.inputs,
            "files": self.files,
            "damage": self.damage,
        }


def inspect_directory(path: Path, *, verify: Verify = "fast") -> Inspection:
    """Find out what a directory is and whether it is whole.

    Args:
        path: An artefact or a run.
        verify: `fast` compares names and sizes of the files with the manifest, `full` reads them and compares their sha256.

    Raises:
        ArtefactError: It is nothing that mtkit made, or an artefact that is damaged.
    """
    if (path / MANIFEST_NAME).is_file():
        manifest = verify_directory(path, level=verify)
        return Inspection(
            path=path,
            kind=manifest.kind,
            verified=verify,
            facts=_artefact_facts(path, manifest),
            config=manifest.config,
            inputs=manifest.inputs,
            files={name: record.size for name, record in sorted(manifest.files.items())},
            mtkit_version=manifest.mtkit_version,
            fingerprint=manifest.fingerprint,
        )
    if (path / CHECKPOINTS_NAME).is_dir() or (path / METRICS_NAME).is_file():
        return _inspect_run(path, verify=verify)
    what = "does not exist" if not path.exists() else "is a file" if path.is_file() else f"has no {MANIFEST_NAME} and no {CHECKPOINTS_NAME}"
    raise ArtefactError(f"{path}: {what}", hint="Give the directory of a tokenizer, shard set, checkpoint, model or run that mtkit wrote.")


def _artefact_facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    readers = {"tokenizer": _tokenizer_facts, "shards": _shard_facts, "model": _model_facts, "checkpoint": _checkpoint_facts}
    facts: dict[str, Any] = {"num_files": len(manifest.files), "num_bytes": sum(record.size for record in manifest.files.values())}
    if manifest.kind in readers:
        facts |= readers[manifest.kind](path)
    return facts


def _tokenizer_facts(path: Path) -> dict[str, Any]:
    tokenizer = Tokenizer.read_files(path)
    return {
        "type": tokenizer.config.type,
        "joint": tokenizer.joint,
        "src_vocab_size": tokenizer.src_vocab_size,
        "tgt_vocab_size": tokenizer.tgt_vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "trained_on": {name: {"num_lines": text.num_lines, "num_sentences": text.num_sentences} for name, text in tokenizer.trained_on.items()},
    }


def _shard_facts(path: Path) -> dict[str, Any]:
    shards = ShardSet.open(path)
    num_pairs = shards.num_pairs
    num_src, num_tgt = sum(shard.num_src_tokens for shard in shards.meta.shards), sum(shard.num_tgt_tokens for shard in shards.meta.shards)
    max_src, max_tgt = shards.max_lengths()
    return {
        "num_pairs": num_pairs,
        "num_shards": len(shards.meta.shards),
        "corpora": list(shards.corpora),
        "num_src_tokens": num_src,
        "num_tgt_tokens": num_tgt,
        "mean_src_length": round(num_src / max(1, num_pairs), 2),
        "mean_tgt_length": round(num_tgt / max(1, num_pairs), 2),
        "max_src_length": max_src,
        "max_tgt_length": max_tgt,
        "held_out": {name: len(shards.held_out(name)[0]) for name in shards.held_out_names},
        "tokenizer": shards.tokenizer.fingerprint,
        "report": read_json(path / REPORT_NAME) if (path / REPORT_NAME).is_file() else {},
    }


def _model_facts(path: Path) -> dict[str, Any]:
    header = read_tensor_header(path / MODEL_NAME)
    description = _read_object(path / CONFIG_NAME)
    tokenizer = Tokenizer.read_files(path / TOKENIZER_NAME)
    if tokenizer.fingerprint != description.get("tokenizer"):
        raise ArtefactError(f"{path}: its tokenizer is not the one that the model was trained with", hint="Copy the whole directory anew.")
    return {
        "num_parameters": sum(math.prod(entry["shape"]) for name, entry in header.items() if not name.endswith(SCALE_SUFFIX)),
        "num_tensors": len(header),
        "precision": description.get("precision", "fp32"),
        "joint": tokenizer.joint,
        "dtypes": sorted({str(entry.get("dtype")) for entry in header.values()}),
        "src_vocab_size": description.get("src_vocab_size"),
        "tgt_vocab_size": description.get("tgt_vocab_size"),
        "tokenizer": tokenizer.fingerprint,
        "provenance": description.get("provenance"),
    }


def _checkpoint_facts(path: Path) -> dict[str, Any]:
    state = _read_object(path / STATE_NAME)
    return {"state": {name: value for name, value in state.items() if name != "format"}, **_model_facts(path)}


def _inspect_run(path: Path, *, verify: Verify) -> Inspection:
    damage: list[str] = []
    stored = list_checkpoints(path / CHECKPOINTS_NAME)
    found = sorted(entry.name for entry in (path / CHECKPOINTS_NAME).glob("step-*")) if (path / CHECKPOINTS_NAME).is_dir() else []
    known = {checkpoint.path.name for checkpoint in stored}
    damage += [f"{path / CHECKPOINTS_NAME / name}: is not a complete checkpoint" for name in found if name not in known]
    parts = [(checkpoint.path, "checkpoint") for checkpoint in stored]
    has_model = (path / FINAL_MODEL_NAME / MANIFEST_NAME).is_file()
    if has_model:
        parts.append((path / FINAL_MODEL_NAME, "model"))
    for part, kind in parts:
        try:
            verify_directory(part, kind=kind, level=verify)
        except ArtefactError as error:
            damage.append(error.message)

    facts: dict[str, Any] = {"has_model": has_model, "checkpoints": {checkpoint.path.name: checkpoint.scores for checkpoint in stored}}
    if stored:
        state = _read_object(stored[-1].path / STATE_NAME)
        facts["latest_checkpoint"] = stored[-1].path.name
        facts |= {name: state.get(name) for name in ("step", "epoch", "num_tgt_tokens", "elapsed_s", "best_value", "best_step")}
    with contextlib.suppress(ArtefactError):  # there is none yet, or what is wrong with it is named above
        tokenizer = load_tokenizer(path)
        facts |= {"joint": tokenizer.joint, "src_vocab_size": tokenizer.src_vocab_size, "tgt_vocab_size": tokenizer.tgt_vocab_size}
    facts |= _metrics_facts(path / METRICS_NAME)
    config = _read_object(path / CONFIG_NAME) if (path / CONFIG_NAME).is_file() else {}
    return Inspection(path=path, kind=RUN_KIND, verified=verify, facts=facts, config=config, damage=damage)


def _metrics_facts(path: Path) -> dict[str, Any]:
    """What the records of a run say of its course."""
    if not path.is_file():
        return {}
    records = read_metrics(path)
    last: dict[str, Mapping[str, Any]] = {record["kind"]: record for record in records}
    facts: dict[str, Any] = {
        "num_sessions": sum(record["kind"] == "start" for record in records),
        "num_validations": sum(record["kind"] == "valid" for record in records),
        "last_recorded_step": max((record["step"] for record in records), default=0),
    }
    for kind in ("start", "train", "valid"):
        if kind in last:
            facts[f"last_{kind}"] = {name: value for name, value in last[kind].items() if name != "kind"}
    if records and records[-1]["kind"] == "end":
        facts["ended"] = records[-1].get("reason")
    return facts


def _read_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ArtefactError(f"{path}: holds no JSON object")
    return value
