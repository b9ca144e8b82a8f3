"""Writes checkpoints of any format that can be read in Hugging Face's format or Meta's."""
