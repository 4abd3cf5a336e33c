"""Spec strings, which are texts such as `topk:ratio=0.01` that describe an object. hvdcomp creates the object from the
text, and the object prints as the same text. This folder does not depend on compressors."""
