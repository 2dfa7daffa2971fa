"""Outputs of a model that are stored with a dataset. The model is a reference model for training on
pairs of answers, or a teacher for distillation."""
