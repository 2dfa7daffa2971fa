"""A layer as data: operators in rows, from which the model is built and the planner counts."""
