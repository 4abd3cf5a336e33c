"""Runs the command `hvdcomp`, so that it can also be started with `python -m hvdcomp`."""

from hvdcomp.tools.cli import main

if __name__ == "__main__":
    main(prog_name="hvdcomp")
