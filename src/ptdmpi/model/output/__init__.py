"""The end of a model: its heads, the cross-entropy of divided logits, and losses by name."""
