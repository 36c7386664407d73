"""Training: from shards to checkpoints and a model."""
