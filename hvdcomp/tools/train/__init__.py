"""The reference training program, `hvdcomp train`, which trains well-known models on well-known data with compressed
gradients.

`options` describes a run. `frameworks` and `data` create the model and the data, `trainer` prepares the run on all
ranks, and `run` has the training loop. `outputs` writes the files, and `reporter` shows the progress. Programs that use
`hvdcomp.Compression` do not need this package.
"""
