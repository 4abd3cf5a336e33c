"""Programs around the core: the command line, measurements, training, reports, launchers, Horovod's build.

The core, which is all other folders of `hvdcomp`, imports nothing of them; `launch` and `horovod_build` import
nothing of the core but its errors and its reading of typed options.
"""
