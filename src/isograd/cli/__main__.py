"""`python -m isograd.cli`, for where the script is not on the path."""

from isograd.cli.main import app

if __name__ == "__main__":  # processes that a command starts import this module as well
    app(prog_name="isograd")
