"""Post-training quantization: a checkpoint whose layers have their matrices in few bits."""
