"""`python -m omnicli`."""

from omnicli.cli import main

main()
