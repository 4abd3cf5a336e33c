"""Spec strings: texts such as `topk:ratio=0.01` that describe an object. hvdcomp creates the object from the text, and
the object prints as the same text. This folder knows nothing about compressors."""
