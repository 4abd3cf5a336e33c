"""Programs that use the core: the command line, measurements, training, reports, launchers, and the build of Horovod.

The core consists of all other folders of `hvdcomp`. The core does not import these programs. `launch` and
`horovod_build` import only two parts of the core: its errors, and its functions that read typed options.
"""
