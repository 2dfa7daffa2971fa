"""Adapters in the format of the `peft` package, both ways: adapter_model.safetensors with
adapter_config.json.

Its modules are those of `transformers`, whose linears may be several of ours side by side (GPT-2's
c_attn). Ours beside such a one become one of their ranks together, B block by block; back, each of
ours has all of A and its rows of B.
"""
