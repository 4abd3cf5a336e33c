"""Programs that use the core: the command line, measurements, training, reports, launchers, and the build of Horovod.

All other folders of `hvdcomp` form the core, which does not import these programs. `launch` and `horovod_build` import
only two parts of the core: its errors, and its functions that read typed options.
"""
