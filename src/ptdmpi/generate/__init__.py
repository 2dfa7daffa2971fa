"""Generation of text by a trained model: sampling, stopping, and conversations."""
