"""Communication-efficient data-parallel methods: theory in matrix form, and a small GPT."""
