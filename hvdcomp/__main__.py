"""`python -m hvdcomp` does what the command `hvdcomp` does."""

from hvdcomp.tools.cli import main

if __name__ == "__main__":
    main(prog_name="hvdcomp")
