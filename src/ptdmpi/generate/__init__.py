"""Text from a trained model: sampling, stopping, and the tokenizer that belongs to it."""
