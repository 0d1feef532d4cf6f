"""The commands of the command line, by what they are about; `controller/cli.py` has the table of them."""
