"""From raw parallel text to batches: corpora, the tokenizer, shards, batching and loading."""
