"""The reference training program, `hvdcomp train`: known models on known data, with compressed gradients.

`options` says what a run is, `frameworks` and `data` build it, `trainer` runs it under Horovod, `outputs` and
`reporter` tell of it. Nothing here is needed to use `hvdcomp.Compression` in a program of one's own.
"""
