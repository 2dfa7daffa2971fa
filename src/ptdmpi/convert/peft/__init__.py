"""Export and import of adapters in the format of the `peft` package.

The format has the files adapter_model.safetensors and adapter_config.json. A peft adapter belongs
to a module of `transformers`, which may be one linear with the outputs of several adapters of
ptdmpi (GPT-2's c_attn). Several adapters of one linear are exported as one adapter. The rank of the
exported adapter is the sum of their ranks, and its B is made of blocks. An imported adapter of such
a linear becomes several adapters of ptdmpi, each with all of A and its own rows of B.
"""
