"""Export and import of adapters in the format of the `peft` package.

The format has the files adapter_model.safetensors and adapter_config.json. A peft adapter belongs
to a module of `transformers`. One module of `transformers` may correspond to several adapters of
ptdmpi: for example, GPT-2's c_attn is a linear layer that computes queries, keys and values. The
adapters of such a linear layer are exported as one adapter, whose rank is the sum of the ranks of
ptdmpi's adapters. The matrix B of the exported adapter is block-diagonal; its blocks are the
matrices B of ptdmpi's adapters. When an adapter of such a linear layer is imported, it becomes
several adapters of ptdmpi, for example for queries, keys and values. Each of these adapters has the
rows of B that compute its outputs, and the rows of A that these rows of B use.
"""
