"""A layer as a list of operators. The model is built from the list of operators, and the planner
computes costs from the same list."""
