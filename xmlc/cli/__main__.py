"""Run the command line as ``python -m xmlc.cli``."""

from xmlc.cli import main

main(prog_name="xmlc")
