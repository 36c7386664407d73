"""What a run begins with: random weights, or those of another model, for fine-tuning."""

from dataclasses import dataclass
from pathlib import Path

import torch

from mtkit import config as codec
from mtkit.artefacts import verify_directory
from mtkit.checkpoint.format import ModelDescription, StoredWeights, copy_parameters, read_description, read_tensors, require_fitting_tokenizer
from mtkit.checkpoint.layout import MODEL_NAME, TOKENIZER_NAME, find_model, read_tensor_header
from mtkit.data.tokenizer import Tokenizer
from mtkit.errors import ArtefactError, ConfigError, ResourceError, is_out_of_memory
from mtkit.model.config import ONLY_IN_TRAINING
from mtkit.model.transformer import Transformer
from mtkit.training.config import TrainConfig, require_tying_fits
from mtkit.training.optim import optimizer_kind
from mtkit.training.state import OPTIMIZER_NAME, TRAINED_NAME, restore_optimizer
from mtkit.training.step import Updater


def random_model(config: TrainConfig, tokenizer: Tokenizer, device: torch.device) -> Transformer:
    """A model with the weights that the seed gives.

    Args:
        config: Of the run.
        tokenizer: For which it is.
        device: Where it goes.

    Raises:
        ConfigError: The architecture does not fit the tokenizer.
        ResourceError: It does not fit into the memory.
    """
    require_tying_fits(config.model, joint=tokenizer.joint)
    torch.manual_seed(config.seed)
    try:
        model = Transformer(config.model, src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size)
        return model.to(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            f"the weights of the model do not fit into the memory of {device}",
            hint=f"Choose a smaller one, with another --preset or model.d_model, now {config.model.d_model}, ffn_dim or layers.",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialModel:
    """A model that a run begins with; nothing of its weights is read yet.

    Attributes:
        path: Its directory.
        description: Its `config.json`.
        tokenizer: What it was trained with.
    """

    path: Path
    description: ModelDescription
    tokenizer: Tokenizer

    def require_tokenizer(self, tokenizer: Tokenizer, shards: Path) -> None:
        """Refuse data that was encoded otherwise than the model needs it.

        Raises:
            ArtefactError: Names both fingerprints.
        """
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise ArtefactError(
                f"{shards}: was made with the tokenizer {tokenizer.fingerprint[:16]}, but {self.path} needs its own, "
                f"{self.tokenizer.fingerprint[:16]}: the same ids stand for other pieces",
                hint="Name the text itself with --train and --dev: it is then encoded with the model's tokenizer. "
                "Or run `mtkit preprocess` again with the tokenizer that the model was trained with.",
            )

    @torch.no_grad()
    def load_into(self, updater: Updater, *, keep_optimizer: bool) -> None:
        """Put the model's weights into an updater; with `keep_optimizer` the state of its optimizer too.

        Raises:
            ArtefactError: A file is damaged, or the optimizer is of another kind.
        """
        weights = StoredWeights(self.path / MODEL_NAME, self.description)
        copy_parameters(updater.model, weights)
        if updater.ema is not None:
            for name, parameter in updater.model.named_parameters():
                updater.ema[name].copy_(parameter)
        if keep_optimizer:
            if (trained := self.path / TRAINED_NAME).exists():  # what the optimizer has got to; the model's file holds the moving average
                copy_parameters(updater.model, read_tensors(trained, shapes={name: tensor.shape for name, tensor in weights.items()}))
            restore_optimizer(updater.optimizer, updater.parameter_names, self.path / OPTIMIZER_NAME)


def open_initial(config: TrainConfig) -> InitialModel | None:
    """The model that a config names as the beginning, or None if it names none.

    Raises:
        ArtefactError: There is no model, it is damaged, or it has no optimizer and that is to be kept.
        ConfigError: Its architecture is another one, or its optimizer, which is to be kept.
    """
    if config.training.init_from is None:
        return None
    path = find_model(Path(config.training.init_from))
    files = verify_directory(path, level="full").files
    description = read_description(path)
    own = codec.to_dict(description.model)
    changes = [line for line in codec.differences(own, codec.to_dict(config.model)) if not line.startswith(ONLY_IN_TRAINING)]
    if changes:
        options = " ".join(f"--set model.{key}={own[key]}" for key in (line.split(":")[0] for line in changes))
        message = "; ".join(f"model.{line}" for line in changes)
        raise ConfigError(f"{path}: is another model than that of the config: {message}", hint=f"Take the model as it is: {options}")
    if config.training.keep_optimizer and OPTIMIZER_NAME not in files:
        raise ArtefactError(
            f"{path}: holds no optimizer to be kept, for it is no checkpoint",
            hint="Name a checkpoint of a run, such as RUN/checkpoints/step-0001000, or leave out --keep-optimizer.",
        )
    if config.training.keep_optimizer and (stored := read_tensor_header(path / OPTIMIZER_NAME)):
        kind = optimizer_kind(stored)
        if kind != config.optim.optimizer:
            raise ConfigError(
                f"{path}: holds the state of {kind}, but optim.optimizer is {config.optim.optimizer}",
                hint=f"Add --set optim.optimizer={kind}, or leave out --keep-optimizer.",
            )
    tokenizer = Tokenizer.read_files(path / TOKENIZER_NAME)
    require_fitting_tokenizer(tokenizer, description, path)
    return InitialModel(path=path, description=description, tokenizer=tokenizer)
