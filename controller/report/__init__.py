"""`dflashctl report`: one run as one HTML page that needs nothing but a browser."""
