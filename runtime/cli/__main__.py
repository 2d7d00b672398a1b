"""`python -m pagec.runtime.cli`: the same as `pagec`."""

from pagec.runtime.cli import main

main()
