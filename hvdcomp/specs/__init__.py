"""Spec strings. A spec string is a text, such as `topk:ratio=0.01`, that describes an object. hvdcomp creates the
object from the text, and the object prints as the same text. This folder does not depend on compressors."""
