"""DeepSeek-V3 in Hugging Face's format: latent attention, and a router with biases and groups."""
