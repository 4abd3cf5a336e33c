"""The reference training program, `hvdcomp train`: known models on known data, with compressed gradients.

`options` says what a run is, `frameworks` and `data` build it, `trainer` makes it ready on all ranks, and `run` is the
loop. `outputs` writes its files, and `reporter` shows it. Programs that use `hvdcomp.Compression` need nothing of this.
"""
