"""The commands of the command line, by what they are about; `table.py` has the table of them."""
