"""``python -m panelflow`` is the command ``panelflow``."""

from panelflow.cli import main

main(prog_name="panelflow")
