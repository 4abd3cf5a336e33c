"""`python -m hvdcomp`: the command `hvdcomp`."""

from hvdcomp.tools.cli import main

if __name__ == "__main__":
    main(prog_name="hvdcomp")
