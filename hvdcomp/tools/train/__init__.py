"""The reference training program, `hvdcomp train`: known models on known data, with compressed gradients.

`options` describes a run, `frameworks` and `data` build it, `trainer` prepares it on all ranks, and `run` is the loop.
`outputs` writes its files, and `reporter` shows its progress. Programs that use `hvdcomp.Compression` do not need this
package.
"""
