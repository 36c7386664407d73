"""The Transformer: its config, its layers, the encoder-decoder, and the cache of incremental decoding."""
