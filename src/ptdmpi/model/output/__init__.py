"""The output of a model: output heads, losses, and the cross-entropy of logits that are divided
over tensor ranks."""
