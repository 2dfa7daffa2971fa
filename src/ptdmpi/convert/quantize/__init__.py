"""Post-training quantization: a checkpoint whose layers have quantized weight matrices."""
