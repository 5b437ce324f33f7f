"""Modules, and what puts them into models: Hugging Face, transformers' experts, tensor parallelism."""
