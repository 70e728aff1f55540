"""`python -m isograd.cli`, for where the script is not on the path."""

from isograd.cli.main import app

app(prog_name="isograd")
