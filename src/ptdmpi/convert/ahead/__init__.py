"""Modules for multi-token prediction in the files of Hugging Face."""
