"""Quality of a trained model: perplexity, multiple choice, generated answers."""
