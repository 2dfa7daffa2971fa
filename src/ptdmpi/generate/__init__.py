"""Generation of text by a trained model: sampling, stopping, and the tokenizer that belongs to the
model."""
