"""A run whose number of processes changes, for `test_trainer_resume.py`. As a script it is one process: CONFIG RUN OUTPUT, and RANK."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mtkit import config as codec
from mtkit.data.loader import Batch
from mtkit.distributed import World, process_group, read_environment
from mtkit.model.device import Precision
from mtkit.training.config import TrainConfig
from mtkit.training.prepare import open_data
from mtkit.training.run import RunDirectory
from mtkit.training.signals import StopRequest
from mtkit.training.step import UpdateBatch, UpdateResult
from mtkit.training.trainer import Place, Trainer


def train(tree: codec.Tree, run: Path, world: World) -> dict[str, Any]:
    """Begin or go on; returns the target ids of every sentence that this process has trained on, and what was said on going on."""
    config = codec.from_dict(TrainConfig, tree)
    place = Place(device=torch.device("cpu"), precision=Precision(name="fp32", device_type="cpu"), world=world)
    trainer = Trainer(config, data=open_data(config, run), run=RunDirectory(path=run), place=place, stop=StopRequest())
    _, warnings = trainer.resume()
    seen: list[list[int]] = []
    real = trainer.updater.run

    def update(batch: UpdateBatch, **options: Any) -> UpdateResult:
        for micro_batch, weight in zip(batch.micro_batches, batch.weights, strict=True):
            assert isinstance(micro_batch, Batch)
            if weight:
                seen.extend(row[mask].tolist() for row, mask in zip(micro_batch.tgt_out_BT, micro_batch.tgt_mask_BT, strict=True))
        return real(batch, **options)

    trainer.updater.run = update  # type: ignore[method-assign]
    for _ in trainer.train():
        pass
    return {"seen": seen, "warnings": warnings, "micro_per_update": trainer.state.micro_per_update, "within": trainer.state.position > 0}


def main() -> None:
    torch.set_num_threads(1)
    world = read_environment()
    with process_group(world, backend="gloo", timeout_s=60.0):
        result = train(json.loads(sys.argv[1]), Path(sys.argv[2]), world)
    Path(sys.argv[3], f"{world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
