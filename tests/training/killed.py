"""A run that is killed at one point after the other and goes on each time. A script: SHARDS ROOT FIRST STRIDE.

It prints what became of all those runs as JSON. It forks, which a process of pytest had better not do.
"""

import json
import os
import sys
from pathlib import Path

import torch

from mtkit import config as codec
from mtkit import faults
from mtkit.distributed import World
from mtkit.files import sha256_file
from mtkit.model.device import Precision
from mtkit.training.config import TrainConfig
from mtkit.training.prepare import open_data
from mtkit.training.run import RunDirectory
from mtkit.training.signals import StopRequest
from mtkit.training.trainer import Place, Trainer
from tests.training.toy import TOY

CONFIG: codec.Tree = {
    **TOY,
    "training": {"max_steps": 8, "precision": "fp32", "log_every_steps": 1, "ema_decay": 0.9},
    "validation": {"every_steps": 4, "translate": False, "metric": "loss"},
    "checkpoint": {"every_steps": 3, "every_minutes": None, "keep_last": 1, "keep_best": 1},
}


def train(shards: Path, place: Path) -> None:
    """What one call of `mtkit train` does."""
    config = codec.from_dict(TrainConfig, {**CONFIG, "data": {"shards": str(shards)}})
    run = RunDirectory(path=place)
    with run.lock():
        run.require_fitting(config)
        where = Place(device=torch.device("cpu"), precision=Precision(name="fp32", device_type="cpu"), world=World())
        trainer = Trainer(config, data=open_data(config, place), run=run, place=where, stop=StopRequest())
        trainer.resume()
        for _ in trainer.train():
            pass


def train_in_child(shards: Path, place: Path, fault: str | None) -> int:
    """The same in a process of its own; returns its exit code, that of a signal negative."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            faults.arm({"MTKIT_FAULT": fault or "", "MTKIT_ALLOW_FAULTS": "1"})
            train(shards, place)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def result(place: Path) -> list[str]:
    """What must not depend on how often a run was killed."""
    last = place / "checkpoints" / "step-0000008"
    files = [place / "model" / "model.safetensors", last / "trained.safetensors", last / "optimizer.safetensors"]
    lines = (place / "metrics.jsonl").read_bytes().decode().split("\n")[:-1]
    records = [record for record in map(json.loads, lines) if record["kind"] in ("train", "valid")]
    hidden = [path.relative_to(place).as_posix() for path in place.rglob(".*")]
    return [*map(sha256_file, files), json.dumps([(record["kind"], record["step"], record["loss"]) for record in records]), *hidden]


def main() -> None:
    shards, root, first, stride = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # a process is lost here, not power
    assert train_in_child(shards, root / "straight", None) == 0
    straight = result(root / "straight")
    number, lost, killed = first, [], 0
    while train_in_child(shards, root / str(number), f"kill@*:{number}") == -9:
        killed += 1
        code = train_in_child(shards, root / str(number), None)
        if code != 0 or result(root / str(number)) != straight:
            lost.append(number)
        number += stride
    json.dump({"killed": killed, "lost": lost, "last": result(root / str(number)) == straight}, sys.stdout)


if __name__ == "__main__":
    main()
