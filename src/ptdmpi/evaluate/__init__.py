"""How good a trained model is: perplexity, multiple choice, generated answers."""
