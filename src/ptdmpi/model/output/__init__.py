"""The output of a model: its heads, the cross-entropy of logits that are divided over ranks, and
the losses by name."""
