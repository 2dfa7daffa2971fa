"""Outputs of a model that are stored with a dataset: of a reference model for pairs of answers, or
of a teacher for distillation."""
