"""Evaluation of a trained model: perplexity, multiple choice, generated answers, classification and
program tests."""
